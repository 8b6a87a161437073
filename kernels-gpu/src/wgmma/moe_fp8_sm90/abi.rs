//! Definitions that host and `moe_fp8_sm90` share: the parameter of a product, budgets, and the list of instances.
//!
//! A and B are swapped, as in [`decoding`](crate::decoding): weights are on the tensor core's M, tokens on its N. A
//! warpgroup decodes 64 rows of weights and multiplies them. Four warpgroups have the registers for the sums of up to
//! 128 tokens: while one waits, the others decode or multiply. Two warpgroups have the registers for 256 tokens, and
//! take turns.

use bytemuck::{Pod, Zeroable};

use crate::{
    decoding::{
        BARRIER_BYTES, CORE_MATRIX_ROWS, Registers, SHARED_BYTES, TILE_BYTES, TILE_SLOTS, TURN_BARRIERS, WARPGROUP,
        WARPGROUP_ROWS,
    },
    epilogue::Activation,
    instances::table,
    sorted::LINE_BYTES,
    units::{UNIT_BYTES, UNIT_ROWS},
};

/// The only parameter of a product. For every expert e and its rows it computes `C = silu(α·A·gateᵀ + bias) ∘ (α·A·upᵀ
/// + bias)`, or another activation of the two, or `C = α·A·downᵀ + bias`.
///
/// The sum s of a row with scale t becomes `fma(t·(8·α), s, bias)` in f32, where both products are rounded to f32.
///
/// [`Lists`](crate::lists::Lists) define each expert's rows. A plain product may also belong to a linear layer, where
/// the host knows the number of [`rows`](Self::rows): then there are no lists.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Launch {
    /// Address of the tokens, a multiple of 16: e4m3 in the layout of [`sorted`](crate::sorted), in the order of
    /// [`e4m3_position`](crate::units::e4m3_position).
    pub tokens: u64,
    /// Address of one f32 scale per row, a multiple of 16.
    pub scales: u64,
    /// Address of [`Lists::firsts`](crate::lists::Lists::firsts).
    pub firsts: u64,
    /// Address of [`Lists::tile_firsts`](crate::lists::Lists::tile_firsts), for the instance's
    /// [`Instance::tile_tokens`].
    pub tile_firsts: u64,
    /// Address of this product's ticket, which is 0 when the lists have been written.
    pub ticket: u64,
    /// Addresses of the units of the first expert's gate and up, or of its down (the second address is ignored);
    /// multiples of 16.
    pub b: [u64; 2],
    /// Bytes from one expert's weights to the next one's.
    pub expert_bytes: u64,
    /// Addresses of one f32 factor per expert: the global scales of gate and up, or of down. If the host knows the
    /// rows, the first address points to one factor per column of C.
    pub alpha: [u64; 2],
    /// Addresses of the biases, which are added to products times their factor: `[experts, n]`, f32, in the order of
    /// each B's rows; 0 for no bias.
    pub bias: [u64; 2],
    /// Address of C `[rows, n]`, 16-bit numbers, rows without gaps; a multiple of 16.
    pub c: u64,
    /// Number of rows of each B, and of columns of C; a multiple of 16.
    pub n: u32,
    /// Number of elements that are summed; a multiple of 16, not 0.
    pub k: u32,
    /// Number of experts, from 1 to [`MAX_EXPERTS`](crate::lists::MAX_EXPERTS).
    pub experts: u32,
    /// Number of rows of C, for a plain product with one expert that has all these rows; 0 if the lists define the rows
    /// of experts. The tokens' memory has rows up to the next multiple of
    /// [`ROW_MULTIPLE`](crate::sorted::ROW_MULTIPLE); C's memory has not.
    pub rows: u32,
    /// Capacity in rows of the tokens, per k-block.
    pub row_capacity: u32,
    /// Type of C: [`OUTPUT_F16`](crate::format::OUTPUT_F16) or [`OUTPUT_BF16`](crate::format::OUTPUT_BF16).
    pub output: u32,
    /// Activation of the sums.
    pub activation: Activation,
    /// Keeps the size a multiple of the alignment.
    pub unused: u32,
}

/// Number of tiles whose scales a CTA holds at a time.
pub const SCALE_SLOTS: u32 = 2;

/// Number of magnitudes of e2m1. A table entry has each magnitude times a scale.
pub const MAGNITUDES: u32 = 8;

/// Number of table entries: one per scale, an e4m3 without sign.
pub const TABLE_ENTRIES: u32 = 128;

/// Number of copies of the table. Half a warp reads it at a time, each lane in its own copy, so no bank is accessed
/// twice.
pub const TABLE_COPIES: u32 = 16;

/// Bytes of the table. The copies of an entry lie side by side.
pub const TABLE_BYTES: u32 = TABLE_ENTRIES * TABLE_COPIES * MAGNITUDES;

/// Maximum number of tokens per tile.
pub const MAX_TILE_TOKENS: u32 = 256;

