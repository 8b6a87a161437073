//! Definitions that host and `moe_few_sm90` share: parameters, limits on the number of tokens, and the layout of shared
//! memory.
//!
//! A *strip* is 16 rows of weights, the M of a warp's product: 16 rows of down, or 8 rows of gate and the same 8 rows
//! of up.

use bytemuck::{Pod, Zeroable};

use crate::{
    epilogue::Activation,
    units::{K_BLOCK, UNIT_BYTES, UNIT_ROWS},
};

/// Entries of gate and up, for f16 and for bf16.
pub const GATE_UP_ENTRIES: [&str; 2] = ["moe_few_gate_up_f16", "moe_few_gate_up_bf16"];
/// Entries of down, for f16 and for bf16.
pub const DOWN_ENTRIES: [&str; 2] = ["moe_few_down_f16", "moe_few_down_bf16"];
/// Entries of gate and up for a single token ([`Blocks::one`]), for f16 and for bf16.
pub const ONE_GATE_UP_ENTRIES: [&str; 2] = ["moe_one_gate_up_f16", "moe_one_gate_up_bf16"];
/// Entries of down for a single token ([`Blocks::one`]), for f16 and for bf16.
pub const ONE_DOWN_ENTRIES: [&str; 2] = ["moe_one_down_f16", "moe_one_down_bf16"];

/// Maximum number of tokens: the N of a warp's product.
pub const MAX_TOKENS: u32 = 8;

/// Maximum number of choices, T·k: two per lane of a warp.
pub const MAX_CHOICES: u32 = 64;

/// Maximum number of warps per CTA. A CTA with this many warps has an SM to itself.
pub const MAX_WARPS: u32 = 20;

/// Number of warps per CTA if gate and up then have at most one strip per warp. CTAs of both launches then share an SM.
pub const FEW_WARPS: u32 = MAX_WARPS / 2;

/// Maximum number of threads per CTA.
pub const MAX_THREADS: u32 = MAX_WARPS * 32;

/// Rows of weights per strip.
pub const STRIP_ROWS: u32 = UNIT_ROWS;

/// Bytes of a whole k-block of one token.
pub const TOKEN_BYTES: u32 = K_BLOCK * 2;

/// Bytes of a stage: the strip's k-block, followed by the single token's k-block if `one`.
pub const fn stage_bytes(one: bool) -> u32 {
    if one { UNIT_BYTES + TOKEN_BYTES } else { UNIT_BYTES }
}

/// Stages per warp with several tokens. With 6 stages an SM has more bytes in flight than memory delivers in one
/// latency.
pub const STAGES: u32 = 6;

/// Stages per warp with a single token.
pub const ONE_STAGES: u32 = 7;

/// Stages per warp.
pub const fn stages(one: bool) -> u32 {
    if one { ONE_STAGES } else { STAGES }
}

/// Bytes of a CTA's lists: per named expert, its number with its number of rows, and its rows; per choice, its row and
/// its weight; and the number of named experts.
pub const LISTS_BYTES: u32 = (MAX_CHOICES + MAX_CHOICES * MAX_TOKENS + MAX_CHOICES + MAX_CHOICES) * 4 + 16;

/// Maximum number of down's strips per CTA.
pub const BLOCK_STRIPS: u32 = 4;

/// Bytes of a row's columns in one strip.
pub const ROW_BYTES: u32 = STRIP_ROWS * 2;

/// Offset of the warps' stages in a CTA's shared memory: after the lists and the rows of down's strips.
pub const STAGES_AT: u32 = (LISTS_BYTES + BLOCK_STRIPS * MAX_CHOICES * ROW_BYTES).next_multiple_of(128);

/// The CTAs of both launches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// Warps per CTA.
    pub warps: u32,
    /// Whether the launches use the entries for a single token, whose stages hold the token beside the weights.
    pub one: bool,
}

impl Blocks {
    /// CTAs for `tokens` tokens, up to `choices` choices and an intermediate of `n` columns.
    pub const fn of(tokens: u32, choices: u32, n: u32, multiprocessors: u32) -> Self {
        if GateUp::strips(choices, n) <= multiprocessors as u64 * FEW_WARPS as u64 {
            Self { warps: FEW_WARPS, one: false }
        } else {
            Self { warps: MAX_WARPS, one: tokens == 1 }
        }
    }

    /// Dynamic shared memory per CTA, in bytes. Gate and up take as much as down, so that an SM splits its memory
    /// between shared memory and L1 in the same way for both.
    pub const fn shared_bytes(self) -> u32 {
        STAGES_AT + self.warps * stages(self.one) * stage_bytes(self.one)
    }
}

