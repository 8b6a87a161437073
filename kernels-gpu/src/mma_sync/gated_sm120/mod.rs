//! The kernel for GeForce RTX 50, RTX PRO and DGX Spark: grouped NVFP4 GEMM, gated or plain, on the tensor cores of
//! sm_120 and sm_121.
//!
//! # Contract
//!
//! * One launch computes [`abi::Group`]'s operation for every [`abi::Tile`] of an array. The tiles cover each group's C
//!   once. M, N and K may end anywhere in a tile.
//! * Grid: at most one CTA per tile, of [`abi::Instance::threads`] threads with [`abi::Instance::shared_bytes`] of
//!   dynamic shared memory.
//! * Addresses and tensor maps are as [`abi::Group`] says. Scales are finite (never 0x7f) and not negative, in the
//!   padding of K too, where they are multiplied by zero values.
//! * The kernel writes C's own elements once each, and nothing else. The same input gives the same bits.
//! * The tensor core adds products in f32. α·sum must be finite in f32. Values beyond the output format's range become
//!   ±inf.

pub mod abi;
#[cfg(feature = "gated_sm120")]
mod entries;
#[cfg(any(feature = "gated_sm120", feature = "moe_nvfp4_sm120"))]
pub(crate) mod kernel;
