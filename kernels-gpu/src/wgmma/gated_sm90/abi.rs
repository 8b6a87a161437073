//! Definitions that host and `gated_sm90` share: descriptors, tiles, budgets, and the list of instances.
//!
//! A and B are swapped: weights are on the tensor core's M, tokens on its N. A tile of C uses two *panels* of weights.
//! A CTA iterates over K in *k-blocks*; a stage holds one k-block of a tile's weights.

use bytemuck::{Pod, Zeroable};

pub use crate::decoding::{CORE_MATRIX_ROWS, K_BLOCK, STRIP_BYTES};
use crate::{
    decoding::{BARRIER_BYTES, PANELS, SHARED_BYTES, Shape, TURN_BARRIERS},
    format::{SCALE_TILE_BYTES, SCALE_TILE_K, SCALE_TILE_ROWS},
    instances::table,
};

/// Bytes of a row of values in a k-block: the span of the 64-byte swizzle.
pub const K_BLOCK_BYTES: u32 = K_BLOCK / 2;

/// Number of lanes that share a row of a fragment of the tensor core (PTX ISA, "Register Fragments for
/// wgmma.mma_async").
pub const ROW_LANES: u32 = 4;

/// Bytes of a row in a k-block that one of these lanes decodes: the bytes that a swizzle keeps together.
pub const LANE_BYTES: u32 = K_BLOCK_BYTES / ROW_LANES;

/// Tiles of the scale layout along a k-block.
pub const K_BLOCK_SCALE_TILES: u32 = K_BLOCK / SCALE_TILE_K;

/// K is a multiple of this, so a row of values has whole lanes.
pub const K_ALIGNMENT: u32 = 32;

/// Rows of a slab of weights.
///
/// A slab has this many rows of a matrix of weights × one k-block: first the values, in the layout of [`lane_offset`]
/// and [`slab_byte`], then their scales, [`K_BLOCK_SCALE_TILES`] tiles of the blocked layout. A matrix [n, k] is a
/// sequence of slabs: first all slabs of the first rows along K, then all slabs of the next rows. Bytes past the end of
/// the matrix are zero.
pub const SLAB_ROWS: u32 = SCALE_TILE_ROWS;

/// Bytes of a slab's values.
pub const SLAB_VALUE_BYTES: u32 = SLAB_ROWS * K_BLOCK_BYTES;

/// Bytes of a slab.
pub const SLAB_BYTES: u32 = SLAB_VALUE_BYTES + SLAB_SCALE_BYTES;

/// Bytes of a slab's scales.
pub const SLAB_SCALE_BYTES: u32 = K_BLOCK_SCALE_TILES * SCALE_TILE_BYTES;

/// Offset of a lane's bytes of a row, in bytes from the start of the slab.
///
/// Rows are [`K_BLOCK_BYTES`] apart. Within a row, lanes are permuted like a tensor map's 64-byte swizzle permutes them
/// if the slab starts at a multiple of 512 (PTX ISA, "Tensor swizzle modes").
#[inline(always)]
pub const fn lane_offset(row: u32, lane: u32) -> u32 {
    row * K_BLOCK_BYTES + (lane ^ (row / 2 % ROW_LANES)) * LANE_BYTES
}

/// Converts a byte of two e2m1 codes, the first in the low nibble, to its form in a slab.
///
/// From bit 7 down: the first code's sign, the second code's exponent and mantissa, the first code's exponent and
/// mantissa, the second code's sign. In this form, few operations convert each code to the high byte of an f16.
pub const fn slab_byte(codes: u8) -> u8 {
    codes << 4 & 0x80 | codes & 0x70 | codes << 1 & 0x0e | codes >> 7
}