/// The experts that the tokens name. Choice t·k + j has the *row* of the same number, with two exceptions: it has no
/// row if its expert is not in the layer, and it shares the row of an earlier choice if its token named the same expert
/// there.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Choices {
    /// Address of the ids `[T, k]`, i32. An id that is negative or at least `named_experts` names no expert.
    pub ids: u64,
    /// Address of the map from each expert that can be named to its number in the layer, i32, negative for experts
    /// outside the layer; or 0.
    pub map: u64,
    /// Number of tokens T, up to [`MAX_TOKENS`]; T·k is up to [`MAX_CHOICES`].
    pub token_count: u32,
    /// Number of choices per token k, from 1 to [`MAX_TOP_K`](crate::lists::MAX_TOP_K).
    pub top_k: u32,
    /// Number of experts E, from 1 to [`MAX_EXPERTS`](crate::lists::MAX_EXPERTS).
    pub experts: u32,
    /// Number of experts that can be named: the length of `map`, or E.
    pub named_experts: u32,
}

/// The matrices of all experts: gate and up, or down.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Matrices {
    /// Addresses of the units of the first expert's gate and up, or of its down (the second address is then unused);
    /// multiples of 16.
    pub b: [u64; 2],
    /// Bytes between the matrices of neighboring experts.
    pub expert_bytes: u64,
    /// Addresses of one factor per expert, f32: the global scales of gate and up, or of down.
    pub alpha: [u64; 2],
    /// Addresses of the biases, which are added after the factor: `[experts, n]`, f32, in the order of each B's rows; 0
    /// for no biases.
    pub bias: [u64; 2],
    /// Rows of each B; a multiple of 16.
    pub n: u32,
    /// Number of elements that are summed; a multiple of 16, not 0.
    pub k: u32,
}

/// Parameter of [`GATE_UP_ENTRIES`] and [`ONE_GATE_UP_ENTRIES`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct GateUp {
    /// The named experts.
    pub choices: Choices,
    /// Gate and up. Their rows are packed in the order of K ([`units`](crate::units)).
    pub matrices: Matrices,
    /// Address of the tokens X, a multiple of 16: rows of `k` 16-bit numbers, `token_pitch` bytes apart.
    pub tokens: u64,
    /// Bytes between tokens; a multiple of 16.
    pub token_pitch: u64,
    /// Address of the intermediate, a multiple of 16: `[T·k, n]`, 16-bit numbers of the token type without gaps.
    pub intermediate: u64,
    /// Activation that turns gate and up into the intermediate.
    pub activation: Activation,
    /// Keeps the size a multiple of the alignment.
    pub unused: u32,
}

/// Parameter of [`DOWN_ENTRIES`] and [`ONE_DOWN_ENTRIES`]: `out[t] = Σⱼ weights[t, j]·row(t, j)`, defined like
/// [`Combine`](crate::layer::moe_route::abi::Combine), with rows that are rounded to the token type.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Down {
    /// The named experts.
    pub choices: Choices,
    /// The matrices of down.
    pub matrices: Matrices,
    /// Address of the intermediate, as in [`GateUp::intermediate`]; here `[T·k, k]`.
    pub intermediate: u64,
    /// Address of the weights of the choices, `[T, k]`, f32.
    pub weights: u64,
    /// Address of a copy of each choice's row, `[T·k, n]` without gaps; or 0.
    pub rows: u64,
    /// Address of the output, a multiple of 16: rows of `n` 16-bit numbers, `output_pitch` bytes apart.
    pub output: u64,
    /// Bytes between rows of the output; a multiple of 16.
    pub output_pitch: u64,
}

impl Down {
    /// Number of CTAs: one per SM, but more if a CTA would have more than [`BLOCK_STRIPS`] strips, and at most one per
    /// strip.
    pub const fn blocks(n: u32, multiprocessors: u32) -> u32 {
        let (strips, least) = (n / STRIP_ROWS, (n / STRIP_ROWS).div_ceil(BLOCK_STRIPS));
        let blocks = if multiprocessors > least { multiprocessors } else { least };
        if blocks < strips { blocks } else { strips }
    }
}

impl GateUp {
    /// Number of CTAs for up to `choices` choices: one per SM, but at most one per strip. Strips go to the first warps
    /// of all CTAs before their second warps.
    pub const fn blocks(choices: u32, n: u32, multiprocessors: u32) -> u32 {
        let strips = Self::strips(choices, n);
        if strips < multiprocessors as u64 { strips as u32 } else { multiprocessors }
    }

    /// Maximum number of strips for up to `choices` choices. A strip is half gate and half up.
    const fn strips(choices: u32, n: u32) -> u64 {
        choices as u64 * (n / (STRIP_ROWS / 2)) as u64
    }
}
