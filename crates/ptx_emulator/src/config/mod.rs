//! Inputs and results of a launch: configuration, report and faults. This module knows no instruction.

pub mod fault;
pub mod launch;
pub mod names;
pub mod order;
pub mod report;
