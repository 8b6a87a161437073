//! Kernels for the steps of a layer around its products.

pub mod moe_pack;
pub mod moe_quantize;
pub mod moe_quantize_nvfp4;
pub mod moe_route;
pub mod router;
pub mod silu_mul;
