//! What host and `gated_sm90` agree on: descriptors, tiles, budgets, and the list of instances.
//!
//! A and B are swapped: weights lie on the tensor core's M, tokens on its N. A tile of C takes two *panels* of weights. A
//! block goes through K in *k-blocks*; a stage holds one k-block of a tile's weights.

use bytemuck::{Pod, Zeroable};

pub use crate::decoding::{CORE_MATRIX_ROWS, K_BLOCK, STRIP_BYTES};
use crate::{
    decoding::{BARRIER_BYTES, PANELS, SHARED_BYTES, Shape, TURN_BARRIERS},
    format::{SCALE_TILE_BYTES, SCALE_TILE_K, SCALE_TILE_ROWS},
    instances::table,
};

/// Bytes of a row of values in a k-block: what the 64-byte swizzle spans.
pub const K_BLOCK_BYTES: u32 = K_BLOCK / 2;

/// Lanes that share a row of a fragment of the tensor core (PTX ISA, "Register Fragments for wgmma.mma_async").
pub const ROW_LANES: u32 = 4;

/// Bytes of a row in a k-block that one of these lanes decodes: what a swizzle keeps together.
pub const LANE_BYTES: u32 = K_BLOCK_BYTES / ROW_LANES;

/// Tiles of the scale layout along a k-block.
pub const K_BLOCK_SCALE_TILES: u32 = K_BLOCK / SCALE_TILE_K;

/// K is a multiple of this: a row of values is whole lanes' bytes.
pub const K_ALIGNMENT: u32 = 32;

/// Rows of a slab of weights.
///
/// A slab is this many rows of a matrix of weights, one k-block of each: first the values, as [`lane_offset`] and
/// [`slab_byte`] say, then their scales, [`K_BLOCK_SCALE_TILES`] tiles of the blocked layout. A matrix [n, k] is slabs one
/// after the other: those of the first rows along K, then those of the next rows. What lies past the matrix's end is zero.
pub const SLAB_ROWS: u32 = SCALE_TILE_ROWS;

/// Bytes of a slab's values.
pub const SLAB_VALUE_BYTES: u32 = SLAB_ROWS * K_BLOCK_BYTES;

/// Bytes of a slab.
pub const SLAB_BYTES: u32 = SLAB_VALUE_BYTES + SLAB_SCALE_BYTES;

/// Bytes of a slab's scales.
pub const SLAB_SCALE_BYTES: u32 = K_BLOCK_SCALE_TILES * SCALE_TILE_BYTES;

/// The offset of a lane's bytes of a row, in bytes from the slab's start.
///
/// Rows are [`K_BLOCK_BYTES`] apart. Within a row, lanes are permuted as a tensor map's 64-byte swizzle permutes them if
/// the slab starts at a multiple of 512 (PTX ISA, "Tensor swizzle modes").
#[inline(always)]
pub const fn lane_offset(row: u32, lane: u32) -> u32 {
    row * K_BLOCK_BYTES + (lane ^ (row / 2 % ROW_LANES)) * LANE_BYTES
}

/// A byte of two e2m1 codes, the first in the low nibble, as it lies in a slab.
///
/// From bit 7 down: the first one's sign, the second one's exponent and mantissa, the first one's exponent and mantissa,
/// the second one's sign. So each code is few operations away from the high byte of an f16.
pub const fn slab_byte(codes: u8) -> u8 {
    codes << 4 & 0x80 | codes & 0x70 | codes << 1 & 0x0e | codes >> 7
}

/// One group of a grouped problem, as its [`Tile`]s have it.
///
/// `C = silu(alpha[0]·A·B[0]ᵀ) ∘ (alpha[1]·A·B[1]ᵀ)`, gate first; a plain kernel computes `alpha[0]·A·B[0]ᵀ` and does not
/// read index 1 of anything. B lies in slabs ([`SLAB_ROWS`]). A lies decoded, or packed where
/// [`Instance::decodes_tokens`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Group {
    /// Address of A: decoded as [`Tokens::decoded`], or packed as [`Tokens::values`].
    pub tokens: u64,
    /// Address of the scales of packed tokens, as [`Tokens::scales`]; not read where A is decoded.
    pub token_scales: u64,
    /// Addresses of the slabs of gate and up, multiples of 16.
    pub b: [u64; 2],
    /// Address of C [m, n], row-major, two bytes an element, a multiple of 16.
    pub c: u64,
    /// Products of the global scales: A's and gate's, A's and up's.
    pub alpha: [f32; 2],
    /// Rows of A and C: tokens.
    pub m: u32,
    /// Rows of each B, columns of C; a multiple of 8.
    pub n: u32,
    /// Elements summed over; a multiple of [`K_ALIGNMENT`], not 0.
    pub k: u32,
    /// Keeps the size a multiple of the alignment.
    pub unused: u32,
}

