//! An MoE layer's few tokens on Hopper, in two launches: gate and up, then down and the weighted sum of each token's rows.
//!
//! With few tokens a layer takes as long as its launches, what stands before their main loops, and one warp's way along K. So nothing
//! is launched for lists or sums: every block finds out by itself which experts are named, and has all rows of its columns that are
//! added up. No warp waits for another one in its main loop. Each has *strips* of 16 rows of weights, which it copies to stages of its
//! own, from one strip to the next without a gap. Tokens come to registers, a k-block ahead; a single one comes to the stages, with
//! the weights.
//!
//! # Contract
//!
//! * A launch of a gate-and-up entry is for [`abi::GateUp`], one of a down entry for [`abi::Down`]. Its grid has any number of blocks
//!   for the former and [`abi::Down::blocks`] for the latter, of up to [`abi::MAX_WARPS`] warps with [`abi::Blocks::shared_bytes`] of
//!   dynamic shared memory. [`abi::ONE_GATE_UP_ENTRIES`] and [`abi::ONE_DOWN_ENTRIES`] have one token.
//! * Weights are [`units`](crate::units), packed for the entry's type of tokens. Scales are finite and have no sign. Tokens and the
//!   intermediate have their columns in natural order.
//! * A grid may begin while the one before it still runs. Gate and up read and write global memory when that one has ended, and then let
//!   the next one begin. Down must follow gate and up: it reads what those have read before, ids, weights of choices and of experts,
//!   before they have ended.
//! * Gate and up write a row of the intermediate for each [row](abi::Choices), down writes the output, each element once, whatever was
//!   there. Products are exact; the tensor core adds them up in f32 along K in the order of [`moe_sm90`](crate::wgmma::moe_sm90), and a row is
//!   rounded where that rounds it, so that the bits are the same. What is too large becomes ±inf, of its token alone.

pub mod abi;
#[cfg(feature = "moe_few_sm90")]
mod kernel;