/// One group of a grouped problem, as its [`Tile`]s contain it.
///
/// `C = silu(alpha[0]·A·B[0]ᵀ) ∘ (alpha[1]·A·B[1]ᵀ)`, gate first. A plain kernel computes `alpha[0]·A·B[0]ᵀ` and
/// ignores index 1 of every array. B is stored in slabs ([`SLAB_ROWS`]). A is decoded, or packed for an instance with
/// [`Instance::decodes_tokens`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Group {
    /// Address of A: decoded like [`Tokens::decoded`], or packed like [`Tokens::values`].
    pub tokens: u64,
    /// Address of the scales of packed tokens, like [`Tokens::scales`]; not read if A is decoded.
    pub token_scales: u64,
    /// Addresses of the slabs of gate and up, multiples of 16.
    pub b: [u64; 2],
    /// Address of C [m, n], row-major, two bytes per element; a multiple of 16.
    pub c: u64,
    /// Products of the global scales: A's times gate's, and A's times up's.
    pub alpha: [f32; 2],
    /// Number of rows of A and C, which are tokens.
    pub m: u32,
    /// Number of rows of each B, and of columns of C; a multiple of 8.
    pub n: u32,
    /// Number of elements that are summed; a multiple of [`K_ALIGNMENT`], not 0.
    pub k: u32,
    /// Keeps the size a multiple of the alignment.
    pub unused: u32,
}

/// Tokens of a group and the destination of their decoded form; an element of an array in global memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Tokens {
    /// Address of the packed values `[m, k/2]`, a multiple of 16.
    pub values: u64,
    /// Address of the scales in the blocked layout, a multiple of 16.
    pub scales: u64,
    /// Address of the decoded values, a multiple of 16: strips ([`STRIP_BYTES`]), with all tokens' strips of a k-block
    /// in sequence, then the strips of the next k-block.
    ///
    /// A strip has the layout in which `wgmma` reads B (`kernel/order.rs`). Elements past the end of K are zero; tokens
    /// past the last one are finite.
    pub decoded: u64,
    /// Number of tokens, not 0.
    pub m: u32,
    /// Number of elements per token; a multiple of [`K_ALIGNMENT`], not 0.
    pub k: u32,
    /// Number of CTAs that decode the preceding groups.
    pub first_block: u32,
    /// Keeps the size a multiple of the alignment.
    pub unused: u32,
}

impl Tokens {
    /// Warps of a CTA that decodes; each warp makes one strip.
    pub const WARPS: u32 = 4;

    /// Threads of a CTA that decodes, in one dimension.
    pub const THREADS: u32 = Self::WARPS * 32;

    /// Number of strips that `m` tokens of `k` elements decode to.
    pub const fn strips(m: u32, k: u32) -> u64 {
        m.div_ceil(CORE_MATRIX_ROWS) as u64 * k.div_ceil(K_BLOCK) as u64
    }

    /// Number of CTAs that decode the tokens: the next group's [`first_block`](Self::first_block) is this group's plus
    /// this number. The grid is the sum over all groups, which must stay below 2³¹.
    pub const fn blocks(m: u32, k: u32) -> u64 {
        Self::strips(m, k).div_ceil(Self::WARPS as u64)
    }
}

/// The only parameter of the kernel that decodes tokens.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct TokensLaunch {
    /// Address of the array of [`Tokens`].
    pub groups: u64,
    /// Number of elements of the array, not 0.
    pub group_count: u32,
    /// Keeps the size a multiple of the alignment.
    pub unused: u32,
}

/// Name of the entry that decodes tokens.
pub const TOKENS_ENTRY: &str = "tokens_sm90";

/// One tile of C; an element of an array in global memory. The tile contains its group, so a thread that works on a
/// tile reads one place.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Tile {
    /// Group of the tile.
    pub group: Group,
    /// First column of C; a multiple of [`Instance::columns`].
    pub first_column: u32,
    /// First token; a multiple of [`CORE_MATRIX_ROWS`].
    pub first_token: u32,
    /// Number of tokens, from 1 to the instance's [`Instance::tile_tokens`].
    pub tokens: u32,
    /// Index of the tile that the CTA computes next; 0 if there is none.
    pub next: u32,
}

/// The only parameter of a kernel that multiplies.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Launch {
    /// Address of the array of [`Tile`]. CTA b begins with tile b.
    pub tiles: u64,
    /// [`OUTPUT_F16`](crate::format::OUTPUT_F16) or [`OUTPUT_BF16`](crate::format::OUTPUT_BF16).
    pub output: u32,
    /// Keeps the size a multiple of the alignment.
    pub unused: u32,
}