/// Passes the list of instances to `$each!`. For each operation, the smallest tile comes first.
///
/// The argument of `gated` or `plain` is the maximum number of tokens per tile, `consumers` the number of warpgroups
/// that multiply, `buffers` the number of buffers of tokens, `stages` the number of stages of weights. A linear layer
/// with few columns and tokens uses narrow tiles, half as wide, so that more SMs have a tile.
macro_rules! instances {
    ($each:ident) => {
        $each! {
            moe_fp8_gated_t16 = gated(16).consumers(4).buffers(12).stages(9);
            moe_fp8_gated_t16_curves = gated(16).curves().consumers(4).buffers(12).stages(9);
            moe_fp8_gated_t32 = gated(32).consumers(4).buffers(10).stages(8);
            moe_fp8_gated_t32_curves = gated(32).curves().consumers(4).buffers(10).stages(8);
            moe_fp8_gated_t64 = gated(64).consumers(4).buffers(8).stages(7);
            moe_fp8_gated_t64_curves = gated(64).curves().consumers(4).buffers(8).stages(7);
            moe_fp8_gated_t128 = gated(128).consumers(4).buffers(7).stages(5);
            moe_fp8_gated_t128_curves = gated(128).curves().consumers(4).buffers(7).stages(5);
            moe_fp8_gated_t256 = gated(256).consumers(2).buffers(4).stages(6);
            moe_fp8_gated_t256_curves = gated(256).curves().consumers(2).buffers(4).stages(6);
            moe_fp8_plain_t16_narrow = plain(16).consumers(2).buffers(12).stages(18);
            moe_fp8_plain_t16 = plain(16).consumers(4).buffers(12).stages(9);
            moe_fp8_plain_t32 = plain(32).consumers(4).buffers(10).stages(8);
            moe_fp8_plain_t64_narrow = plain(64).consumers(2).buffers(8).stages(14);
            moe_fp8_plain_t64 = plain(64).consumers(4).buffers(8).stages(7);
            moe_fp8_plain_t128_narrow = plain(128).consumers(2).buffers(6).stages(10);
            moe_fp8_plain_t128 = plain(128).consumers(4).buffers(7).stages(5);
            moe_fp8_plain_t256 = plain(256).consumers(2).buffers(4).stages(6);
        }
    };
}
#[cfg(feature = "moe_fp8_sm90")]
pub(super) use instances;
instances!(table);

/// A compiled form of the kernel, and the hardware resources that it uses.
///
/// A CTA's shared memory has the buffers of tokens, then the stages, then the table, then scales, then the slots of
/// tiles, then the barriers. A stage has the rows of gate and then the rows of up, or the rows of the only matrix.
///
/// An instance that does not fit the hardware does not compile:
///
/// ```
/// # use kernels_gpu::wgmma::moe_fp8_sm90::abi::{Instance, gated};
/// const _: Instance = gated(256).consumers(2).buffers(4).stages(6);
/// ```
/// ```compile_fail,E0080
/// # use kernels_gpu::wgmma::moe_fp8_sm90::abi::{Instance, gated};
/// const _: Instance = gated(256).consumers(2).buffers(6).stages(6);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instance {
    /// Name of the entry.
    pub entry: &'static str,
    /// Number of matrices of weights: 2 for gated, 1 for plain.
    pub matrices: u32,
    /// Maximum number of tokens per tile.
    pub tile_tokens: u32,
    /// Whether a gated product has a [`Curve`](crate::curve::Curve) as its activation. Other instances have the other
    /// activations.
    pub curves: bool,
    /// Number of warpgroups that multiply: two that take turns, or four that do not.
    pub consumers: u32,
    /// Number of buffers of tokens.
    pub buffers: u32,
    /// Number of stages of the pipeline that loads weights from global to shared memory.
    pub stages: u32,
}

/// An [`Instance`] without its number of stages.
#[derive(Clone, Copy, Debug)]
pub struct Builder(Instance);

/// Builder of a gated instance with up to `tile_tokens` tokens per tile.
pub const fn gated(tile_tokens: u32) -> Builder {
    Builder(Instance { entry: "", matrices: 2, tile_tokens, curves: false, consumers: 0, buffers: 0, stages: 0 })
}

/// Builder of a plain instance with up to `tile_tokens` tokens per tile.
pub const fn plain(tile_tokens: u32) -> Builder {
    Builder(Instance { matrices: 1, ..gated(tile_tokens).0 })
}

impl Builder {
    /// Sets [`Instance::curves`].
    pub const fn curves(self) -> Self {
        Self(Instance { curves: true, ..self.0 })
    }

