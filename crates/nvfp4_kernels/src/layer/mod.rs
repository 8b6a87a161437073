//! Kernels that run before and after the products of a layer.

pub mod moe_pack;
pub(crate) mod moe_quantize;
pub(crate) mod moe_quantize_nvfp4;
pub mod moe_route;
#[cfg(feature = "fake")]
mod quantize_fake;
pub mod router;
pub(crate) mod silu_mul;
