//! An MoE layer with few tokens on Hopper, in two launches: gate and up, then down and the weighted sum of each token's
//! rows.
//!
//! With few tokens the time of a layer consists of its launches, the prologues before the mainloops, and one warp's
//! way along K. So there is no launch for lists or sums: every CTA finds the named experts itself, and has all rows of
//! the columns that it adds up. In the mainloop no warp waits for another warp. Each warp has *strips* of 16 rows of
//! weights. It copies them to its own stages, from strip to strip without a gap. Tokens are loaded into registers one
//! k-block ahead; a single token is copied to the stages, with the weights.
//!
//! # Contract
//!
//! * A gate-and-up entry takes [`abi::GateUp`], a down entry [`abi::Down`]. Grid: any number of CTAs for gate and up,
//!   [`abi::Down::blocks`] CTAs for down, of up to [`abi::MAX_WARPS`] warps with [`abi::Blocks::shared_bytes`] of
//!   dynamic shared memory. [`abi::ONE_GATE_UP_ENTRIES`] and [`abi::ONE_DOWN_ENTRIES`] take one token.
//! * Weights are [`units`](crate::units), packed for the entry's token type. Scales are finite and not negative. Tokens
//!   and the intermediate have their columns in natural order.
//! * A grid may start while the previous grid still runs. Gate and up access global memory after the previous grid has
//!   ended, and then let the next grid start. Down must follow gate and up: before gate and up have ended, down reads
//!   their inputs, namely ids, weights of choices and weights of experts.
//! * Gate and up write a row of the intermediate per [row](abi::Choices). Down writes the output. Each element is
//!   written once, whatever the memory held before.
//! * Products are exact. The tensor core adds them in f32 along K in the order of [`moe_sm90`](crate::wgmma::moe_sm90),
//!   and rows are rounded at the same places, so the bits are the same. Values beyond the output format's range become
//!   ±inf, only for their token.

pub mod abi;
#[cfg(feature = "moe_few_sm90")]
mod kernel;
