//! Kernels on the tensor cores of Hopper, whose warpgroups multiply with `wgmma`, and kernels for other GPUs that are
//! built from the same source.

pub(in crate::kernels) mod gated_sm90;
pub(in crate::kernels) mod linear_sm90;
pub(in crate::kernels) mod moe_fp8_sm90;
pub(in crate::kernels) mod moe_sm120;
pub(in crate::kernels) mod moe_sm90;