/// Passes the list of instances to `$each!`. For each operation, the smallest tile comes first.
///
/// The argument of `gated` or `plain` is the maximum number of tokens per tile, `consumers` the number of warpgroups
/// that multiply, `buffers` the number of buffers of decoded tokens, `stages` the number of stages of weights.
///
/// With few tokens, most of the work is decoding weights, and the registers suffice for four warpgroups that decode.
/// With many tokens, the accumulators take the registers of two warpgroups. Tokens come from the L2 cache. Weights come
/// from memory, and stages hide its latency: about 64 KB in flight are enough. Where memory bandwidth is the limit,
/// more stages are slower: the SMs that are served first run ahead, and the last ones finish alone.
macro_rules! instances {
    ($each:ident) => {
        $each! {
            gated_sm90_t16 = gated(16).consumers(4).buffers(6).stages(3);
            gated_sm90_t64 = gated(64).consumers(2).buffers(4).stages(9);
            gated_sm90_t128 = gated(128).consumers(2).buffers(3).stages(7);
            gated_sm90_t128_narrow = gated(128).consumers(2).narrow().buffers(4).stages(9);
            plain_sm90_t16 = plain(16).consumers(4).buffers(6).stages(3);
            plain_sm90_t64 = plain(64).consumers(2).buffers(4).stages(9);
            plain_sm90_t128 = plain(128).consumers(2).buffers(3).stages(7);
        }
    };
}
#[cfg(feature = "gated_sm90")]
pub(super) use instances;
instances!(table);

/// A compiled form of the kernel that multiplies, and the hardware resources that it uses.
///
/// A CTA's shared memory has the stages, then the buffers of decoded tokens, then the barriers. A stage has the slabs
/// of each panel.
///
/// An instance that does not fit the hardware does not compile:
///
/// ```
/// # use kernels_gpu::wgmma::gated_sm90::abi::{Instance, gated};
/// const _: Instance = gated(64).consumers(2).buffers(4).stages(9);
/// ```
/// ```compile_fail,E0080
/// # use kernels_gpu::wgmma::gated_sm90::abi::{Instance, gated};
/// const _: Instance = gated(64).consumers(2).buffers(4).stages(12);
/// ```
/// ```compile_fail,E0080
/// # use kernels_gpu::wgmma::gated_sm90::abi::{Instance, gated};
/// const _: Instance = gated(64).consumers(3).buffers(4).stages(9);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instance {
    /// Name of the entry.
    pub entry: &'static str,
    /// Number of matrices of weights: 2 for gated, 1 for plain.
    pub matrices: u32,
    /// Maximum number of tokens per tile.
    pub tile_tokens: u32,
    /// Number of warpgroups that multiply.
    pub consumers: u32,
    /// Whether a tile has 64 columns of C, for few tiles. A warpgroup then has 32 rows of gate and 32 of up, instead of
    /// 64 of each.
    pub narrow: bool,
    /// Number of buffers of decoded tokens.
    pub buffers: u32,
    /// Number of stages of the pipeline that loads weights from global to shared memory.
    pub stages: u32,
}

/// An [`Instance`] without its number of stages.
#[derive(Clone, Copy, Debug)]
pub struct Builder(Instance);

/// Builder of a gated instance with up to `tile_tokens` tokens per tile.
pub const fn gated(tile_tokens: u32) -> Builder {
    Builder(Instance { entry: "", matrices: 2, tile_tokens, consumers: 0, narrow: false, buffers: 0, stages: 0 })
}

