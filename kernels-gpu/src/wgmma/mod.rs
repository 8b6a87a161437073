//! Kernels on the tensor cores of Hopper: `wgmma`, whose products are a warpgroup's.

pub mod gated_sm90;
pub mod linear_sm90;
pub mod moe_fp8_sm90;
pub mod moe_sm90;
