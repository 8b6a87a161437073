//! The Hopper kernel: grouped NVFP4 GEMM, gated or plain, on the tensor cores of sm_90a.
//!
//! # Contract
//!
//! * One launch computes what [`abi::Group`] says for every [`abi::Tile`] of an array; the tiles cover each group's C once.
//!   Each block begins with the tile of its own index and goes on as [`abi::Tile::next`] says, so that every tile is one
//!   block's. A block has [`abi::Instance::threads`] threads and [`abi::Instance::shared_bytes`] of dynamic shared memory.
//!   M, N and K may end anywhere in a tile.
//! * Unless [`abi::Instance::decodes_tokens`], the entry [`abi::TOKENS_ENTRY`] has been launched on the same stream before,
//!   for the same groups ([`abi::Tokens`]). It may still run when this launch begins.
//! * Addresses are as [`abi::Group`] and [`abi::Tokens`] say. Scales are finite (never 0x7f) and have no sign, in the
//!   padding of the scale layout too: they are multiplied with values that are zero.
//! * It writes C's own elements and nothing else, each once. The same input gives the same bits.
//! * Products are exact; the tensor core adds them up in f32. α·sum and α·2²⁸ must be finite in f32. What is too large for
//!   the output format becomes ±inf.

pub mod abi;
#[cfg(feature = "gated_sm90")]
mod kernel;
