//! The Blackwell kernel: grouped NVFP4 GEMM, gated or plain, on the tensor cores of B200 and B300.
//!
//! # Contract
//!
//! * One launch computes [`abi::Group`]'s operation for every [`abi::Tile`] of an array. The tiles cover each group's C
//!   once, and [`abi::Instance::allows`] accepts each group's M. M, N and K may end anywhere in a tile.
//! * Grid: at most one CTA per tile; at most two CTAs per tile if pairs compute tiles; four CTAs per tile if K is
//!   split. A CTA has [`abi::Instance::threads`] threads and [`abi::Instance::shared_bytes`] of dynamic shared memory,
//!   a cluster [`abi::Instance::cluster`] CTAs.
//! * The parameter contains the first tiles, placed by [`abi::Launch::new`].
//! * Addresses and tensor maps are as [`abi::Group`] says. Scales are finite (never 0x7f) and not negative, in the
//!   padding of K too, where they are multiplied by values that the tensor maps fill with zeros.
//! * The kernel writes C's own elements once each, and nothing else. The same input gives the same bits.
//! * The tensor core adds products in f32. α·sum must be finite in f32. Values beyond the output format's range become
//!   ±inf.

pub mod abi;
#[cfg(feature = "gated_sm100")]
mod entries;
#[cfg(any(feature = "gated_sm100", feature = "moe_sm100"))]
pub(crate) mod kernel;