    /// Sets [`Instance::consumers`].
    pub const fn consumers(self, consumers: u32) -> Self {
        Self(Instance { consumers, ..self.0 })
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
    /// Threads per CTA, in one dimension: one warpgroup that loads, and those that multiply.
    pub const fn threads(self) -> u32 {
        (1 + self.consumers) * WARPGROUP
    }

    /// Whether two warpgroups take turns: one multiplies while the other one decodes.
    pub const fn ping_pong(self) -> bool {
        self.consumers == 2
    }

    /// Registers that `setmaxnreg` gives to threads.
    pub const fn registers(self) -> Registers {
        if self.ping_pong() { Registers::OF_TWO_CONSUMERS } else { Registers::OF_FOUR_CONSUMERS }
    }

    /// Whether four warpgroups would also have the registers for the sums.
    pub const fn is_narrow(self) -> bool {
        self.consumers == 2 && self.tile_tokens <= MAX_TILE_TOKENS / 2
    }

    /// Rows of weights per tile, of all matrices.
    pub const fn weight_rows(self) -> u32 {
        self.consumers * WARPGROUP_ROWS
    }

    /// Columns of C per tile.
    pub const fn columns(self) -> u32 {
        self.weight_rows() / self.matrices
    }

    /// Rows that are contiguous in a stage: the rows of one matrix, up to a slab.
    pub const fn piece_rows(self) -> u32 {
        self.weight_rows() / 2
    }

    /// Bytes of a piece in a stage.
    pub const fn piece_bytes(self) -> u32 {
        self.piece_rows() / UNIT_ROWS * UNIT_BYTES
    }

    /// Bytes of a stage.
    pub const fn stage_bytes(self) -> u32 {
        2 * self.piece_bytes()
    }

    /// Bytes of a buffer: one line per token.
    pub const fn buffer_bytes(self) -> u32 {
        self.tile_tokens * LINE_BYTES
    }

    /// Bytes of the scales of a tile.
    pub const fn scale_bytes(self) -> u32 {
        self.tile_tokens * 4
    }

    /// N of the tensor core's products for a tile of `tokens` tokens. There are few values, so that few mainloops are
    /// compiled.
    pub const fn mma_n(self, tokens: u32) -> u32 {
        let step = self.tile_tokens / 8;
        let step = if step < CORE_MATRIX_ROWS { CORE_MATRIX_ROWS } else { step };
        let (least, n) = (self.tile_tokens / 2, tokens.next_multiple_of(step));
        if n < least { least } else { n }
    }

    /// Number of barriers: a full and an empty barrier per stage, buffer, slot of tiles and slot of scales, and the
    /// barriers of turns.
    pub const fn barriers(self) -> u32 {
        2 * (self.stages + self.buffers + TILE_SLOTS + SCALE_SLOTS) + if self.ping_pong() { TURN_BARRIERS } else { 0 }
    }

    /// Dynamic shared memory of a CTA, in bytes.
    pub const fn shared_bytes(self) -> u32 {
        self.buffers * self.buffer_bytes()
            + self.stages * self.stage_bytes()
            + TABLE_BYTES
            + SCALE_SLOTS * self.scale_bytes()
            + TILE_SLOTS * TILE_BYTES
            + self.barriers() * BARRIER_BYTES
    }

    /// Fails to compile if the instance exceeds the hardware's resources.
    const fn check(self) {
        assert!(self.matrices == 1 || self.matrices == 2);
        assert!(self.consumers == 2 || self.consumers == 4, "use 2 warpgroups, which take turns, or 4, which do not");
        assert!(
            self.consumers * self.tile_tokens <= 2 * MAX_TILE_TOKENS,
            "the sums need too many registers: use fewer tokens per tile or fewer warpgroups"
        );
        assert!(
            self.tile_tokens.is_multiple_of(2 * CORE_MATRIX_ROWS),
            "half of a tile's tokens must be a multiple of a core matrix's rows"
        );
        // The rows of 128 bytes that `wgmma` reads then begin where the swizzle does.
        assert!(self.buffer_bytes().is_multiple_of(1024));
        assert!(
            self.stages > 1 && self.buffers > 1,
            "use at least 2 stages and 2 buffers: with one, filling it would wait for emptying it"
        );
        assert!(self.shared_bytes() <= SHARED_BYTES, "stages and buffers do not fit in shared memory");
        self.registers().check(self.consumers);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    extern crate std;

    #[test]
    fn instances_fit_and_are_named_after_their_parameters() {
        for instance in INSTANCES {
            instance.check();
            let operation = if instance.matrices == 2 { "gated" } else { "plain" };
            let width = if instance.is_narrow() { "_narrow" } else { "" };
            let curves = if instance.curves { "_curves" } else { "" };
            assert_eq!(instance.entry, std::format!("moe_fp8_{operation}_t{}{width}{curves}", instance.tile_tokens));
        }
    }

    #[test]
    fn products_cover_their_tiles() {
        for instance in INSTANCES {
            for tokens in (8..=instance.tile_tokens).step_by(8) {
                let n = instance.mma_n(tokens);
                assert!(n >= tokens && n <= instance.tile_tokens && n.is_multiple_of(8), "{tokens}: {n}");
            }
        }
    }
}
