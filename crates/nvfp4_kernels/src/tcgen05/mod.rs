//! Kernels on the tensor cores of B200 and B300: `tcgen05.mma`, with sums in tensor memory.

pub(crate) mod gated_sm100;
pub(crate) mod moe_sm100;
