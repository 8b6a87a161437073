//! Kernels on the tensor cores of B200 and B300: `tcgen05.mma`, with sums in tensor memory.

pub(in crate::kernels) mod gated_sm100;
pub(in crate::kernels) mod moe_sm100;
