//! The list of instances. The other definition that host and `moe_sm80` share is [`Launch`](crate::moe::Launch).
//!
//! A and B are swapped: weights are on the tensor core's M, tokens on its N. A tile of C takes two *panels* of weights.
//! A CTA goes through K in k-blocks; a stage holds a tile's tokens and weights of one k-block.

use crate::{
    decoding::{K_BLOCK, PANELS, Shape, TILE_BYTES, WARPS},
    instances::table,
    mma_sync::SHARED_BYTES,
    units::{OperandType, SLAB_ROWS, UNIT_BYTES, UNIT_ROWS},
};

/// Number of places for descriptions of tiles in a CTA: one for the current tile, one for the next tile.
pub const TILE_SLOTS: u32 = 2;

/// Bytes per copy: the maximum of `cp.async`.
pub const COPY_BYTES: u32 = 16;

/// Number of copies that bring a token's k-block.
pub const TOKEN_COPIES: u32 = K_BLOCK * 2 / COPY_BYTES;

/// Passes the list of instances to `$each!`. Per operation and token type, the smallest tile comes first.
///
/// With few tokens, memory is the limit. With four warps per CTA, several CTAs share an SM, and there are more tiles to
/// distribute; with eight warps, tokens are read half as often. With more tokens, a warp has 32 rows of weights, so
/// that it reads tokens from shared memory half as often as with 16 rows.
macro_rules! instances {
    ($each:ident) => {
        $each! {
            moe_sm80_gated_f16_t16_narrow = gated(OperandType::F16, 16).warps(4).stages(4);
            moe_sm80_gated_f16_t16_narrow_curves = gated(OperandType::F16, 16).curves().warps(4).stages(4);
            moe_sm80_gated_f16_t16 = gated(OperandType::F16, 16).warps(8).stages(3);
            moe_sm80_gated_f16_t16_curves = gated(OperandType::F16, 16).curves().warps(8).stages(3);
            moe_sm80_gated_f16_t64 = gated(OperandType::F16, 64).warps(8).of_32_rows().stages(2);
            moe_sm80_gated_f16_t64_curves = gated(OperandType::F16, 64).curves().warps(8).of_32_rows().stages(2);
            moe_sm80_plain_f16_t16_narrow = plain(OperandType::F16, 16).warps(4).stages(4);
            moe_sm80_plain_f16_t16 = plain(OperandType::F16, 16).warps(8).stages(3);
            moe_sm80_plain_f16_t64 = plain(OperandType::F16, 64).warps(8).of_32_rows().stages(2);
            moe_sm80_gated_bf16_t16_narrow = gated(OperandType::Bf16, 16).warps(4).stages(4);
            moe_sm80_gated_bf16_t16_narrow_curves = gated(OperandType::Bf16, 16).curves().warps(4).stages(4);
            moe_sm80_gated_bf16_t16 = gated(OperandType::Bf16, 16).warps(8).stages(3);
            moe_sm80_gated_bf16_t16_curves = gated(OperandType::Bf16, 16).curves().warps(8).stages(3);
            moe_sm80_gated_bf16_t64 = gated(OperandType::Bf16, 64).warps(8).of_32_rows().stages(2);
            moe_sm80_gated_bf16_t64_curves = gated(OperandType::Bf16, 64).curves().warps(8).of_32_rows().stages(2);
            moe_sm80_plain_bf16_t16_narrow = plain(OperandType::Bf16, 16).warps(4).stages(4);
            moe_sm80_plain_bf16_t16 = plain(OperandType::Bf16, 16).warps(8).stages(3);
            moe_sm80_plain_bf16_t64 = plain(OperandType::Bf16, 64).warps(8).of_32_rows().stages(2);
        }
    };
}
#[cfg(feature = "moe_sm80")]
pub(super) use instances;
instances!(table);

/// An instance of the kernel, and the resources that it takes.
///
/// Layout of a CTA's shared memory: the stages, then the descriptions of tiles. A stage holds tokens, then the units of
/// each panel.
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
    /// Warps per CTA. Each warp copies and multiplies.
    pub warps: u32,
    /// `true` if a warp has 16 rows of each panel; `false` if it has 16 rows of both panels together.
    pub of_32_rows: bool,
    /// Stages of the pipeline that brings tokens and weights from global to shared memory.
    pub stages: u32,
}

/// An [`Instance`] without its number of stages.
#[derive(Clone, Copy, Debug)]
pub struct Builder(Instance);

