//! The linear layer for few tokens: the products of a warp, `mma.sync`, and not of a warpgroup.
//!
//! Few tokens leave `wgmma` idle, whose block has 64 columns at least: a warp has 16, so that more multiprocessors decode. The contract
//! is that of [`linear_sm90`](super), with [`abi::INSTANCES`] of its own and a block for each tile. Sums are the same bit by bit: an
//! H200 adds up the products of either instruction alike.

pub mod abi;
#[cfg(feature = "linear_sm90")]
mod entries;
#[cfg(any(feature = "linear_sm90", feature = "linear_sm120"))]
pub(crate) mod kernel;
