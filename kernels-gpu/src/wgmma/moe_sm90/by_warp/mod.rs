//! The products of a layer's few tokens on Hopper: the products of a warp, `mma.sync`, and not of a warpgroup.
//!
//! Where there are hardly more tiles than multiprocessors, a product takes as long as a warp takes for the whole of K. So no warp waits
//! for another one here: each copies its own weights, decodes them and multiplies. The contract is that of [`moe_sm90`](super), with
//! [`abi::INSTANCES`] of its own; the next grid may begin when no tile is left. Sums are the same bit by bit.

pub mod abi;
#[cfg(feature = "moe_sm90")]
mod entries;
#[cfg(feature = "moe_sm90")]
mod kernel;
#[cfg(feature = "moe_sm90")]
mod tokens;
#[cfg(feature = "moe_sm90")]
mod weights;
