//! Definitions that host and kernel share in addition to [`Launch`](crate::moe::Launch): the list of instances.
//!
//! A tile of C has several *strips* of 16 rows of weights, one per warp, and up to `tile_tokens` tokens. In a gated
//! product, a strip has eight rows of gate and the same rows of up. Weights are loaded one k-block at a time, to the
//! stages of each warp. Tokens are loaded one *chunk* of k-blocks at a time, to buffers of the CTA.

use crate::{
    decoding::{CORE_MATRIX_ROWS, K_BLOCK, SHARED_BYTES, Shape, WARPS},
    instances::table,
    lists::SMALL_EXPERTS,
    units::{OperandType, UNIT_BYTES, UNIT_ROWS},
};

/// Bytes per copy of tokens: the maximum of `cp.async`.
pub const COPY_BYTES: u32 = 16;

/// Number of copies per token and k-block.
pub const TOKEN_COPIES: u32 = K_BLOCK * 2 / COPY_BYTES;

/// Rows of weights per strip: the M of a warp's products.
pub const STRIP_ROWS: u32 = UNIT_ROWS;

/// K-blocks per chunk: the number of a warp's stages, so a mainloop over chunks knows its stages at compile time.
pub const CHUNK: u32 = STAGES;

/// Number of stages of each warp's pipeline of weights.
pub const STAGES: u32 = 4;

/// Number of buffers of tokens: one is read while a chunk is copied to the other one. A chunk's copies
/// start before the copies of its first k-block's weights, so they are complete when these weights are.
pub const BUFFERS: u32 = 2;

/// Bytes from one row of a buffer to the next: the bytes of a chunk, plus one copy.
pub const ROW_BYTES: u32 = (CHUNK * TOKEN_COPIES + 1) * COPY_BYTES;

/// Bytes of a list with one number per expert, and one more.
pub const LIST_BYTES: u32 = (SMALL_EXPERTS + 1).next_multiple_of(4) * 4;

/// Maximum K of a run of tiles: the tokens of all chunks stay in the buffers until the last tile of the run.
pub const RUN_K: u32 = BUFFERS * CHUNK * K_BLOCK;

/// Passes the list of instances to `$each!`. For each operation and token type, the smallest tile comes first.
///
/// With a short K, finding a tile and copying its tokens takes longer than its products. An instance with runs does
/// both once for several tiles of the same tokens.
macro_rules! instances {
    ($each:ident) => {
        $each! {
            moe_gated_f16_t8_strips = gated(OperandType::F16, 8).strips(4).resident(5);
            moe_gated_f16_t8_strips_curves = gated(OperandType::F16, 8).curves().strips(4).resident(5);
            moe_gated_f16_t16_strips = gated(OperandType::F16, 16).strips(4).resident(4);
            moe_gated_f16_t16_strips_curves = gated(OperandType::F16, 16).curves().strips(4).resident(4);
            moe_gated_bf16_t8_strips = gated(OperandType::Bf16, 8).strips(4).resident(5);
            moe_gated_bf16_t8_strips_curves = gated(OperandType::Bf16, 8).curves().strips(4).resident(5);
            moe_gated_bf16_t16_strips = gated(OperandType::Bf16, 16).strips(4).resident(4);
            moe_gated_bf16_t16_strips_curves = gated(OperandType::Bf16, 16).curves().strips(4).resident(4);
            moe_plain_f16_t8_strips = plain(OperandType::F16, 8).strips(4).resident(5);
            moe_plain_f16_t16_strips = plain(OperandType::F16, 16).strips(4).resident(4);
            moe_plain_f16_t8_strips_run4 = plain(OperandType::F16, 8).strips(4).run(4).resident(5);
            moe_plain_bf16_t8_strips = plain(OperandType::Bf16, 8).strips(4).resident(5);
            moe_plain_bf16_t16_strips = plain(OperandType::Bf16, 16).strips(4).resident(4);
            moe_plain_bf16_t8_strips_run4 = plain(OperandType::Bf16, 8).strips(4).run(4).resident(5);
        }
    };
}
#[cfg(feature = "moe_sm90")]
pub(super) use instances;
instances!(table);

