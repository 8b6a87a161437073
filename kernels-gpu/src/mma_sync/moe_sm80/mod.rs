//! The products of an MoE layer on any GPU from sm_80 on: 16-bit tokens, with the rows of experts known only on the
//! device.
//!
//! # Contract
//!
//! * One launch computes [`Launch`](crate::moe::Launch)'s operation for every row of every expert. Grid: any number of
//!   CTAs of [`abi::Instance::threads`] threads with [`abi::Instance::shared_bytes`] of dynamic shared memory.
//! * Lists are as [`Lists`](crate::lists::Lists) says, with ticket 0. Weights are [`units`](crate::units), packed for
//!   the instance's token type. Scales are finite and not negative.
//! * The previous grid has ended when this grid starts.
//! * The kernel writes the rows of C, each element once, and nothing else. Products are exact. The tensor core adds
//!   them in f32 along K, in the same order in every instance: the order of [`moe_sm90`](crate::wgmma::moe_sm90) and
//!   [`moe_sm120`](crate::wgmma::moe_sm120). So a row's bits do not depend on other rows. Values beyond the output
//!   format's range become ±inf. A row contains NaN only if its token or its sums do.

pub mod abi;
#[cfg(feature = "moe_sm80")]
mod kernel;
