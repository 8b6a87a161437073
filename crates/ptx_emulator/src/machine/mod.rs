//! State of a running cluster: warps, memories, barriers, operations in flight and the data of the race detector. The
//! module `access` holds the checked operations that instructions perform on this state. This module knows no
//! instruction.

pub mod access;
pub mod address;
pub mod barrier;
pub mod beyond;
pub mod clock;
pub mod course;
pub mod dropped_reads;
pub mod earlier;
pub mod footprint;
pub mod frame;
pub mod global;
pub mod grid_races;
pub mod grid_sync;
pub mod in_flight;
pub mod mbarrier;
pub mod pending;
pub mod race;
pub mod race_report;
pub mod requests;
pub mod scope;
pub mod state;
pub mod synchronization;
pub mod tensor_core;
pub mod tensor_memory;
pub mod touches;
pub mod undefined;
pub mod wait;
pub mod warp;
pub mod words;