/// A compiled form of the kernel, and the hardware resources that it uses.
///
/// A CTA's shared memory has the stages of each warp, the buffers of tokens, then the lists, then the index of the
/// CTA's next tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instance {
    /// Name of the entry.
    pub entry: &'static str,
    /// Number of matrices of weights: 2 for gated, 1 for plain.
    pub matrices: u32,
    /// Type of tokens and C.
    pub operand_type: OperandType,
    /// Maximum number of tokens per tile.
    pub tile_tokens: u32,
    /// Whether a gated product has a [`Curve`](crate::curve::Curve) as its activation. Other instances have the other
    /// activations.
    pub curves: bool,
    /// Number of strips per tile and of warps per CTA.
    pub strips: u32,
    /// Number of tiles, neighbors along the columns of C, that a CTA computes with one copy of their tokens. Above 1,
    /// K is at most [`RUN_K`].
    pub run: u32,
    /// Number of CTAs that share an SM.
    pub resident_blocks: u32,
}

/// An [`Instance`] without its number of resident CTAs.
#[derive(Clone, Copy, Debug)]
pub struct Builder(Instance);

/// Builder of a gated instance for tokens of type `operand_type`, with up to `tile_tokens` tokens per tile.
pub const fn gated(operand_type: OperandType, tile_tokens: u32) -> Builder {
    Builder(Instance {
        entry: "",
        matrices: 2,
        operand_type,
        tile_tokens,
        curves: false,
        strips: 0,
        run: 1,
        resident_blocks: 0,
    })
}

/// Builder of a plain instance for tokens of type `operand_type`, with up to `tile_tokens` tokens per tile.
pub const fn plain(operand_type: OperandType, tile_tokens: u32) -> Builder {
    Builder(Instance { matrices: 1, ..gated(operand_type, tile_tokens).0 })
}

impl Builder {
    /// Sets [`Instance::curves`].
    pub const fn curves(self) -> Self {
        Self(Instance { curves: true, ..self.0 })
    }

    /// Sets [`Instance::strips`].
    pub const fn strips(self, strips: u32) -> Self {
        Self(Instance { strips, ..self.0 })
    }

    /// Sets [`Instance::run`].
    pub const fn run(self, run: u32) -> Self {
        Self(Instance { run, ..self.0 })
    }

    /// Returns the instance with `resident_blocks` CTAs per SM.
    ///
    /// # Panics
    /// If the instance exceeds the hardware's resources.
    pub const fn resident(self, resident_blocks: u32) -> Instance {
        let instance = Instance { resident_blocks, ..self.0 };
        instance.check();
        instance
    }
}

impl Instance {
    /// Distribution of a tile's sums over threads.
    pub const fn shape(self) -> Shape {
        let (matrices, tile_tokens, consumers) = (self.matrices, self.tile_tokens, self.strips / WARPS);
        Shape { matrices, tile_tokens, least_n: CORE_MATRIX_ROWS, consumers, narrow: true }
    }

    /// Columns of C per tile.
    pub const fn columns(self) -> u32 {
        self.shape().columns()
    }

    /// Columns of C per run of tiles.
    pub const fn run_columns(self) -> u32 {
        self.run * self.columns()
    }

    /// Threads per CTA, in one dimension.
    pub const fn threads(self) -> u32 {
        self.strips * 32
    }

    /// Bytes of a buffer of tokens.
    pub const fn buffer_bytes(self) -> u32 {
        self.tile_tokens * ROW_BYTES
    }

    /// Dynamic shared memory of a CTA, in bytes.
    pub const fn shared_bytes(self) -> u32 {
        self.strips * STAGES * UNIT_BYTES + BUFFERS * self.buffer_bytes() + 2 * LIST_BYTES + 16
    }

    /// Fails to compile if the instance exceeds the hardware's resources.
    const fn check(self) {
        assert!(
            self.tile_tokens == 8 || self.tile_tokens == 16,
            "a tile must have 8 or 16 tokens: other mainloops do not exist"
        );
        assert!(
            self.strips == 4 || self.strips == 8,
            "a tile must have 4 or 8 strips, so that a thread copies pieces of one or two rows of tokens"
        );
        assert!(self.run > 0, "a run must have at least one tile");
        assert!(
            (self.shared_bytes() + 1024) * self.resident_blocks <= SHARED_BYTES + 1024,
            "stages and buffers do not fit in shared memory"
        );
    }
}
