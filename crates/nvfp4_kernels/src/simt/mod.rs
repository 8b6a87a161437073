//! Kernels without tensor cores.

pub(crate) mod gated_simt;
