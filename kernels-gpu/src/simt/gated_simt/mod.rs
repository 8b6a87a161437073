//! The portable kernel: grouped NVFP4 GEMM, gated or plain, for every card from sm_80 on. It uses no tensor core.
//!
//! # Contract
//!
//! * One launch computes what [`abi::Group`] says for every group of an array. Its grid has a block for each tile of the
//!   groups ([`abi::Tile::count`]); a block has [`abi::Instance::THREADS`] threads and [`abi::Instance::shared_bytes`] of
//!   dynamic shared memory. M, N and K may end anywhere in a tile.
//! * Addresses are aligned as [`abi::Group`] says. Scales are finite (never 0x7f) and have no sign. The padding of the
//!   scale layout may hold anything.
//! * It writes C's own elements and nothing else, each once. The same input gives the same bits.
//! * 16 products that share their scales are summed exactly, in integers; these sums are added up in f32, in the order of
//!   K. α·sum must be finite in f32. What is too large for the output format becomes ±inf.

pub mod abi;
#[cfg(feature = "gated_simt")]
mod kernel;
