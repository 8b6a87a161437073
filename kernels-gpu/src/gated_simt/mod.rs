//! The portable kernel: grouped NVFP4 GEMM, gated or plain, for every card from sm_80 on. No tensor core.
//!
//! # Contract
//!
//! * Computes what [`Group`](abi::Group) says for every group of the array, in one launch: a grid of as many blocks as the
//!   groups have tiles ([`Tile::count`](abi::Tile::count)), [`Tile::THREADS`](abi::Tile::THREADS) threads each, [`Tile::shared_bytes`](abi::Tile::shared_bytes) of
//!   dynamic shared memory. M, N and K may end anywhere in a tile.
//! * Addresses are aligned as [`Group`](abi::Group) says; scales are finite (never 0x7f) and have no sign; padding of the
//!   scale layout may hold anything.
//! * Writes C's own elements and nothing else, each once. The same input gives the same bits.
//! * A block of 16 products is summed exactly, in integers; blocks are added up in f32, in the order of K.
//!   α·sum must be finite in f32. Overflow of the output format gives ±inf.

pub mod abi;
#[cfg(feature = "gated_simt")]
mod kernel;
