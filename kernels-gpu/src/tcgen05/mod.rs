//! Kernels on the tensor cores of B200 and B300: `tcgen05.mma`, with sums in tensor memory.

pub mod gated_sm100;
pub mod moe_sm100;
