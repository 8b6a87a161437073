//! What host and `moe_sm90` agree on beside the [parameter](crate::moe::Launch) of a product: budgets, and the list of instances.
//!
//! A and B are swapped: weights lie on the tensor core's M, tokens on its N. A tile of C takes two *panels* of weights. A
//! block goes through K in k-blocks; a stage holds one k-block of a tile's weights.

use crate::{
    decoding::{BARRIER_BYTES, CORE_MATRIX_ROWS, PANELS, SHARED_BYTES, Shape, TILE_BYTES, TILE_SLOTS, TURN_BARRIERS},
    instances::table,
    sorted::{K_BLOCK_LINES, LINE_BYTES, SPARE_ROWS},
    units::{OperandType, SLAB_ROWS, UNIT_BYTES, UNIT_ROWS},
};

/// The least N of the products of two warpgroups, where half a tile has more tokens. A narrower one would take no less time: decoding
/// takes as long. Four warpgroups decode so fast that the tensor core holds them up if products are wider than their tokens.
pub const LEAST_N: u32 = 32;

/// Bytes in which a lane that gathers tokens keeps where a token begins.
pub const SOURCE_BYTES: u32 = 4;

/// Bytes in which a warp keeps where the tokens of a strip begin.
pub const STRIP_SOURCE_BYTES: u32 = 32 * SOURCE_BYTES;

/// Passes the list of instances to `$each!`: of an operation and a type of tokens, the smallest tile first.
///
/// A tile has up to so many tokens; `consumers` warpgroups multiply; `buffers` hold tokens; `stages` hold weights. As for
/// [`gated_sm90`](crate::wgmma::gated_sm90::abi). Where tiles have many tokens, these come sorted: threads that gather them would slow
/// products down (benches/lab/experiments.md).
macro_rules! instances {
    ($each:ident) => {
        $each! {
            moe_gated_f16_t16 = gated(OperandType::F16, 16).consumers(4).buffers(6).stages(3);
            moe_gated_f16_t64 = gated(OperandType::F16, 64).consumers(4).narrow().sorted().buffers(4).stages(8);
            moe_gated_f16_t128 = gated(OperandType::F16, 128).consumers(2).sorted().buffers(3).stages(7);
            moe_plain_f16_t16 = plain(OperandType::F16, 16).consumers(4).buffers(6).stages(3);
            moe_plain_f16_t64 = plain(OperandType::F16, 64).consumers(4).narrow().sorted().buffers(4).stages(8);
            moe_plain_f16_t128 = plain(OperandType::F16, 128).consumers(2).sorted().buffers(3).stages(7);
            moe_plain_f16_t128_narrow = plain(OperandType::F16, 128).consumers(2).narrow().sorted().buffers(4).stages(8);
            moe_gated_bf16_t16 = gated(OperandType::Bf16, 16).consumers(4).buffers(6).stages(3);
            moe_gated_bf16_t64 = gated(OperandType::Bf16, 64).consumers(4).narrow().sorted().buffers(4).stages(8);
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

/// One way to build the kernel that multiplies, and what it takes of the hardware.
///
/// Shared memory of a block: stages, then buffers of tokens, then where tokens begin unless they are sorted, then what is written down
/// of tiles, then barriers. A stage: the slabs of each panel. A buffer: strips, or lines one k-block after the other.
///
/// What does not fit does not compile:
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
    /// The entry's name.
    pub entry: &'static str,
    /// Matrices of weights: 2 for gated, 1 for plain.
    pub matrices: u32,
    /// The type of tokens and C.
    pub operand_type: OperandType,
    /// The most tokens of a tile.
    pub tile_tokens: u32,
    /// Warpgroups that multiply.
    pub consumers: u32,
    /// Whether tiles have half as many columns as so many warpgroups could multiply.
    pub narrow: bool,
    /// Whether each warp multiplies its rows by itself, in narrow tiles.
    pub by_warps: bool,
    /// Whether tokens are sorted by expert, so that bulk copies bring them, and not gathered by threads.
    pub sorted: bool,
    /// Buffers of tokens.
    pub buffers: u32,
    /// Stages of the pipeline that brings weights from global to shared memory.
    pub stages: u32,
}

/// An [`Instance`] that lacks its stages.
#[derive(Clone, Copy, Debug)]
pub struct Builder(Instance);

/// The gated kernel for tokens of this type, with up to so many of them a tile.
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
        buffers: 0,
        stages: 0,
    })
}

