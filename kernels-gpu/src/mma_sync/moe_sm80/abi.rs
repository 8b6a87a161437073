//! What host and `moe_sm80` agree on beside [`Launch`](crate::moe::Launch): the list of instances.
//!
//! A and B are swapped: weights lie on the tensor core's M, tokens on its N. A tile of C takes two *panels* of weights. A block
//! goes through K in k-blocks; a stage holds a tile's tokens and weights of one k-block.

use crate::{
    decoding::{K_BLOCK, PANELS, Shape, TILE_BYTES, WARPS},
    instances::table,
    mma_sync::SHARED_BYTES,
    units::{OperandType, SLAB_ROWS, UNIT_BYTES, UNIT_ROWS},
};

/// Places where a block writes down what a tile is: the one that it computes, and the next.
pub const TILE_SLOTS: u32 = 2;

/// Bytes of a copy, `cp.async`'s most.
pub const COPY_BYTES: u32 = 16;

/// Copies that bring a token's k-block.
pub const TOKEN_COPIES: u32 = K_BLOCK * 2 / COPY_BYTES;

/// Passes the list of instances to `$each!`: of an operation and a type of tokens, the smallest tile first.
///
/// Few tokens are limited by the memory: of four warps, several blocks share a multiprocessor, and there are more tiles to spread; of
/// eight warps, tokens are read half as often. For more tokens, a warp has 32 rows of weights, so that it reads tokens from shared
/// memory half as often as with 16.
macro_rules! instances {
    ($each:ident) => {
        $each! {
            moe_sm80_gated_f16_t16_narrow = gated(OperandType::F16, 16).warps(4).stages(4);
            moe_sm80_gated_f16_t16 = gated(OperandType::F16, 16).warps(8).stages(3);
            moe_sm80_gated_f16_t64 = gated(OperandType::F16, 64).warps(8).of_32_rows().stages(2);
            moe_sm80_plain_f16_t16_narrow = plain(OperandType::F16, 16).warps(4).stages(4);
            moe_sm80_plain_f16_t16 = plain(OperandType::F16, 16).warps(8).stages(3);
            moe_sm80_plain_f16_t64 = plain(OperandType::F16, 64).warps(8).of_32_rows().stages(2);
            moe_sm80_gated_bf16_t16_narrow = gated(OperandType::Bf16, 16).warps(4).stages(4);
            moe_sm80_gated_bf16_t16 = gated(OperandType::Bf16, 16).warps(8).stages(3);
            moe_sm80_gated_bf16_t64 = gated(OperandType::Bf16, 64).warps(8).of_32_rows().stages(2);
            moe_sm80_plain_bf16_t16_narrow = plain(OperandType::Bf16, 16).warps(4).stages(4);
            moe_sm80_plain_bf16_t16 = plain(OperandType::Bf16, 16).warps(8).stages(3);
            moe_sm80_plain_bf16_t64 = plain(OperandType::Bf16, 64).warps(8).of_32_rows().stages(2);
        }
    };
}
#[cfg(feature = "moe_sm80")]
pub(super) use instances;
instances!(table);

/// One way to build the kernel, and what it takes of the hardware.
///
/// Shared memory of a block: stages, then what is written down of tiles. A stage: tokens, then the units of each panel.
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
    /// Warps of a block. Each copies and multiplies.
    pub warps: u32,
    /// Whether a warp has 16 rows of each panel, and not 16 of both together.
    pub of_32_rows: bool,
    /// Stages of the pipeline that brings tokens and weights from global to shared memory.
    pub stages: u32,
}

/// An [`Instance`] that lacks its stages.
#[derive(Clone, Copy, Debug)]
pub struct Builder(Instance);

/// The gated kernel for tokens of this type, with up to so many of them a tile.
pub const fn gated(operand_type: OperandType, tile_tokens: u32) -> Builder {
    Builder(Instance { entry: "", matrices: 2, operand_type, tile_tokens, warps: 0, of_32_rows: false, stages: 0 })
}

