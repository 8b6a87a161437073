//! The portable kernel: grouped NVFP4 GEMM, gated or plain, for every GPU from sm_80 on. It uses no tensor core.
//!
//! # Contract
//!
//! * One launch computes [`abi::Group`]'s operation for every group of an array. Grid: one CTA per tile of the groups
//!   ([`abi::Tile::count`]), of [`abi::Instance::THREADS`] threads with [`abi::Instance::shared_bytes`] of dynamic
//!   shared memory. M, N and K may end anywhere in a tile.
//! * Addresses are aligned as [`abi::Group`] says. Scales are finite (never 0x7f) and not negative. The padding of the
//!   scale layout may hold anything.
//! * The kernel writes C's own elements once each, and nothing else. The same input gives the same bits.
//! * 16 products that share their scales are summed exactly, in integers. These sums are added in f32, in the order of
//!   K. α·sum must be finite in f32. Values beyond the output format's range become ±inf.

pub mod abi;
#[cfg(feature = "gated_simt")]
mod kernel;
