//! Definitions that host and `moe_sm90` share in addition to the [parameter](crate::moe::Launch) of a product: budgets
//! and the list of instances.
//!
//! A and B are swapped: weights are on the tensor core's M, tokens on its N. A tile of C uses two *panels* of weights.
//! A CTA iterates over K in k-blocks; a stage holds one k-block of a tile's weights.

use crate::{
    decoding::{BARRIER_BYTES, CORE_MATRIX_ROWS, PANELS, SHARED_BYTES, Shape, TILE_BYTES, TILE_SLOTS, TURN_BARRIERS},
    instances::table,
    sorted::{K_BLOCK_LINES, LINE_BYTES, SPARE_ROWS},
    units::{OperandType, SLAB_ROWS, UNIT_BYTES, UNIT_ROWS},
};

/// Minimum N of the products of two warpgroups, if half a tile has more tokens. A narrower product would not be faster,
/// because decoding takes as long. Four warpgroups decode so fast that the tensor core becomes the limit if products
/// are wider than their tokens.
pub const LEAST_N: u32 = 32;

/// Bytes of memory in which a lane that gathers tokens stores the start of its token.
pub const SOURCE_BYTES: u32 = 4;

/// Bytes in which a warp stores the starts of a strip's tokens.
pub const STRIP_SOURCE_BYTES: u32 = 32 * SOURCE_BYTES;

/// Passes the list of instances to `$each!`. For each operation and token type, the smallest tile comes first.
///
/// The second argument is the maximum number of tokens per tile, `consumers` the number of warpgroups that multiply,
/// `buffers` the number of buffers of tokens, `stages` the number of stages of weights, chosen as for
/// [`gated_sm90`](crate::wgmma::gated_sm90::abi). For tiles with many tokens, the tokens are sorted, because threads
/// that gather them would slow down the products (benches/lab/experiments.md).
macro_rules! instances {
    ($each:ident) => {
        $each! {
            moe_gated_f16_t16 = gated(OperandType::F16, 16).consumers(4).buffers(6).stages(3);
            moe_gated_f16_t16_curves = gated(OperandType::F16, 16).curves().consumers(4).buffers(6).stages(3);
            moe_gated_f16_t64 = gated(OperandType::F16, 64).consumers(4).narrow().sorted().buffers(4).stages(8);
            moe_gated_f16_t64_curves = gated(OperandType::F16, 64).curves().consumers(4).narrow().sorted().buffers(4).stages(8);
            moe_gated_f16_t128 = gated(OperandType::F16, 128).consumers(2).sorted().buffers(3).stages(7);
            moe_plain_f16_t16 = plain(OperandType::F16, 16).consumers(4).buffers(6).stages(3);
            moe_plain_f16_t64 = plain(OperandType::F16, 64).consumers(4).narrow().sorted().buffers(4).stages(8);
            moe_plain_f16_t128 = plain(OperandType::F16, 128).consumers(2).sorted().buffers(3).stages(7);
            moe_plain_f16_t128_narrow = plain(OperandType::F16, 128).consumers(2).narrow().sorted().buffers(4).stages(8);
            moe_gated_bf16_t16 = gated(OperandType::Bf16, 16).consumers(4).buffers(6).stages(3);
            moe_gated_bf16_t16_curves = gated(OperandType::Bf16, 16).curves().consumers(4).buffers(6).stages(3);
            moe_gated_bf16_t64 = gated(OperandType::Bf16, 64).consumers(4).narrow().sorted().buffers(4).stages(8);
            moe_gated_bf16_t64_curves = gated(OperandType::Bf16, 64).curves().consumers(4).narrow().sorted().buffers(4).stages(8);
            moe_gated_bf16_t128 = gated(OperandType::Bf16, 128).consumers(2).sorted().buffers(3).stages(7);
            moe_plain_bf16_t16 = plain(OperandType::Bf16, 16).consumers(4).buffers(6).stages(3);
            moe_plain_bf16_t64 = plain(OperandType::Bf16, 64).consumers(4).narrow().sorted().buffers(4).stages(8);
            moe_plain_bf16_t128 = plain(OperandType::Bf16, 128).consumers(2).sorted().buffers(3).stages(7);
            moe_plain_bf16_t128_narrow = plain(OperandType::Bf16, 128).consumers(2).narrow().sorted().buffers(4).stages(8);
        }
    };
}
#[cfg(feature = "moe_sm90")]
pub(super) use instances;
instances!(table);

