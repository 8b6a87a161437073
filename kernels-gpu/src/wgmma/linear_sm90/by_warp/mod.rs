//! The linear layer for few tokens: the products of a warp, `mma.sync`, and not of a warpgroup.
//!
//! Few tokens leave `wgmma` idle while a warpgroup decodes for it: a warp multiplies each word as soon as it is decoded, and waits for no
//! other warp. The contract is that of [`linear_sm90`](super), with [`abi::INSTANCES`] of its own and a block for each tile. Sums are the
//! same bit by bit: an H200 adds up the products of either instruction alike.
//!
//! `strip.rs` is what a warp makes of a stage, `kernel.rs` how stages are filled by bulk copies. [`linear_sm80`](crate::mma_sync::linear_sm80) fills
//! them another way.

pub mod abi;
#[cfg(feature = "linear_sm90")]
mod entries;
#[cfg(any(feature = "linear_sm90", feature = "linear_sm120"))]
pub(crate) mod kernel;
#[cfg(any(feature = "linear_sm90", feature = "linear_sm120", feature = "linear_sm80"))]
pub(crate) mod strip;
