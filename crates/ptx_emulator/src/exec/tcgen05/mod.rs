//! The fifth-generation tensor core (PTX ISA, "TensorCore 5th Generation Family Instructions"). Descriptors, layouts
//! and arithmetic are in [`crate::hw`]. This module determines when each operation takes effect.
//!
//! Order:
//! - `mma`, `cp` and `shift` of one thread take effect in the order of issue. Under `strict` only the pairs that the
//!   manual lists as pipelined keep this order: `mma` after `mma`, `cp` or `shift`; `cp` after `cp`; `shift` after
//!   `mma`; and `cp.4x256b` after `shift`.
//! - `ld` and `st` complete at their waits.
//! - Another thread is ordered after an `mma` or `cp` by a `commit` and its mbarrier. It is ordered after an `ld` or
//!   `st` by the issuing thread's wait and an ordinary barrier.
//! - Under `strict` a barrier alone orders nothing. `tcgen05.fence::after_thread_sync` must follow it. For `ld` and
//!   `st`, `tcgen05.fence::before_thread_sync` must also precede it.

pub mod access;
pub mod allocate;
pub mod cells;
pub mod commit;
pub mod cp;
pub mod fence;
pub mod mma;
pub mod shift;
pub mod turn;
