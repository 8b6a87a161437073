//! Kernels on the tensor cores of Hopper, whose warpgroups multiply with `wgmma`, and kernels for other GPUs that are
//! built from the same source.

pub(crate) mod gated_sm90;
pub(crate) mod linear_sm90;
pub(crate) mod moe_fp8_sm90;
pub(crate) mod moe_sm120;
pub(crate) mod moe_sm90;
