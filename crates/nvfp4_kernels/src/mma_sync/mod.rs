//! Kernels whose warps multiply by themselves, with `mma.sync`, which every GPU from sm_80 on has.

pub(crate) mod gated_sm120;
pub(crate) mod linear_sm120;
pub(crate) mod linear_sm80;
pub(crate) mod moe_few_sm90;
pub(crate) mod moe_nvfp4_sm120;
pub(crate) mod moe_sm80;
