//! Products of an MoE layer with few tokens on Hopper: products of a warp (`mma.sync`) instead of a warpgroup.
//!
//! If there are hardly more tiles than SMs, a product takes as long as one warp takes for the whole of K. So no warp
//! waits for another one here: each warp copies its own weights, decodes them and multiplies. The contract is the
//! contract of [`moe_sm90`](super), with separate [`abi::INSTANCES`]; the next grid may start when no tile is left.
//! Sums are bit-identical.

pub mod abi;
#[cfg(feature = "moe_sm90")]
mod entries;
#[cfg(feature = "moe_sm90")]
mod kernel;
#[cfg(feature = "moe_sm90")]
mod tokens;
#[cfg(feature = "moe_sm90")]
mod weights;
