//! What host and `moe_fp8_sm90` agree on: the parameter of a product, budgets, and the list of instances.
//!
//! A and B are swapped, as in [`sm90`](crate::decoding): weights lie on the tensor core's M, tokens on its N. A warpgroup decodes 64 rows of
//! weights and multiplies them. Four have registers for the sums of up to 128 tokens: while one waits, the others decode or multiply. Two
//! have them for 256, and take turns.

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

/// The one parameter of a product: for every expert e with its rows, `C = silu(α·A·gateᵀ + bias) ∘ (α·A·upᵀ + bias)` or another
/// activation of the two, or `C = α·A·downᵀ + bias`.
///
/// A sum s of a row with the scale t becomes `fma(t·(8·α), s, bias)` in f32, the two products rounded to f32.
///
/// Which rows an expert has, [`Lists`](crate::lists::Lists) say. A plain product may be a linear layer's instead, whose
/// [`rows`](Self::rows) the host knows: then there are no lists.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Launch {
    /// Address of the tokens, a multiple of 16: e4m3, as [`sorted`](crate::sorted) says, in the order of
    /// [`e4m3_position`](crate::units::e4m3_position).
    pub tokens: u64,
    /// Address of each row's scale, f32; a multiple of 16.
    pub scales: u64,
    /// Address of [`Lists::firsts`](crate::lists::Lists::firsts).
    pub firsts: u64,
    /// Address of [`Lists::tile_firsts`](crate::lists::Lists::tile_firsts), for the instance's
    /// [`Instance::tile_tokens`].
    pub tile_firsts: u64,
    /// Address of this product's ticket, 0 when the lists have been made.
    pub ticket: u64,
    /// Addresses of the units of the first expert's gate and up, or of its down (the second is not looked at); multiples of 16.
    pub b: [u64; 2],
    /// Bytes from one expert's to the next one's.
    pub expert_bytes: u64,
    /// Addresses of a factor for each expert, f32: the global scales of gate and up, or of down. Where the host knows the rows, the
    /// first is that of a factor for each column of C.
    pub alpha: [u64; 2],
    /// Addresses of what is added to products times their factor: `[experts, n]`, f32, in the order of the rows of each B; 0 for
    /// nothing.
    pub bias: [u64; 2],
    /// Address of C `[rows, n]`, 16-bit numbers, rows without gaps; a multiple of 16.
    pub c: u64,
    /// Rows of each B, columns of C; a multiple of 16.
    pub n: u32,
    /// Elements summed over; a multiple of 16, not 0.
    pub k: u32,
    /// Experts, from 1 to [`MAX_EXPERTS`](crate::lists::MAX_EXPERTS).
    pub experts: u32,
    /// Rows of C if there is one expert, whose rows are all of these, and the product is plain. 0 if lists say which rows an expert has.
    /// Tokens have rows up to the next multiple of [`ROW_MULTIPLE`](crate::sorted::ROW_MULTIPLE); C does not.
    pub rows: u32,
    /// Rows that tokens have room for in each k-block.
    pub row_capacity: u32,
    /// C's type: [`OUTPUT_F16`](crate::format::OUTPUT_F16) or [`OUTPUT_BF16`](crate::format::OUTPUT_BF16).
    pub output: u32,
    /// What becomes of sums.
    pub activation: Activation,
    /// Keeps the size a multiple of the alignment.
    pub unused: u32,
}

/// Scales of tiles that a block has at a time.
pub const SCALE_SLOTS: u32 = 2;

/// Magnitudes of e2m1: an entry of the table has each times a scale.
pub const MAGNITUDES: u32 = 8;

/// Entries of the table: one for each scale, an e4m3 without sign.
pub const TABLE_ENTRIES: u32 = 128;

/// Copies of the table: half a warp reads it at a time, each lane its own copy, so that no bank is met twice.
pub const TABLE_COPIES: u32 = 16;

/// Bytes of the table. An entry's copies lie side by side.
pub const TABLE_BYTES: u32 = TABLE_ENTRIES * TABLE_COPIES * MAGNITUDES;

/// The most tokens of a tile.
pub const MAX_TILE_TOKENS: u32 = 256;

