//! What host and `moe_few_sm90` agree on: parameters, what is few, and shared memory.
//!
//! A *strip* is 16 rows of weights, the M of a warp's products: of down, or eight of gate and the same of up.

use bytemuck::{Pod, Zeroable};

use crate::{
    epilogue::Activation,
    units::{K_BLOCK, UNIT_BYTES, UNIT_ROWS},
};

/// The entries of gate and up, and of down, each for f16 and for bf16.
pub const GATE_UP_ENTRIES: [&str; 2] = ["moe_few_gate_up_f16", "moe_few_gate_up_bf16"];
/// As [`GATE_UP_ENTRIES`].
pub const DOWN_ENTRIES: [&str; 2] = ["moe_few_down_f16", "moe_few_down_bf16"];
/// As [`GATE_UP_ENTRIES`], of a single token ([`Blocks::one`]).
pub const ONE_GATE_UP_ENTRIES: [&str; 2] = ["moe_one_gate_up_f16", "moe_one_gate_up_bf16"];
/// As [`ONE_GATE_UP_ENTRIES`].
pub const ONE_DOWN_ENTRIES: [&str; 2] = ["moe_one_down_f16", "moe_one_down_bf16"];

/// The most tokens: the N of a warp's product.
pub const MAX_TOKENS: u32 = 8;

/// The most choices, T·k: two of each lane of a warp.
pub const MAX_CHOICES: u32 = 64;

/// The most warps of a block: it has a multiprocessor to itself.
pub const MAX_WARPS: u32 = 20;

/// Warps of a block where each has hardly a strip: blocks of both launches share a multiprocessor.
pub const FEW_WARPS: u32 = MAX_WARPS / 2;

/// The most threads of a block.
pub const MAX_THREADS: u32 = MAX_WARPS * 32;

/// Rows of weights of a strip.
pub const STRIP_ROWS: u32 = UNIT_ROWS;

/// Bytes of a token's whole k-block.
pub const TOKEN_BYTES: u32 = K_BLOCK * 2;

/// Bytes of a stage: of a strip's k-block and, where there is a single token, of its k-block behind it.
pub const fn stage_bytes(one: bool) -> u32 {
    if one { UNIT_BYTES + TOKEN_BYTES } else { UNIT_BYTES }
}

/// Stages of each warp: a multiprocessor then waits for more bytes than memory brings in the time that it takes.
pub const STAGES: u32 = 6;

/// As [`STAGES`], where there is a single token.
pub const ONE_STAGES: u32 = 7;

/// Stages of each warp.
pub const fn stages(one: bool) -> u32 {
    if one { ONE_STAGES } else { STAGES }
}

/// Bytes of what a block knows of the choices: of each expert that is named, its number with its rows, and which choices these are; of
/// each choice its row and its weight; and how many experts there are.
pub const LISTS_BYTES: u32 = (MAX_CHOICES + MAX_CHOICES * MAX_TOKENS + MAX_CHOICES + MAX_CHOICES) * 4 + 16;

/// The most strips of down of a block.
pub const BLOCK_STRIPS: u32 = 4;

/// Bytes of a strip's columns of a row.
pub const ROW_BYTES: u32 = STRIP_ROWS * 2;

/// Where the warps' stages lie in a block's shared memory: behind the lists and the rows of down's strips.
pub const STAGES_AT: u32 = (LISTS_BYTES + BLOCK_STRIPS * MAX_CHOICES * ROW_BYTES).next_multiple_of(128);

/// The blocks of both launches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// Warps of each.
    pub warps: u32,
    /// Whether the entries are those for a single token, which comes to the stages of its weights.
    pub one: bool,
}

impl Blocks {
    /// Those of so many tokens, up to so many choices and an intermediate of `n` columns.
    pub const fn of(tokens: u32, choices: u32, n: u32, multiprocessors: u32) -> Self {
        if GateUp::strips(choices, n) <= multiprocessors as u64 * FEW_WARPS as u64 {
            Self { warps: FEW_WARPS, one: false }
        } else {
            Self { warps: MAX_WARPS, one: tokens == 1 }
        }
    }

    /// Dynamic shared memory of a block. Gate and up take as much as down, so that a multiprocessor divides its memory for both in the
    /// same way.
    pub const fn shared_bytes(self) -> u32 {
        STAGES_AT + self.warps * stages(self.one) * stage_bytes(self.one)
    }
}

