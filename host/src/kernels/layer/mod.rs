//! Kernels that run before and after the products of a layer.

pub(crate) mod moe_pack;
pub(in crate::kernels) mod moe_quantize;
pub(in crate::kernels) mod moe_quantize_nvfp4;
pub(crate) mod moe_route;
#[cfg(all(test, feature = "cuda"))]
mod quantize_fake;
pub mod router;
pub(in crate::kernels) mod silu_mul;
