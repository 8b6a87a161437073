//! The products of an MoE layer on Hopper: 16-bit tokens, with the rows of experts known only on the device.
//!
//! [`moe_sm120`](crate::wgmma::moe_sm120) is the same kernel with other instances.
//!
//! # Contract
//!
//! * One launch computes [`Launch`](crate::moe::Launch)'s operation for every row of every expert. Grid: any number of
//!   CTAs of [`abi::Instance::threads`] threads with [`abi::Instance::shared_bytes`] of dynamic shared memory.
//! * Lists are as [`Lists`](crate::lists::Lists) says, with ticket 0. Weights are [`units`](crate::units), packed for
//!   the instance's token type. Scales are finite and not negative.
//! * The grid may start while the previous grid still runs. It reads tokens, and lists if they are pending, after the
//!   previous grid has ended. It lets the next grid start after its own wait.
//! * The kernel writes the rows of C, each element once, and nothing else. Products are exact. The tensor core adds
//!   them in f32 along K, in the same order in every instance, so a row's bits do not depend on other rows. Values
//!   beyond the output format's range become ±inf. A row contains NaN only if its token or its sums do.

pub mod abi;
pub mod by_warp;
#[cfg(feature = "moe_sm90")]
mod entries;
#[cfg(any(feature = "moe_sm90", feature = "moe_sm120"))]
pub(crate) mod kernel;
