//! Kernels without tensor cores.

pub mod gated_simt;
