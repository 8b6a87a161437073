//! Kernels without tensor cores.

pub(in crate::kernels) mod gated_simt;
