//! The kernel for GeForce RTX 50, RTX PRO and DGX Spark: grouped NVFP4 GEMM, gated or plain, on the tensor cores of sm_120 and
//! sm_121.
//!
//! # Contract
//!
//! * One launch computes what [`abi::Group`] says for every [`abi::Tile`] of an array; the tiles cover each group's C once. M, N
//!   and K may end anywhere in a tile.
//! * The grid has at most as many blocks as there are tiles. A block has [`abi::Instance::threads`] threads and
//!   [`abi::Instance::shared_bytes`] of dynamic shared memory.
//! * Addresses and tensor maps are as [`abi::Group`] says. Scales are finite (never 0x7f) and have no sign, in the padding
//!   of K too: they are multiplied with values that are zero.
//! * It writes C's own elements and nothing else, each once. The same input gives the same bits.
//! * The tensor core adds up products in f32. α·sum must be finite in f32. What is too large for the output format becomes
//!   ±inf.

pub mod abi;
#[cfg(feature = "gated_sm120")]
mod entries;
#[cfg(any(feature = "gated_sm120", feature = "moe_nvfp4_sm120"))]
pub(crate) mod kernel;
