//! Kernels in which each warp multiplies by itself, with `mma.sync`, on GPUs from sm_80 on.

pub mod gated_sm120;
pub mod linear;
pub mod linear_sm120;
pub mod linear_sm80;
pub mod moe_few_sm90;
pub mod moe_nvfp4_sm120;
pub mod moe_sm80;

/// Maximum shared memory of a CTA on every GPU from compute capability 8.0 on, in bytes: 99 KB, the limit on 8.6, 8.9
/// and 12.x (CUDA programming guide, "Technical Specifications per Compute Capability").
pub const SHARED_BYTES: u32 = 99 << 10;
