//! The state of a running kernel: warps, memory, operations in flight, and the scheduler that moves them.

pub mod cluster;
pub mod earlier;
pub mod global;
pub mod mbarrier;
pub mod memory;
pub mod overlap;
pub mod pending;
pub mod sync;
pub mod tmem;
pub mod warp;
pub mod words;
