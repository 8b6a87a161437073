//! The state of a running cluster: warps, memories, barriers, operations in flight, and what the race detector knows.
//! In `access` is what instructions may do with it, checked. Knows no instruction.

pub mod access;
pub mod address;
pub mod barrier;
pub mod clock;
pub mod earlier;
pub mod global;
pub mod in_flight;
pub mod mbarrier;
pub mod pending;
pub mod race;
pub mod requests;
pub mod state;
pub mod synchronisation;
pub mod tensor_core;
pub mod tensor_memory;
pub mod wait;
pub mod warp;
pub mod words;
