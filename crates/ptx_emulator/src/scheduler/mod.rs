//! Choice of the next warp, execution of its instructions, and completion of asynchronous operations. This module knows
//! no opcode.

mod agents;
pub mod cluster;
mod execute;
mod fragments;
mod polls;
mod registers;
mod report;
pub mod slice;
mod special;
mod stall;
mod steps;
mod timed;
mod wait;
