//! The Blackwell kernel: grouped NVFP4 GEMM, gated or plain, on the tensor cores of B200 and B300.
//!
//! # Contract
//!
//! * One launch computes what [`abi::Group`] says for every [`abi::Tile`] of an array; the tiles cover each group's C once,
//!   and [`abi::Instance::allows`] each group's M. M, N and K may end anywhere in a tile.
//! * The grid has at most as many blocks as there are tiles, and twice as many where pairs compute tiles; where K is
//!   split, four for each tile. A block has [`abi::Instance::threads`] threads, a cluster [`abi::Instance::cluster`]
//!   blocks; dynamic shared memory is [`abi::Instance::shared_bytes`].
//! * The parameter has the first tiles itself, as [`abi::Launch::new`] puts them there.
//! * Addresses and tensor maps are as [`abi::Group`] says. Scales are finite (never 0x7f) and have no sign, in the padding
//!   of K too: they are multiplied with values that the maps fill with zeros.
//! * It writes C's own elements and nothing else, each once. The same input gives the same bits.
//! * The tensor core adds up products in f32. α·sum must be finite in f32. What is too large for the output format becomes
//!   ±inf.

pub mod abi;
#[cfg(feature = "gated_sm100")]
mod entries;
#[cfg(any(feature = "gated_sm100", feature = "moe_sm100"))]
pub(crate) mod kernel;
