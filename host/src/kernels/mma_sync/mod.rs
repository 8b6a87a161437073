//! Kernels whose warps multiply by themselves, with `mma.sync`, which every GPU from sm_80 on has.

pub(in crate::kernels) mod gated_sm120;
pub(in crate::kernels) mod linear_sm120;
pub(in crate::kernels) mod linear_sm80;
pub(in crate::kernels) mod moe_few_sm90;
pub(in crate::kernels) mod moe_nvfp4_sm120;
pub(in crate::kernels) mod moe_sm80;