/// Which experts tokens name. Choice t·k + j has a *row* of its own number, unless its expert is not the layer's, or its token has
/// named that expert before: then it has the row of that choice, or none.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Choices {
    /// Address of the ids `[T, k]`, i32. An id that is negative or not below `named_experts` has no expert.
    pub ids: u64,
    /// Address of the layer's own number of each expert that can be named, i32, negative for others; or 0.
    pub map: u64,
    /// T, up to [`MAX_TOKENS`]; T·k is up to [`MAX_CHOICES`].
    pub token_count: u32,
    /// k, from 1 to [`MAX_TOP_K`](crate::lists::MAX_TOP_K).
    pub top_k: u32,
    /// E, from 1 to [`MAX_EXPERTS`](crate::lists::MAX_EXPERTS).
    pub experts: u32,
    /// Experts that can be named: the length of `map`, or E.
    pub named_experts: u32,
}

/// The matrices of every expert, gate and up or down.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Matrices {
    /// Addresses of the units of the first expert's gate and up, or of its down (the second is not looked at); multiples of 16.
    pub b: [u64; 2],
    /// Bytes from one expert's to the next one's.
    pub expert_bytes: u64,
    /// Addresses of a factor for each expert, f32: the global scales of gate and up, or of down.
    pub alpha: [u64; 2],
    /// Addresses of what is added to products times their factor: `[experts, n]`, f32, in the order of the rows of each B; 0 for
    /// nothing.
    pub bias: [u64; 2],
    /// Rows of each B; a multiple of 16.
    pub n: u32,
    /// Elements summed over; a multiple of 16, not 0.
    pub k: u32,
}

/// The one parameter of [`GATE_UP_ENTRIES`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct GateUp {
    /// Who is named.
    pub choices: Choices,
    /// Gate and up, whose rows are packed in the order of K ([`units`](crate::units)).
    pub matrices: Matrices,
    /// Address of the tokens X, a multiple of 16: rows of `k` 16-bit numbers, `token_pitch` bytes apart.
    pub tokens: u64,
    /// A multiple of 16.
    pub token_pitch: u64,
    /// Address of the intermediate, a multiple of 16: `[T·k, n]`, 16-bit numbers of the tokens' type without gaps.
    pub intermediate: u64,
    /// What becomes of gate and up.
    pub activation: Activation,
    /// Keeps the size a multiple of the alignment.
    pub unused: u32,
}

/// The one parameter of [`DOWN_ENTRIES`]: `out[t] = Σⱼ weights[t, j]·row(t, j)`, as
/// [`Combine`](crate::layer::moe_route::abi::Combine) says it, of rows that are rounded to the tokens' type.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Down {
    /// Who is named.
    pub choices: Choices,
    /// Down.
    pub matrices: Matrices,
    /// As [`GateUp::intermediate`], `[T·k, k]`.
    pub intermediate: u64,
    /// Address of the weights, `[T, k]`, f32.
    pub weights: u64,
    /// Address of where the row of each choice goes besides, `[T·k, n]` without gaps; or 0.
    pub rows: u64,
    /// Address of the output, a multiple of 16: rows of `n` 16-bit numbers, `output_pitch` bytes apart.
    pub output: u64,
    /// A multiple of 16.
    pub output_pitch: u64,
}

impl Down {
    /// Blocks of a grid: one for each multiprocessor, more where they would have more than [`BLOCK_STRIPS`] strips, and no more than
    /// there are strips.
    pub const fn blocks(n: u32, multiprocessors: u32) -> u32 {
        let (strips, least) = (n / STRIP_ROWS, (n / STRIP_ROWS).div_ceil(BLOCK_STRIPS));
        let blocks = if multiprocessors > least { multiprocessors } else { least };
        if blocks < strips { blocks } else { strips }
    }
}

impl GateUp {
    /// Blocks of a grid of up to so many choices: one for each multiprocessor, and no more than there can be strips, which come to
    /// the first warps of all blocks before their second ones.
    pub const fn blocks(choices: u32, n: u32, multiprocessors: u32) -> u32 {
        let strips = Self::strips(choices, n);
        if strips < multiprocessors as u64 { strips as u32 } else { multiprocessors }
    }

    /// The most strips of up to so many choices: a strip is half of gate and half of up.
    const fn strips(choices: u32, n: u32) -> u64 {
        choices as u64 * (n / (STRIP_ROWS / 2)) as u64
    }
}
