//! Which warp runs next, what it does with its instructions, and when asynchronous operations complete. Knows no
//! opcode.

pub mod cluster;
mod execute;
mod fragments;
mod polls;
mod registers;
mod report;
pub mod slice;
mod special;
mod timed;
mod wait;
