//! What host and `router` agree on: the parameter and sizes.

use bytemuck::{Pod, Zeroable};

pub use crate::lists::{MAX_EXPERTS, MAX_TOP_K};

const _: () =
    assert!(MAX_EXPERTS == 16 * 32 && MAX_TOP_K == 32, "a lane has 16 experts, and one of those that a token is given");

/// The most groups, one a lane.
pub const MAX_GROUPS: u32 = 32;

/// Threads of a block.
pub const THREADS: u32 = 128;

/// Tokens of a block: one a warp.
pub const TOKENS: u32 = THREADS / 32;

/// Logits are f32; else [`OUTPUT_F16`](crate::format::OUTPUT_F16) or [`OUTPUT_BF16`](crate::format::OUTPUT_BF16).
pub const LOGITS_F32: u32 = 2;

/// Weights are softmax over all experts.
pub const SOFTMAX: u32 = 0;

/// As [`SOFTMAX`], over the chosen experts alone.
pub const SOFTMAX_OF_CHOSEN: u32 = 1;

/// Weights are sigmoids.
pub const SIGMOID: u32 = 2;

/// As [`SIGMOID`], divided by the sum of those of the chosen experts and [`LEAST_SUM`](super::score::LEAST_SUM).
pub const SIGMOID_SHARES: u32 = 3;

/// The one parameter of the kernel.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Launch {
    /// Address of the logits: rows of `experts` numbers, `pitch` elements apart.
    pub logits: u64,
    /// Elements from one token's logits to the next one's.
    pub pitch: u64,
    /// Address of biases, `[experts]`, f32: what is compared are the sigmoids of logits, each with its bias. 0 if it is logits.
    pub bias: u64,
    /// Address of the experts of each token, `[token_count, top_k]`, i32, the best first.
    pub ids: u64,
    /// Address of their weights, f32.
    pub weights: u64,
    /// T.
    pub token_count: u32,
    /// E, from 1 to [`MAX_EXPERTS`].
    pub experts: u32,
    /// k, from 1 to [`MAX_TOP_K`] and no more than the experts of the groups that are taken.
    pub top_k: u32,
    /// [`LOGITS_F32`], or a type of 16 bits.
    pub format: u32,
    /// [`SOFTMAX`], [`SOFTMAX_OF_CHOSEN`], [`SIGMOID`] or [`SIGMOID_SHARES`].
    pub scoring: u32,
    /// Groups of neighboring experts, from 1 to [`MAX_GROUPS`]; equally many in each, two at least if there are several.
    pub groups: u32,
    /// Groups whose experts may be chosen.
    pub top_groups: u32,
    /// What weights are multiplied with, of sigmoids.
    pub scale: f32,
}

/// Blocks of a grid; none where there is no token.
pub const fn blocks(token_count: u32) -> u64 {
    token_count.div_ceil(TOKENS) as u64
}

/// Dynamic shared memory of a block: the keys of its tokens' experts where there are groups.
pub const fn shared_bytes(experts: u32, groups: u32) -> u32 {
    if groups > 1 { TOKENS * experts * 4 } else { 0 }
}