/// The tokens of a group and where they go when they are decoded, as an array of them lies in global memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Tokens {
    /// Address of the packed values `[m, k/2]`, a multiple of 16.
    pub values: u64,
    /// Address of their scales in the blocked layout, a multiple of 16.
    pub scales: u64,
    /// Address of the decoded values, a multiple of 16: strips ([`STRIP_BYTES`]), for each k-block those of all tokens.
    ///
    /// A strip lies as `wgmma` reads its B (`kernel/order.rs`). Elements past the end of K are zero; tokens past the last
    /// one are finite.
    pub decoded: u64,
    /// Tokens, not 0.
    pub m: u32,
    /// Elements of each; a multiple of [`K_ALIGNMENT`], not 0.
    pub k: u32,
    /// Blocks that decode the groups before this one.
    pub first_block: u32,
    /// Keeps the size a multiple of the alignment.
    pub unused: u32,
}

impl Tokens {
    /// Warps of a block that decodes; each makes a strip.
    pub const WARPS: u32 = 4;

    /// Threads of a block that decodes, in one dimension.
    pub const THREADS: u32 = Self::WARPS * 32;

    /// Strips that `m` tokens of `k` elements decode to.
    pub const fn strips(m: u32, k: u32) -> u64 {
        m.div_ceil(CORE_MATRIX_ROWS) as u64 * k.div_ceil(K_BLOCK) as u64
    }

    /// Blocks that decode the tokens: the next group's [`first_block`](Self::first_block) is so many further on. The grid
    /// is their sum, which must stay below 2³¹.
    pub const fn blocks(m: u32, k: u32) -> u64 {
        Self::strips(m, k).div_ceil(Self::WARPS as u64)
    }
}

/// The one parameter of the kernel that decodes tokens.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct TokensLaunch {
    /// Address of the array of [`Tokens`].
    pub groups: u64,
    /// Its length, not 0.
    pub group_count: u32,
    /// Keeps the size a multiple of the alignment.
    pub unused: u32,
}

/// The entry that decodes tokens.
pub const TOKENS_ENTRY: &str = "tokens_sm90";

/// One tile of C, as an array of them lies in global memory. It has its group inside, so that a thread that works on a tile
/// reads one place.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Tile {
    /// Its group.
    pub group: Group,
    /// First column of C; a multiple of [`Instance::columns`].
    pub first_column: u32,
    /// First token; a multiple of [`CORE_MATRIX_ROWS`].
    pub first_token: u32,
    /// Tokens, from 1 to the instance's [`Instance::tile_tokens`].
    pub tokens: u32,
    /// Index of the tile that the block computes next; 0 if there is none.
    pub next: u32,
}

/// The one parameter of a kernel that multiplies.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Launch {
    /// Address of the array of [`Tile`]. Block b begins with tile b.
    pub tiles: u64,
    /// [`OUTPUT_F16`](crate::format::OUTPUT_F16) or [`OUTPUT_BF16`](crate::format::OUTPUT_BF16).
    pub output: u32,
    /// Keeps the size a multiple of the alignment.
    pub unused: u32,
}

/// Passes the list of instances to `$each!`: of an operation, the smallest tile first.
///
/// A tile has up to so many tokens; `consumers` warpgroups multiply; `buffers` hold decoded tokens; `stages` hold weights.
///
/// With few tokens the work is to decode weights, and the registers suffice for four warpgroups that do it. With many
/// tokens the accumulators take the registers of two. Tokens come from the L2 cache; weights come from memory, and stages
/// hide its latency: about 64 KB on their way are enough. Where memory bandwidth is the limit, more stages are worse: the
/// multiprocessors that are served first run ahead, and the last ones end alone.
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

/// One way to build the kernel that multiplies, and what it takes of the hardware.
///
/// Shared memory of a block: stages, then buffers of decoded tokens, then barriers. A stage: the slabs of each panel.
///
/// What does not fit does not compile:
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
    /// The entry's name.
    pub entry: &'static str,
    /// Matrices of weights: 2 for gated, 1 for plain.
    pub matrices: u32,
    /// The most tokens of a tile.
    pub tile_tokens: u32,
    /// Warpgroups that multiply.
    pub consumers: u32,
    /// Whether a tile has 64 columns of C, for few tiles: a warpgroup then has 32 rows of gate and the same of up, and not 64 of each.
    pub narrow: bool,
    /// Buffers of decoded tokens.
    pub buffers: u32,
    /// Stages of the pipeline that brings weights from global to shared memory.
    pub stages: u32,
}

/// An [`Instance`] that lacks its stages.
#[derive(Clone, Copy, Debug)]
pub struct Builder(Instance);