/// As [`gated`], the plain kernel.
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

    /// Sets [`Instance::buffers`].
    pub const fn buffers(self, buffers: u32) -> Self {
        Self(Instance { buffers, ..self.0 })
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
    /// What the main loop is compiled for.
    pub const fn shape(self) -> Shape {
        let half = self.tile_tokens / 2;
        let most = if self.consumers == 4 { CORE_MATRIX_ROWS } else { LEAST_N };
        let least_n = if half > most { most } else { half };
        let &Self { matrices, tile_tokens, consumers, narrow, .. } = &self;
        Shape { matrices, tile_tokens, least_n, consumers, narrow }
    }

    /// Columns of C of a tile.
    pub const fn columns(self) -> u32 {
        self.shape().columns()
    }

    /// Threads of a block, in one dimension.
    pub const fn threads(self) -> u32 {
        self.shape().threads()
    }

    /// Whether warpgroups share out registers. Where products are a warp's, all have enough from the start.
    pub const fn shares_registers(self) -> bool {
        !self.by_warps
    }

    /// Rows of a panel that lie together in a stage: a slab's, or in a narrow tile half of them.
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

    /// Barriers: one for full and one for empty of each stage, of each buffer and of each tile written down, and those of turns.
    pub const fn barriers(self) -> u32 {
        2 * (self.stages + self.buffers + TILE_SLOTS) + TURN_BARRIERS
    }

    /// Warps that bring tokens.
    pub const fn token_warps(self) -> u32 {
        if self.sorted { 1 } else { 3 }
    }

    /// Bytes of a line of each token of a tile, where tokens are sorted.
    pub const fn lines_bytes(self) -> u32 {
        self.tile_tokens * LINE_BYTES
    }

    /// Bytes in which warps keep where a tile's tokens begin.
    pub const fn source_bytes(self) -> u32 {
        if self.sorted { 0 } else { self.tile_tokens / CORE_MATRIX_ROWS * STRIP_SOURCE_BYTES }
    }

    /// Dynamic shared memory of a block, in bytes.
    pub const fn shared_bytes(self) -> u32 {
        self.stages * self.stage_bytes()
            + self.buffers * self.shape().buffer_bytes()
            + self.source_bytes()
            + TILE_SLOTS * TILE_BYTES
            + self.barriers() * BARRIER_BYTES
    }

    /// Stops the compiler where an instance asks for more than there is.
    const fn check(self) {
        self.shape().check();
        assert!(SLAB_ROWS.is_multiple_of(self.piece_rows()), "a panel is of whole slabs, or is one half of one");
        assert!(self.stages > 1, "with one stage, filling it would wait for emptying it");
        assert!(self.buffers > 1, "with one buffer, filling it would wait for emptying it");
        if self.sorted {
            assert!(!self.by_warps, "`ldmatrix` reads strips");
            assert!(self.shape().least_n <= SPARE_ROWS, "a product has no more rows than its tile and spare ones");
            assert!(K_BLOCK_LINES * self.lines_bytes() == self.shape().buffer_bytes());
            // Then `wgmma`'s rows of 128 bytes begin where their swizzle does.
            assert!(self.stage_bytes().is_multiple_of(1024) && self.lines_bytes().is_multiple_of(1024));
        }
        assert!(self.shared_bytes() <= SHARED_BYTES, "stages and buffers do not fit shared memory");
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
            // Where tiles of so many tokens are wide too.
            let of_same_tiles = |other: &&Instance| {
                let of = |of: &Instance| (of.matrices, of.operand_type, of.tile_tokens);
                of(other) == of(instance)
            };
            let is_alone = INSTANCES.iter().filter(of_same_tiles).count() == 1;
            let narrow = if instance.narrow && !is_alone { "_narrow" } else { "" };
            let expected = std::format!("moe_{operation}_{operand_type}_t{}{narrow}", instance.tile_tokens);
            assert_eq!(instance.entry, expected);
        }
    }

    extern crate std;
}
