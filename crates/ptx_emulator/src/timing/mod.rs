//! Time model: costs of a GPU's units, separate from the semantics of instructions. `docs/time-model.md` explains the
//! model.
//!
//! - [`card`]: the constants of each card, each with its source.
//! - [`cost`]: what an instruction asks of a warp scheduler and its pipes; [`sass`] refines it by the machine code.
//! - [`work`]: what an asynchronous operation asks of the card.
//! - [`core`]: a multiprocessor: clocks of warps, issue ports, pipes, shared memory, tensor core.
//! - [`memory`]: L2 and DRAM, which all multiprocessors share.
//! - [`report`]: where the time went; [`trace`] draws it.

pub mod calendar;
pub mod card;
pub mod core;
pub mod cost;
pub mod memory;
pub mod report;
pub mod sass;
pub mod trace;
pub mod work;
