//! Runs PTX on the CPU and finds its bugs.

pub mod hw;
