//! What a caller sets and gets: how to launch, what a launch did, what went wrong. Knows no instruction.

pub mod fault;
pub mod launch;
pub mod names;
pub mod report;