/// A compiled form of the kernel that multiplies, and the hardware resources that it uses.
///
/// A CTA's shared memory has the stages, then the buffers of tokens, then the starts of tokens unless tokens are
/// sorted, then the slots of tiles, then the barriers. A stage has the slabs of each panel. A buffer has strips, or the
/// lines of a k-block in sequence.
///
/// An instance that does not fit the hardware does not compile:
///
/// ```
/// # use kernels_gpu::{wgmma::moe_sm90::abi::{Instance, gated}, units::OperandType};
/// const _: Instance = gated(OperandType::Bf16, 64).consumers(2).sorted().buffers(4).stages(8);
/// ```
/// ```compile_fail,E0080
/// # use kernels_gpu::{wgmma::moe_sm90::abi::{Instance, gated}, units::OperandType};
/// const _: Instance = gated(OperandType::Bf16, 64).consumers(2).sorted().buffers(4).stages(12);
/// ```
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
    /// Number of warpgroups that multiply.
    pub consumers: u32,
    /// Whether tiles are half as wide as this number of warpgroups could multiply.
    pub narrow: bool,
    /// Whether each warp multiplies its rows by itself, in narrow tiles.
    pub by_warps: bool,
    /// Whether tokens are sorted by expert and loaded by bulk copies, instead of being gathered by threads.
    pub sorted: bool,
    /// Whether a gated product has a [`Curve`](crate::curve::Curve) as its activation. Other instances have the other
    /// activations.
    pub curves: bool,
    /// Number of buffers of tokens.
    pub buffers: u32,
    /// Number of stages of the pipeline that loads weights from global to shared memory.
    pub stages: u32,
}

/// An [`Instance`] without its number of stages.
#[derive(Clone, Copy, Debug)]
pub struct Builder(Instance);

/// Builder of a gated instance for tokens of type `operand_type`, with up to `tile_tokens` tokens per tile.
pub const fn gated(operand_type: OperandType, tile_tokens: u32) -> Builder {
    let (entry, matrices, narrow, by_warps) = ("", 2, false, false);
    Builder(Instance {
        entry,
        matrices,
        operand_type,
        tile_tokens,
        consumers: 0,
        narrow,
        by_warps,
        sorted: false,
        curves: false,
        buffers: 0,
        stages: 0,
    })
}

/// Builder of a plain instance for tokens of type `operand_type`, with up to `tile_tokens` tokens per tile.
pub const fn plain(operand_type: OperandType, tile_tokens: u32) -> Builder {
    Builder(Instance { matrices: 1, ..gated(operand_type, tile_tokens).0 })
}

impl Builder {
    /// Sets [`Instance::consumers`].
    pub const fn consumers(self, consumers: u32) -> Self {
        Self(Instance { consumers, ..self.0 })
    }

    /// Sets [`Instance::narrow`].
    pub const fn narrow(self) -> Self {
        Self(Instance { narrow: true, ..self.0 })
    }

    /// Sets [`Instance::by_warps`] and [`Instance::narrow`].
    pub const fn by_warps(self) -> Self {
        Self(Instance { narrow: true, by_warps: true, ..self.0 })
    }

    /// Sets [`Instance::sorted`].
    pub const fn sorted(self) -> Self {
        Self(Instance { sorted: true, ..self.0 })
    }

    /// Sets [`Instance::curves`].
    pub const fn curves(self) -> Self {
        Self(Instance { curves: true, ..self.0 })
    }

    /// Sets [`Instance::buffers`].
    pub const fn buffers(self, buffers: u32) -> Self {
        Self(Instance { buffers, ..self.0 })
    }

    /// Returns the instance with `stages` stages.
    ///
    /// # Panics
    /// If the instance exceeds the hardware's resources, or is not supported by the kernel.
    pub const fn stages(self, stages: u32) -> Instance {
        let instance = Instance { stages, ..self.0 };
        instance.check();
        instance
    }
}

impl Instance {
    /// Shape that the mainloop is compiled for.
    pub const fn shape(self) -> Shape {
        let half = self.tile_tokens / 2;
        let most = if self.consumers == 4 { CORE_MATRIX_ROWS } else { LEAST_N };
        let least_n = if half > most { most } else { half };
        let &Self { matrices, tile_tokens, consumers, narrow, .. } = &self;
        Shape { matrices, tile_tokens, least_n, consumers, narrow }
    }

