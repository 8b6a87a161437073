//! Kernels on the tensor cores of Hopper: `wgmma`, whose products are a warpgroup's; and what is built from their source.

pub(in crate::kernels) mod gated_sm90;
pub(in crate::kernels) mod linear_sm90;
pub(in crate::kernels) mod moe_fp8_sm90;
pub(in crate::kernels) mod moe_sm120;
pub(in crate::kernels) mod moe_sm90;