/// Passes the list of instances to `$each!`: of an operation, the smallest tile first.
///
/// A tile has up to so many tokens; so many warpgroups multiply; `buffers` hold tokens; `stages` hold weights. A linear layer of few
/// columns and tokens has narrow tiles, half as wide, so that more multiprocessors have one.
macro_rules! instances {
    ($each:ident) => {
        $each! {
            moe_fp8_gated_t16 = gated(16).consumers(4).buffers(12).stages(9);
            moe_fp8_gated_t32 = gated(32).consumers(4).buffers(10).stages(8);
            moe_fp8_gated_t64 = gated(64).consumers(4).buffers(8).stages(7);
            moe_fp8_gated_t128 = gated(128).consumers(4).buffers(7).stages(5);
            moe_fp8_gated_t256 = gated(256).consumers(2).buffers(4).stages(6);
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

/// One way to build the kernel, and what it takes of the hardware.
///
/// Shared memory of a block: buffers of tokens, then stages, then the table, then scales, then what is written down of tiles, then
/// barriers. A stage has the rows of gate and then those of up, or those of the only matrix.
///
/// What does not fit does not compile:
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
    /// The entry's name.
    pub entry: &'static str,
    /// Matrices of weights: 2 for gated, 1 for plain.
    pub matrices: u32,
    /// The most tokens of a tile.
    pub tile_tokens: u32,
    /// Warpgroups that multiply: two that take turns, or four that do not.
    pub consumers: u32,
    /// Buffers of tokens.
    pub buffers: u32,
    /// Stages of the pipeline that brings weights from global to shared memory.
    pub stages: u32,
}

/// An [`Instance`] that lacks its stages.
#[derive(Clone, Copy, Debug)]
pub struct Builder(Instance);

/// The gated kernel, with up to so many tokens a tile.
pub const fn gated(tile_tokens: u32) -> Builder {
    Builder(Instance { entry: "", matrices: 2, tile_tokens, consumers: 0, buffers: 0, stages: 0 })
}

/// As [`gated`], the plain kernel.
pub const fn plain(tile_tokens: u32) -> Builder {
    Builder(Instance { matrices: 1, ..gated(tile_tokens).0 })
}

impl Builder {
    /// Sets [`Instance::consumers`].
    pub const fn consumers(self, consumers: u32) -> Self {
        Self(Instance { consumers, ..self.0 })
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
    /// Threads of a block, in one dimension: a warpgroup that loads, and those that multiply.
    pub const fn threads(self) -> u32 {
        (1 + self.consumers) * WARPGROUP
    }

    /// Whether two warpgroups take turns to multiply, while the other decodes.
    pub const fn ping_pong(self) -> bool {
        self.consumers == 2
    }

    /// What `setmaxnreg` gives to threads.
    pub const fn registers(self) -> Registers {
        if self.ping_pong() { Registers::OF_TWO_CONSUMERS } else { Registers::OF_FOUR_CONSUMERS }
    }

    /// Whether four warpgroups would have registers for the sums too.
    pub const fn is_narrow(self) -> bool {
        self.consumers == 2 && self.tile_tokens <= MAX_TILE_TOKENS / 2
    }

    /// Rows of weights of a tile, of all matrices.
    pub const fn weight_rows(self) -> u32 {
        self.consumers * WARPGROUP_ROWS
    }

    /// Columns of C of a tile.
    pub const fn columns(self) -> u32 {
        self.weight_rows() / self.matrices
    }

    /// Rows that lie together in a stage: those of one matrix, up to a slab.
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

    /// Bytes of a buffer: a line of each token.
    pub const fn buffer_bytes(self) -> u32 {
        self.tile_tokens * LINE_BYTES
    }

    /// Bytes of the scales of a tile.
    pub const fn scale_bytes(self) -> u32 {
        self.tile_tokens * 4
    }

    /// The N of the tensor core's products for a tile of so many tokens: there are few, so that there are few main loops to compile.
    pub const fn mma_n(self, tokens: u32) -> u32 {
        let step = self.tile_tokens / 8;
        let step = if step < CORE_MATRIX_ROWS { CORE_MATRIX_ROWS } else { step };
        let (least, n) = (self.tile_tokens / 2, tokens.next_multiple_of(step));
        if n < least { least } else { n }
    }

    /// Barriers: one for full and one for empty of each stage, buffer, tile written down and slot of scales, and those of turns.
    pub const fn barriers(self) -> u32 {
        2 * (self.stages + self.buffers + TILE_SLOTS + SCALE_SLOTS) + if self.ping_pong() { TURN_BARRIERS } else { 0 }
    }

    /// Dynamic shared memory of a block, in bytes.
    pub const fn shared_bytes(self) -> u32 {
        self.buffers * self.buffer_bytes()
            + self.stages * self.stage_bytes()
            + TABLE_BYTES
            + SCALE_SLOTS * self.scale_bytes()
            + TILE_SLOTS * TILE_BYTES
            + self.barriers() * BARRIER_BYTES
    }

    /// Stops the compiler where an instance asks for more than there is.
    const fn check(self) {
        assert!(self.matrices == 1 || self.matrices == 2);
        assert!(self.consumers == 2 || self.consumers == 4, "two warpgroups take turns, or four do not");
        assert!(
            self.consumers * self.tile_tokens <= 2 * MAX_TILE_TOKENS,
            "sums have half as many registers as the product"
        );
        assert!(self.tile_tokens.is_multiple_of(2 * CORE_MATRIX_ROWS), "half a tile is whole core matrices");
        // Then `wgmma`'s rows of 128 bytes begin where their swizzle does.
        assert!(self.buffer_bytes().is_multiple_of(1024));
        assert!(self.stages > 1 && self.buffers > 1, "with one, filling it would wait for emptying it");
        assert!(self.shared_bytes() <= SHARED_BYTES, "stages and buffers do not fit shared memory");
        self.registers().check(self.consumers);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    extern crate std;

    #[test]
    fn every_instance_fits_and_is_called_what_it_is() {
        for instance in INSTANCES {
            instance.check();
            let operation = if instance.matrices == 2 { "gated" } else { "plain" };
            let width = if instance.is_narrow() { "_narrow" } else { "" };
            assert_eq!(instance.entry, std::format!("moe_fp8_{operation}_t{}{width}", instance.tile_tokens));
        }
    }

    #[test]
    fn products_are_as_wide_as_their_tiles_and_little_more() {
        for instance in INSTANCES {
            for tokens in (8..=instance.tile_tokens).step_by(8) {
                let n = instance.mma_n(tokens);
                assert!(n >= tokens && n <= instance.tile_tokens && n.is_multiple_of(8), "{tokens}: {n}");
            }
        }
    }
}