    /// Columns of C per tile.
    pub const fn columns(self) -> u32 {
        self.shape().columns()
    }

    /// Threads per CTA, in one dimension.
    pub const fn threads(self) -> u32 {
        self.shape().threads()
    }

    /// Whether warpgroups redistribute registers. Where each warp multiplies by itself, all warps have enough from the
    /// start.
    pub const fn shares_registers(self) -> bool {
        !self.by_warps
    }

    /// Rows of a panel that are contiguous in a stage: the rows of a slab, or half of them in a narrow tile.
    pub const fn piece_rows(self) -> u32 {
        let rows = self.shape().panel_rows();
        if rows < SLAB_ROWS { rows } else { SLAB_ROWS }
    }

    /// Bytes of a panel in a stage.
    pub const fn panel_bytes(self) -> u32 {
        self.shape().panel_rows() / UNIT_ROWS * UNIT_BYTES
    }

    /// Bytes of a stage.
    pub const fn stage_bytes(self) -> u32 {
        PANELS as u32 * self.panel_bytes()
    }

    /// Number of barriers: a full and an empty barrier per stage, per buffer and per slot of tiles, and the barriers of
    /// turns.
    pub const fn barriers(self) -> u32 {
        2 * (self.stages + self.buffers + TILE_SLOTS) + TURN_BARRIERS
    }

    /// Number of warps that load tokens.
    pub const fn token_warps(self) -> u32 {
        if self.sorted { 1 } else { 3 }
    }

    /// Bytes of one line of all tokens of a tile, if tokens are sorted.
    pub const fn lines_bytes(self) -> u32 {
        self.tile_tokens * LINE_BYTES
    }

    /// Bytes in which warps store the starts of a tile's tokens.
    pub const fn source_bytes(self) -> u32 {
        if self.sorted { 0 } else { self.tile_tokens / CORE_MATRIX_ROWS * STRIP_SOURCE_BYTES }
    }

    /// Dynamic shared memory of a CTA, in bytes.
    pub const fn shared_bytes(self) -> u32 {
        self.stages * self.stage_bytes()
            + self.buffers * self.shape().buffer_bytes()
            + self.source_bytes()
            + TILE_SLOTS * TILE_BYTES
            + self.barriers() * BARRIER_BYTES
    }

    /// Fails to compile if the instance exceeds the hardware's resources.
    const fn check(self) {
        self.shape().check();
        assert!(SLAB_ROWS.is_multiple_of(self.piece_rows()), "a slab must be a multiple of the rows of a piece");
        assert!(self.stages > 1, "use at least 2 stages: with one, filling it would wait for emptying it");
        assert!(self.buffers > 1, "use at least 2 buffers: with one, filling it would wait for emptying it");
        if self.sorted {
            assert!(!self.by_warps, "`by_warps` requires strips: do not combine it with `sorted`");
            assert!(self.shape().least_n <= SPARE_ROWS, "the smallest N must not exceed the spare rows");
            assert!(K_BLOCK_LINES * self.lines_bytes() == self.shape().buffer_bytes());
            // The rows of 128 bytes that `wgmma` reads then begin where the swizzle does.
            assert!(self.stage_bytes().is_multiple_of(1024) && self.lines_bytes().is_multiple_of(1024));
        }
        assert!(self.shared_bytes() <= SHARED_BYTES, "stages and buffers do not fit in shared memory");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instances_fit_and_are_named_after_their_parameters() {
        for instance in INSTANCES {
            instance.check();
            let operation = if instance.matrices == 2 { "gated" } else { "plain" };
            let operand_type = if instance.operand_type == OperandType::F16 { "f16" } else { "bf16" };
            // Instances with the same number of tokens per tile: `_narrow` distinguishes them.
            let of_same_tiles = |other: &&Instance| {
                let of = |of: &Instance| (of.matrices, of.operand_type, of.tile_tokens, of.curves);
                of(other) == of(instance)
            };
            let is_alone = INSTANCES.iter().filter(of_same_tiles).count() == 1;
            let narrow = if instance.narrow && !is_alone { "_narrow" } else { "" };
            let curves = if instance.curves { "_curves" } else { "" };
            let expected = std::format!("moe_{operation}_{operand_type}_t{}{narrow}{curves}", instance.tile_tokens);
            assert_eq!(instance.entry, expected);
        }
    }

    extern crate std;
}
