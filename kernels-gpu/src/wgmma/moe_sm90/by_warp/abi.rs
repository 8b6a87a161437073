//! What host and kernel agree on beside [`Launch`](crate::moe::Launch): the list of instances.
//!
//! A tile of C takes some *strips* of 16 rows of weights, each a warp's, and up to so many tokens. Gated, a strip is eight rows of gate
//! and the same of up. Weights come a k-block at a time, to stages of each warp; tokens come a *chunk* of k-blocks at a time, to
//! buffers of the block.

use crate::{
    decoding::{CORE_MATRIX_ROWS, K_BLOCK, SHARED_BYTES, Shape, WARPS},
    instances::table,
    lists::MAX_EXPERTS,
    units::{OperandType, UNIT_BYTES, UNIT_ROWS},
};

/// Bytes of a copy of tokens, `cp.async`'s most.
pub const COPY_BYTES: u32 = 16;

/// Copies that bring a token's k-block.
pub const TOKEN_COPIES: u32 = K_BLOCK * 2 / COPY_BYTES;

/// Rows of weights of a strip: the M of a warp's products.
pub const STRIP_ROWS: u32 = UNIT_ROWS;

/// K-blocks of a chunk: as many as a warp has stages, so that a main loop over chunks knows its stages when it is compiled.
pub const CHUNK: u32 = STAGES;

/// Stages of each warp's pipeline that brings weights.
pub const STAGES: u32 = 4;

/// Buffers of tokens: one that is read, and one that a chunk comes to. It is complete when the weights of its first k-block are, for it was
/// begun before them.
pub const BUFFERS: u32 = 2;

/// Bytes from a row of a buffer to the next one: a chunk's, and a copy more.
pub const ROW_BYTES: u32 = (CHUNK * TOKEN_COPIES + 1) * COPY_BYTES;

/// Bytes of the numbers of a list: of experts, and one more.
pub const LIST_BYTES: u32 = (MAX_EXPERTS + 1).next_multiple_of(4) * 4;

/// Passes the list of instances to `$each!`: of an operation and a type of tokens, the smallest tile first.
macro_rules! instances {
    ($each:ident) => {
        $each! {
            moe_gated_f16_t8_strips = gated(OperandType::F16, 8).strips(4).resident(5);
            moe_gated_f16_t16_strips = gated(OperandType::F16, 16).strips(4).resident(4);
            moe_gated_bf16_t8_strips = gated(OperandType::Bf16, 8).strips(4).resident(5);
            moe_gated_bf16_t16_strips = gated(OperandType::Bf16, 16).strips(4).resident(4);
            moe_plain_f16_t8_strips = plain(OperandType::F16, 8).strips(4).resident(5);
            moe_plain_f16_t16_strips = plain(OperandType::F16, 16).strips(4).resident(4);
            moe_plain_bf16_t8_strips = plain(OperandType::Bf16, 8).strips(4).resident(5);
            moe_plain_bf16_t16_strips = plain(OperandType::Bf16, 16).strips(4).resident(4);
        }
    };
}
#[cfg(feature = "moe_sm90")]
pub(super) use instances;
instances!(table);

/// One way to build the kernel, and what it takes of the hardware.
///
/// Shared memory of a block: stages of each warp, buffers of tokens, then the lists, then the block's next tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instance {
    /// The entry's name.
    pub entry: &'static str,
    /// Matrices of weights: 2 for gated, 1 for plain.
    pub matrices: u32,
    /// The type of tokens and C.
    pub operand_type: OperandType,
    /// The most tokens of a tile.
    pub tile_tokens: u32,
    /// Strips of a tile, warps of a block.
    pub strips: u32,
    /// Blocks that share a multiprocessor.
    pub resident_blocks: u32,
}

/// An [`Instance`] that lacks its blocks.
#[derive(Clone, Copy, Debug)]
pub struct Builder(Instance);

/// The gated kernel for tokens of this type, with up to so many of them a tile.
pub const fn gated(operand_type: OperandType, tile_tokens: u32) -> Builder {
    Builder(Instance { entry: "", matrices: 2, operand_type, tile_tokens, strips: 0, resident_blocks: 0 })
}

/// As [`gated`], the plain kernel.
pub const fn plain(operand_type: OperandType, tile_tokens: u32) -> Builder {
    Builder(Instance { matrices: 1, ..gated(operand_type, tile_tokens).0 })
}

impl Builder {
    /// Sets [`Instance::strips`].
    pub const fn strips(self, strips: u32) -> Self {
        Self(Instance { strips, ..self.0 })
    }

    /// The instance with so many blocks on a multiprocessor.
    ///
    /// # Panics
    /// If it asks for more than there is.
    pub const fn resident(self, resident_blocks: u32) -> Instance {
        let instance = Instance { resident_blocks, ..self.0 };
        instance.check();
        instance
    }
}

impl Instance {
    /// How a tile's sums are spread over threads.
    pub const fn shape(self) -> Shape {
        let (matrices, tile_tokens, consumers) = (self.matrices, self.tile_tokens, self.strips / WARPS);
        Shape { matrices, tile_tokens, least_n: CORE_MATRIX_ROWS, consumers, narrow: true }
    }

    /// Columns of C of a tile.
    pub const fn columns(self) -> u32 {
        self.shape().columns()
    }

    /// Threads of a block, in one dimension.
    pub const fn threads(self) -> u32 {
        self.strips * 32
    }

    /// Bytes of a buffer of tokens.
    pub const fn buffer_bytes(self) -> u32 {
        self.tile_tokens * ROW_BYTES
    }

    /// Dynamic shared memory of a block, in bytes.
    pub const fn shared_bytes(self) -> u32 {
        self.strips * STAGES * UNIT_BYTES + BUFFERS * self.buffer_bytes() + 2 * LIST_BYTES + 16
    }

    /// Stops the compiler where an instance asks for more than there is.
    const fn check(self) {
        assert!(self.tile_tokens == 8 || self.tile_tokens == 16, "there are main loops for 8 tokens and for 16");
        assert!(self.strips == 4 || self.strips == 8, "a thread copies pieces of one or two rows of tokens");
        assert!(
            (self.shared_bytes() + 1024) * self.resident_blocks <= SHARED_BYTES + 1024,
            "stages and buffers do not fit shared memory"
        );
    }
}