/// As [`gated`], the plain kernel.
pub const fn plain(operand_type: OperandType, tile_tokens: u32) -> Builder {
    Builder(Instance { matrices: 1, ..gated(operand_type, tile_tokens).0 })
}

impl Builder {
    /// Sets [`Instance::warps`].
    pub const fn warps(self, warps: u32) -> Self {
        Self(Instance { warps, ..self.0 })
    }

    /// Sets [`Instance::of_32_rows`].
    pub const fn of_32_rows(self) -> Self {
        Self(Instance { of_32_rows: true, ..self.0 })
    }

    /// The instance with so many stages.
    ///
    /// # Panics
    /// If it asks for more than there is, or for what the kernel cannot do.
    pub const fn stages(self, stages: u32) -> Instance {
        let instance = Instance { stages, ..self.0 };
        instance.check();
        instance
    }
}

impl Instance {
    /// How a tile's sums are spread over threads.
    pub const fn shape(self) -> Shape {
        Shape {
            matrices: self.matrices,
            tile_tokens: self.tile_tokens,
            least_n: self.tile_tokens / 2,
            consumers: self.warps / WARPS,
            narrow: !self.of_32_rows,
        }
    }

    /// Columns of C of a tile.
    pub const fn columns(self) -> u32 {
        self.shape().columns()
    }

    /// Threads of a block, in one dimension.
    pub const fn threads(self) -> u32 {
        self.warps * 32
    }

    /// Blocks that the registers of a multiprocessor suffice for: few tokens are limited by the memory, which more warps wait for.
    pub const fn min_blocks(self) -> u32 {
        if self.of_32_rows { 1 } else { 16 / self.warps }
    }

    /// Units of a panel.
    pub const fn panel_units(self) -> u32 {
        self.shape().panel_rows() / UNIT_ROWS
    }

    /// Bytes of a stage's tokens.
    pub const fn token_bytes(self) -> u32 {
        self.tile_tokens * TOKEN_COPIES * COPY_BYTES
    }

    /// Bytes of a stage's weights.
    pub const fn weight_bytes(self) -> u32 {
        PANELS as u32 * self.panel_units() * UNIT_BYTES
    }

    /// Bytes of a stage.
    pub const fn stage_bytes(self) -> u32 {
        self.token_bytes() + self.weight_bytes()
    }

    /// Dynamic shared memory of a block, in bytes.
    pub const fn shared_bytes(self) -> u32 {
        self.stages * self.stage_bytes() + TILE_SLOTS * TILE_BYTES
    }

    /// Stops the compiler where an instance asks for more than there is.
    const fn check(self) {
        assert!(
            self.tile_tokens == 16 || self.tile_tokens == 64,
            "there are main loops for up to 16 and up to 64 tokens"
        );
        assert!(self.warps == 4 || self.warps == 8, "a block has 4 or 8 warps");
        assert!(SLAB_ROWS.is_multiple_of(self.shape().panel_rows()), "a panel's rows lie in one slab");
        assert!(self.stages > 1, "with one stage, filling it would wait for emptying it");
        assert!(self.stages < 5, "there are waits for up to four stages");
        assert!(self.shared_bytes() <= SHARED_BYTES, "stages do not fit shared memory");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_instance_fits_and_is_called_what_it_is() {
        for instance in INSTANCES {
            instance.check();
            let operation = if instance.matrices == 2 { "gated" } else { "plain" };
            let operand_type = if instance.operand_type == OperandType::F16 { "f16" } else { "bf16" };
            let narrow = if instance.warps == 4 { "_narrow" } else { "" };
            let expected = std::format!("moe_sm80_{operation}_{operand_type}_t{}{narrow}", instance.tile_tokens);
            assert_eq!(instance.entry, expected);
        }
    }

    extern crate std;
}
