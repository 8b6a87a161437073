//! The fifth-generation tensor core (PTX ISA, "TensorCore 5th Generation Family Instructions"). Descriptors, layouts
//! and arithmetic are in [`crate::hw`]; here is what happens when.
//!
//! Order:
//! - `mma`, `cp` and `shift` of one thread take effect in the order of issue. Under `strict` that holds only for the
//!   pairs that the manual lists as pipelined: `mma` after each of the three, `cp` after `cp`, `shift` after `mma`, and
//!   `cp.4x256b` after `shift`.
//! - `ld` and `st` complete at their waits.
//! - Another thread knows of an `mma` or `cp` through a `commit` and its mbarrier. It knows of an `ld` or `st` through
//!   the wait of the issuing thread and an ordinary barrier.
//! - Under `strict` a barrier orders nothing by itself. `tcgen05.fence::after_thread_sync` must follow it, and for `ld`
//!   and `st` `tcgen05.fence::before_thread_sync` must come before it.

pub mod access;
pub mod allocate;
pub mod cells;
pub mod commit;
pub mod cp;
pub mod fence;
pub mod mma;
pub mod shift;
pub mod turn;