/// The gated kernel with up to so many tokens a tile.
pub const fn gated(tile_tokens: u32) -> Builder {
    Builder(Instance { entry: "", matrices: 2, tile_tokens, consumers: 0, narrow: false, buffers: 0, stages: 0 })
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

    /// Sets [`Instance::narrow`].
    pub const fn narrow(self) -> Self {
        Self(Instance { narrow: true, ..self.0 })
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
    /// Whether blocks decode tokens themselves: they are so few that another grid would take longer to do it.
    pub const fn decodes_tokens(self) -> bool {
        self.tile_tokens <= 2 * CORE_MATRIX_ROWS
    }

    /// What the main loop is compiled for.
    pub const fn shape(self) -> Shape {
        Shape {
            matrices: self.matrices,
            tile_tokens: self.tile_tokens,
            least_n: self.tile_tokens / 2,
            consumers: self.consumers,
            narrow: self.narrow,
        }
    }

    /// Columns of C of a tile.
    pub const fn columns(self) -> u32 {
        self.shape().columns()
    }

    /// Threads of a block, in one dimension.
    pub const fn threads(self) -> u32 {
        self.shape().threads()
    }

    /// Slabs of a panel. A narrow one has the values of half of its slab's rows, and all of the scales, which lie mixed.
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

    /// The N of the tensor core's products for a tile of so many tokens.
    pub const fn mma_n(self, tokens: u32) -> u32 {
        self.shape().mma_n(tokens)
    }

    /// Bytes of a stage.
    pub const fn stage_bytes(self) -> u32 {
        PANELS as u32 * self.panel_bytes()
    }

    /// Barriers: one for full and one for empty of each stage and of each buffer, and those of turns.
    pub const fn barriers(self) -> u32 {
        2 * (self.stages + self.buffers) + TURN_BARRIERS
    }

    /// Dynamic shared memory of a block, in bytes.
    pub const fn shared_bytes(self) -> u32 {
        self.stages * self.stage_bytes() + self.buffers * self.shape().buffer_bytes() + self.barriers() * BARRIER_BYTES
    }

    /// Stops the compiler where an instance asks for more than there is.
    const fn check(self) {
        self.shape().check();
        let rows = self.shape().panel_rows();
        assert!(
            if self.narrow { 2 * rows == SLAB_ROWS } else { rows.is_multiple_of(SLAB_ROWS) },
            "a panel is whole slabs, or half of one"
        );
        assert!(!self.narrow || self.matrices == 2, "a narrow tile's warpgroups have rows of gate and up");
        assert!(self.stages > 1 && self.buffers > 1, "with one buffer, filling it would wait for emptying it");
        assert!(self.shared_bytes() <= SHARED_BYTES, "stages and buffers do not fit shared memory");
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
    fn every_instance_fits_and_has_a_name_of_its_own() {
        let names: BTreeSet<_> = INSTANCES.iter().map(|instance| instance.entry).collect();
        assert_eq!(names.len(), INSTANCES.len());
        INSTANCES.iter().for_each(|instance| instance.check());
    }

    #[test]
    fn budgets_are_as_counted_by_hand() {
        let instance = of("gated_sm90_t128");
        assert_eq!((instance.stage_bytes(), instance.shape().buffer_bytes()), (18_432, 32_768));
        assert_eq!((instance.columns(), of("plain_sm90_t128").columns()), (128, 256));
        let instance = of("gated_sm90_t16");
        assert_eq!((instance.columns(), instance.stage_bytes()), (256, 36_864));
    }

    #[test]
    fn n_goes_from_half_a_tile_to_a_whole_one() {
        let instance = of("gated_sm90_t128");
        let widths: Vec<_> = [1, 64, 65, 80, 81, 128].map(|tokens| instance.mma_n(tokens)).into();
        assert_eq!(widths, [64, 64, 72, 80, 88, 128]);
    }

    #[test]
    #[should_panic(expected = "shared memory")]
    fn more_stages_than_shared_memory_holds_are_refused() {
        gated(128).consumers(2).buffers(3).stages(8);
    }

    #[test]
    #[should_panic(expected = "the CTA is launched with fewer registers")]
    fn more_registers_than_a_block_has_are_refused() {
        Registers { producer: 24, consumer: 248 }.check(2);
    }

    #[test]
    #[should_panic(expected = "multiples of 8")]
    fn registers_that_are_not_allotted_in_eights_are_refused() {
        Registers { producer: 24, consumer: 236 }.check(2);
    }

    #[test]
    #[should_panic(expected = "1 to 128 tokens")]
    fn a_tile_of_more_tokens_than_there_are_main_loops_for_is_refused() {
        gated(256).consumers(2).buffers(2).stages(2);
    }
}
