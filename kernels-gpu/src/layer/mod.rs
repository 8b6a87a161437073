//! Kernels that surround the products of a layer.

pub mod moe_pack;
pub mod moe_quantize;
pub mod moe_quantize_nvfp4;
pub mod moe_route;
pub mod router;
pub mod silu_mul;