/// The gated kernel for tokens of this type, with up to `tile_tokens` tokens per tile.
pub const fn gated(operand_type: OperandType, tile_tokens: u32) -> Builder {
    Builder(Instance {
        entry: "",
        matrices: 2,
        operand_type,
        tile_tokens,
        curves: false,
        warps: 0,
        of_32_rows: false,
        stages: 0,
    })
}

/// The plain kernel for tokens of this type, with up to `tile_tokens` tokens per tile.
pub const fn plain(operand_type: OperandType, tile_tokens: u32) -> Builder {
    Builder(Instance { matrices: 1, ..gated(operand_type, tile_tokens).0 })
}

impl Builder {
    /// Sets [`Instance::curves`].
    pub const fn curves(self) -> Self {
        Self(Instance { curves: true, ..self.0 })
    }

    /// Sets [`Instance::warps`].
    pub const fn warps(self, warps: u32) -> Self {
        Self(Instance { warps, ..self.0 })
    }

    /// Sets [`Instance::of_32_rows`].
    pub const fn of_32_rows(self) -> Self {
        Self(Instance { of_32_rows: true, ..self.0 })
    }

    /// The instance with this number of stages.
    ///
    /// # Panics
    /// If the instance takes more resources than there are, or is one that the kernel does not implement.
    pub const fn stages(self, stages: u32) -> Instance {
        let instance = Instance { stages, ..self.0 };
        instance.check();
        instance
    }
}

impl Instance {
    /// Distribution of a tile's sums over threads.
    pub const fn shape(self) -> Shape {
        Shape {
            matrices: self.matrices,
            tile_tokens: self.tile_tokens,
            least_n: self.tile_tokens / 2,
            consumers: self.warps / WARPS,
            narrow: !self.of_32_rows,
        }
    }

    /// Columns of C per tile.
    pub const fn columns(self) -> u32 {
        self.shape().columns()
    }

    /// Threads per CTA, in one dimension.
    pub const fn threads(self) -> u32 {
        self.warps * 32
    }

    /// Minimum number of CTAs per SM, which limits registers per thread. With few tokens memory is the limit, so more
    /// warps wait for it.
    pub const fn min_blocks(self) -> u32 {
        if self.of_32_rows { 1 } else { 16 / self.warps }
    }

    /// Units per panel.
    pub const fn panel_units(self) -> u32 {
        self.shape().panel_rows() / UNIT_ROWS
    }

    /// Bytes of tokens per stage.
    pub const fn token_bytes(self) -> u32 {
        self.tile_tokens * TOKEN_COPIES * COPY_BYTES
    }

    /// Bytes of weights per stage.
    pub const fn weight_bytes(self) -> u32 {
        PANELS as u32 * self.panel_units() * UNIT_BYTES
    }

    /// Bytes per stage.
    pub const fn stage_bytes(self) -> u32 {
        self.token_bytes() + self.weight_bytes()
    }

    /// Dynamic shared memory per CTA, in bytes.
    pub const fn shared_bytes(self) -> u32 {
        self.stages * self.stage_bytes() + TILE_SLOTS * TILE_BYTES
    }

    /// Fails compilation if an instance takes more resources than there are.
    const fn check(self) {
        assert!(
            self.tile_tokens == 16 || self.tile_tokens == 64,
            "a tile must have 16 or 64 tokens: there is no other mainloop"
        );
        assert!(self.warps == 4 || self.warps == 8, "a CTA must have 4 or 8 warps");
        assert!(SLAB_ROWS.is_multiple_of(self.shape().panel_rows()), "the rows of a panel must lie in one slab");
        assert!(self.stages > 1, "the pipeline needs at least 2 stages");
        assert!(self.stages < 5, "the kernel has waits for up to 4 stages only");
        assert!(self.shared_bytes() <= SHARED_BYTES, "the stages do not fit in shared memory");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instances_are_valid_and_names_state_their_parameters() {
        for instance in INSTANCES {
            instance.check();
            let operation = if instance.matrices == 2 { "gated" } else { "plain" };
            let operand_type = if instance.operand_type == OperandType::F16 { "f16" } else { "bf16" };
            let narrow = if instance.warps == 4 { "_narrow" } else { "" };
            let curves = if instance.curves { "_curves" } else { "" };
            let expected =
                std::format!("moe_sm80_{operation}_{operand_type}_t{}{narrow}{curves}", instance.tile_tokens);
            assert_eq!(instance.entry, expected);
        }
    }

    extern crate std;
}
