//! Time model: costs of a GPU's units, separate from the semantics of instructions. `benches/lab/time-model.md` explains the
//! model.
//!
//! - [`card`]: constants of each GPU, each with its source.
//! - [`cost`]: load of an instruction on a warp scheduler and its pipes. [`sass`] refines it with machine code.
//! - [`work`]: load of an asynchronous operation on the GPU.
//! - [`core`]: an SM: clocks of warps, issue ports, pipes, shared memory, tensor core.
//! - [`memory`]: L2 and DRAM, which all SMs share.
//! - [`report`]: breakdown of the time. [`trace`] draws it.

pub mod calendar;
pub mod card;
pub mod core;
pub mod cost;
pub mod memory;
pub mod report;
pub mod sass;
pub mod trace;
pub mod work;
