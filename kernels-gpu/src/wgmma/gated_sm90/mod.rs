//! The Hopper kernel: grouped NVFP4 GEMM, gated or plain, on the tensor cores of sm_90a.
//!
//! # Contract
//!
//! * One launch computes [`abi::Group`]'s operation for every [`abi::Tile`] of an array. The tiles cover each group's C
//!   once. A CTA starts with the tile of its own index and continues as [`abi::Tile::next`] says, so exactly one CTA
//!   computes each tile. A CTA has [`abi::Instance::threads`] threads and [`abi::Instance::shared_bytes`] of dynamic
//!   shared memory. M, N and K may end anywhere in a tile.
//! * Unless [`abi::Instance::decodes_tokens`], the entry [`abi::TOKENS_ENTRY`] was launched before on the same stream,
//!   for the same groups ([`abi::Tokens`]). It may still run when this launch starts.
//! * Addresses are as [`abi::Group`] and [`abi::Tokens`] say. Scales are finite (never 0x7f) and not negative, in the
//!   padding of the scale layout too, where they are multiplied by zero values.
//! * The kernel writes C's own elements once each, and nothing else. The same input gives the same bits.
//! * Products are exact; the tensor core adds them in f32. α·sum and α·2²⁸ must be finite in f32. Values beyond the
//!   output format's range become ±inf.

pub mod abi;
#[cfg(feature = "gated_sm90")]
mod kernel;