/// Builder of a plain instance with up to `tile_tokens` tokens per tile.
pub const fn plain(tile_tokens: u32) -> Builder {
    Builder(Instance { matrices: 1, ..gated(tile_tokens).0 })
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
    /// Whether CTAs decode tokens themselves, because for few tokens a separate grid would take longer.
    pub const fn decodes_tokens(self) -> bool {
        self.tile_tokens <= 2 * CORE_MATRIX_ROWS
    }

    /// Shape that the mainloop is compiled for.
    pub const fn shape(self) -> Shape {
        Shape {
            matrices: self.matrices,
            tile_tokens: self.tile_tokens,
            least_n: self.tile_tokens / 2,
            consumers: self.consumers,
            narrow: self.narrow,
        }
    }

    /// Columns of C per tile.
    pub const fn columns(self) -> u32 {
        self.shape().columns()
    }

    /// Threads per CTA, in one dimension.
    pub const fn threads(self) -> u32 {
        self.shape().threads()
    }

    /// Slabs per panel. A narrow panel has the values of half of its slab's rows, and all of the slab's scales, which
    /// are interleaved.
    pub const fn panel_slabs(self) -> u32 {
        self.shape().panel_rows().div_ceil(SLAB_ROWS)
    }

    /// Bytes of a slab's values in a stage.
    pub const fn value_bytes(self) -> u32 {
        if self.narrow { SLAB_VALUE_BYTES / 2 } else { SLAB_VALUE_BYTES }
    }

    /// Bytes of a panel in a stage.
    pub const fn panel_bytes(self) -> u32 {
        self.panel_slabs() * (self.value_bytes() + SLAB_SCALE_BYTES)
    }

    /// N of the tensor core's products for a tile of `tokens` tokens.
    pub const fn mma_n(self, tokens: u32) -> u32 {
        self.shape().mma_n(tokens)
    }

    /// Bytes of a stage.
    pub const fn stage_bytes(self) -> u32 {
        PANELS as u32 * self.panel_bytes()
    }

    /// Number of barriers: a full and an empty barrier per stage and per buffer, and the barriers of turns.
    pub const fn barriers(self) -> u32 {
        2 * (self.stages + self.buffers) + TURN_BARRIERS
    }

    /// Dynamic shared memory of a CTA, in bytes.
    pub const fn shared_bytes(self) -> u32 {
        self.stages * self.stage_bytes() + self.buffers * self.shape().buffer_bytes() + self.barriers() * BARRIER_BYTES
    }

    /// Fails to compile if the instance exceeds the hardware's resources.
    const fn check(self) {
        self.shape().check();
        let rows = self.shape().panel_rows();
        assert!(
            if self.narrow { 2 * rows == SLAB_ROWS } else { rows.is_multiple_of(SLAB_ROWS) },
            "the rows of a panel must be half a slab, or a multiple of a slab"
        );
        assert!(!self.narrow || self.matrices == 2, "only a gated instance can be narrow");
        assert!(
            self.stages > 1 && self.buffers > 1,
            "use at least 2 stages and 2 buffers: with one, filling it would wait for emptying it"
        );
        assert!(self.shared_bytes() <= SHARED_BYTES, "stages and buffers do not fit in shared memory");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decoding::Registers;

    extern crate std;
    use std::{collections::BTreeSet, vec::Vec};

    fn of(entry: &str) -> Instance {
        *INSTANCES.iter().find(|instance| instance.entry == entry).unwrap()
    }

    #[test]
    fn instances_fit_and_have_distinct_names() {
        let names: BTreeSet<_> = INSTANCES.iter().map(|instance| instance.entry).collect();
        assert_eq!(names.len(), INSTANCES.len());
        INSTANCES.iter().for_each(|instance| instance.check());
    }

    #[test]
    fn budgets_match_hand_counts() {
        let instance = of("gated_sm90_t128");
        assert_eq!((instance.stage_bytes(), instance.shape().buffer_bytes()), (18_432, 32_768));
        assert_eq!((instance.columns(), of("plain_sm90_t128").columns()), (128, 256));
        let instance = of("gated_sm90_t16");
        assert_eq!((instance.columns(), instance.stage_bytes()), (256, 36_864));
    }

    #[test]
    fn n_ranges_from_half_a_tile_to_a_whole_tile() {
        let instance = of("gated_sm90_t128");
        let widths: Vec<_> = [1, 64, 65, 80, 81, 128].map(|tokens| instance.mma_n(tokens)).into();
        assert_eq!(widths, [64, 64, 72, 80, 88, 128]);
    }

    #[test]
    #[should_panic(expected = "shared memory")]
    fn stages_beyond_shared_memory_are_refused() {
        gated(128).consumers(2).buffers(3).stages(8);
    }

    #[test]
    #[should_panic(expected = "more registers than the CTA is launched with")]
    fn registers_beyond_the_cta_are_refused() {
        Registers { producer: 24, consumer: 248 }.check(2);
    }

    #[test]
    #[should_panic(expected = "must be multiples of 8")]
    fn register_counts_off_multiples_of_eight_are_refused() {
        Registers { producer: 24, consumer: 236 }.check(2);
    }

    #[test]
    #[should_panic(expected = "a tile must have 1 to 128 tokens")]
    fn tiles_wider_than_every_mainloop_are_refused() {
        gated(256).consumers(2).buffers(2).stages(2);
    }
}
