//! Kernels with the products of a warp, `mma.sync`, on any GPU from sm_80 on.

pub mod gated_sm120;
pub mod linear_sm120;
pub mod linear_sm80;
pub mod moe_few_sm90;
pub mod moe_nvfp4_sm120;
pub mod moe_sm120;
pub mod moe_sm80;
