//! Definitions that host and `router` share: the parameter and sizes.

use bytemuck::{Pod, Zeroable};

pub use crate::lists::{MAX_EXPERTS, MAX_TOP_K, SMALL_EXPERTS};

const _: () =
    assert!(SMALL_EXPERTS == 16 * 32 && MAX_TOP_K == 32, "a lane must have 16 experts and one choice of the token");

/// Maximum number of groups of [`Launch`], one per lane.
pub const MAX_GROUPS: u32 = 32;

/// Threads per CTA.
pub const THREADS: u32 = 128;

/// Tokens per CTA: one per warp.
pub const TOKENS: u32 = THREADS / 32;

/// Format of f32 logits. Other formats are [`OUTPUT_F16`](crate::format::OUTPUT_F16) and
/// [`OUTPUT_BF16`](crate::format::OUTPUT_BF16).
pub const LOGITS_F32: u32 = 2;

/// Weights are softmax over all experts.
pub const SOFTMAX: u32 = 0;

/// Weights are softmax over the chosen experts alone.
pub const SOFTMAX_OF_CHOSEN: u32 = 1;

/// Weights are sigmoids.
pub const SIGMOID: u32 = 2;

/// Weights are sigmoids, divided by the sum of the chosen experts' sigmoids plus
/// [`LEAST_SUM`](super::score::LEAST_SUM).
pub const SIGMOID_SHARES: u32 = 3;

/// The only parameter of the entry `router`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Launch {
    /// Address of the logits: rows of `experts` numbers, `pitch` elements apart.
    pub logits: u64,
    /// Elements from one token's logits to the next one's.
    pub pitch: u64,
    /// Address of biases, `[experts]`, f32. With biases, experts are compared by sigmoid(logit) + bias. 0: experts are
    /// compared by logit.
    pub bias: u64,
    /// Address of the experts of each token, `[token_count, top_k]`, i32, best first.
    pub ids: u64,
    /// Address of the experts' weights, f32.
    pub weights: u64,
    /// T.
    pub token_count: u32,
    /// E, from 1 to [`SMALL_EXPERTS`].
    pub experts: u32,
    /// k, from 1 to [`MAX_TOP_K`], at most the number of experts in `top_groups` groups.
    pub top_k: u32,
    /// [`LOGITS_F32`], or a 16-bit format.
    pub format: u32,
    /// [`SOFTMAX`], [`SOFTMAX_OF_CHOSEN`], [`SIGMOID`] or [`SIGMOID_SHARES`].
    pub scoring: u32,
    /// Number of groups of neighboring experts, from 1 to [`MAX_GROUPS`]. All groups have the same number of experts,
    /// at least two if there are several groups.
    pub groups: u32,
    /// Number of groups whose experts may be chosen.
    pub top_groups: u32,
    /// Factor of the weights, for sigmoids.
    pub scale: f32,
}

/// CTAs per grid; 0 if there are no tokens.
pub const fn blocks(token_count: u32) -> u64 {
    token_count.div_ceil(TOKENS) as u64
}

/// Dynamic shared memory of a CTA, in bytes: the keys of its tokens' experts if there are groups.
pub const fn shared_bytes(experts: u32, groups: u32) -> u32 {
    if groups > 1 { TOKENS * experts * 4 } else { 0 }
}

/// Name of the entry for any rule and up to [`MAX_EXPERTS`] experts.
pub const RULE_ENTRY: &str = "router_rule";

/// Score of an expert: softmax over all experts.
pub const SCORE_SOFTMAX: u32 = 0;

/// Score of an expert: sigmoid.
pub const SCORE_SIGMOID: u32 = 1;

/// Score of an expert: [`sqrt_softplus`](super::score::sqrt_softplus).
pub const SCORE_SQRT_SOFTPLUS: u32 = 2;

/// The only parameter of [`RULE_ENTRY`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct RuleLaunch {
    /// Address of the logits: rows of `experts` numbers, `pitch` elements apart.
    pub logits: u64,
    /// Elements from one token's logits to the next one's.
    pub pitch: u64,
    /// Address of biases, `[experts]`, f32. With biases, experts are compared by score + bias. 0: by logit.
    pub bias: u64,
    /// Address of the experts of each token, `[token_count, top_k]`, i32, best first.
    pub ids: u64,
    /// Address of the experts' weights, f32.
    pub weights: u64,
    /// Address of one factor of the weights per expert, `[experts]`, f32; 0 for none.
    pub expert_scale: u64,
    /// Address of the experts of each token id, `[vocabulary, top_k]`, i32; 0: experts are chosen by their scores.
    pub table: u64,
    /// Address of the id of each token, `[token_count]`, i32. Read only if there is a table.
    pub token_ids: u64,
    /// T.
    pub token_count: u32,
    /// E, from 1 to [`MAX_EXPERTS`].
    pub experts: u32,
    /// k, from 1 to [`MAX_TOP_K`], at most the number of experts in `top_groups` groups.
    pub top_k: u32,
    /// [`LOGITS_F32`], or a 16-bit format.
    pub format: u32,
    /// [`SCORE_SOFTMAX`], [`SCORE_SIGMOID`] or [`SCORE_SQRT_SOFTPLUS`].
    pub score: u32,
    /// 1: weights are divided by their sum plus [`LEAST_SUM`](super::score::LEAST_SUM).
    pub renormalize: u32,
    /// Number of groups of neighboring experts, all of the same size.
    pub groups: u32,
    /// Number of groups whose experts may be chosen.
    pub top_groups: u32,
    /// 1: groups are compared by the sum of their two greatest scores, and have at least two experts. 0: by the greatest
    /// score.
    pub best_two: u32,
    /// First of the experts without weights. If one of them is chosen, its id is −1.
    pub null_from: u32,
    /// Number of token ids in the table.
    pub vocabulary: u32,
    /// Factor of the weights.
    pub scale: f32,
}

/// Dynamic shared memory of a CTA of [`RULE_ENTRY`], in bytes: the keys of its tokens' experts and groups if there are
/// groups.
pub const fn rule_shared_bytes(experts: u32, groups: u32) -> u32 {
    if groups > 1 { TOKENS * (experts + groups) * 4 } else { 0 }
}
