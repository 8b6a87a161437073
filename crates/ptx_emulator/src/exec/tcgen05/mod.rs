//! The fifth-generation tensor core (PTX ISA, "TensorCore 5th Generation Family Instructions"). Descriptors, layouts and
//! arithmetic are in [`crate::hw`]; here is what happens when.
//!
//! Order: `mma`, `cp` and `shift` of one thread take effect in the order of issue (under `strict`, only the pairs that the
//! manual lists as pipelined: `mma` after each of them, `cp` after `cp`, `shift` after `mma`, `cp.4x256b` after `shift`).
//! `ld` and `st` complete at their waits. Other threads know of an `mma` or `cp` through a `commit` and its mbarrier; of an
//! `ld` or `st` through its wait and an ordinary barrier. Under `strict` the barrier counts only between
//! `tcgen05.fence::before_thread_sync` (for `ld` and `st`) and `tcgen05.fence::after_thread_sync`.

pub mod access;
pub mod allocate;
pub mod cells;
pub mod commit;
pub mod cp;
pub mod fence;
pub mod mma;
pub mod shift;
pub mod turn;
