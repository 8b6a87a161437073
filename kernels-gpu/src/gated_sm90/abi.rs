//! What host and `gated_sm90` agree on: descriptors, tiles, budgets, and the list of its entries.
//!
//! Weights lie on the tensor core's M, two panels of rows a tile; tokens on its N, which a tile chooses for itself.

use bytemuck::{Pod, Zeroable};

use crate::format::{BLOCK, SCALE_TILE_COLUMNS, SCALE_TILE_ROWS};

/// Threads of a warpgroup.
pub const WARPGROUP: u32 = 128;

/// Rows of a panel that a warpgroup multiplies: the tensor core's M.
pub const WARPGROUP_ROWS: u32 = 64;

/// Elements of K of a stage.
pub const STEP: u32 = 128;

/// Bytes of a row of values in a stage: what the 64-byte swizzle spans.
pub const STEP_BYTES: u32 = STEP / 2;

/// Lanes of a fragment of the tensor core that share a row.
pub const ROW_LANES: u32 = 4;

/// Bytes of a row in a stage that are a lane's: what a swizzle keeps together.
pub const LANE_BYTES: u32 = STEP_BYTES / ROW_LANES;

/// Elements of K of a tile of the scale layout.
pub const SCALE_TILE_K: u32 = BLOCK * SCALE_TILE_COLUMNS;

/// Tiles of the scale layout along a stage's K.
pub const STEP_SCALE_TILES: u32 = STEP / SCALE_TILE_K;

/// K is a multiple of this: a row is whole lanes' bytes.
pub const K_ALIGNMENT: u32 = 32;

/// Rows of a slab of weights.
///
/// A matrix of weights [n, k] lies in slabs, one of these many rows and [`STEP`] elements of K after the other: first those of
/// the first rows, in the order of K. A slab is what a stage holds of its rows: their values as [`lane_offset`] and [`weights`]
/// say, then their scales, [`STEP_SCALE_TILES`] tiles of the blocked layout. What is past the matrix's end are zeros.
pub const SLAB_ROWS: u32 = SCALE_TILE_ROWS;

/// Bytes of a slab's values, and of them and the scales.
pub const SLAB_VALUE_BYTES: u32 = SLAB_ROWS * STEP_BYTES;
/// See [`SLAB_VALUE_BYTES`].
pub const SLAB_BYTES: u32 = SLAB_VALUE_BYTES + Instance::SCALE_BYTES;

/// Where a lane's bytes of a row lie, of rows of [`STEP_BYTES`] one after the other: as the 64-byte swizzle of a tensor map
/// puts them (PTX ISA, "Tensor swizzle modes") if the first row is at a multiple of 512.
#[inline(always)]
pub const fn lane_offset(row: u32, lane: u32) -> u32 {
    row * STEP_BYTES + (lane ^ (row / 2 % ROW_LANES)) * LANE_BYTES
}

/// A byte of two e2m1, the first in the low nibble, as it lies in a slab, bit 7 first: the first one's sign, the second one's
/// exponent and mantissa, the first one's, the second one's sign. So the first one's bits are where f16's high byte has them.
pub const fn weights(codes: u8) -> u8 {
    codes << 4 & 0x80 | codes & 0x70 | codes << 1 & 0x0e | codes >> 7
}

/// Panels of weights of a tile: gate and up of the same columns of C, or neighbouring columns of a plain C.
pub const PANELS: u32 = 2;

/// Bytes of a tile of the blocked scale layout.
pub const SCALE_TILE_BYTES: u32 = SCALE_TILE_ROWS * SCALE_TILE_COLUMNS;

/// What a block may have of shared memory on a card of compute capability 9.0 (CUDA programming guide, "Technical
/// Specifications per Compute Capability").
pub const SHARED_BYTES: u32 = 227 << 10;

/// Bytes of a barrier.
const BARRIER_BYTES: u32 = 8;

/// One group of a grouped problem, as its [`Tile`]s have it.
///
/// Computes what [`gated_simt::abi::Group`](crate::gated_simt::abi::Group) says. Weights lie in slabs ([`SLAB_ROWS`]), tokens decoded.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Group {
    /// Address of A: decoded by the grid before, [`Tokens::decoded`], or packed, [`Tokens::values`].
    pub tokens: u64,
    /// Address of the scales of packed tokens, [`Tokens::scales`].
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

/// Tokens that are decoded together: the rows of a core matrix of `wgmma`'s B.
pub const EIGHT: u32 = 8;

/// Bytes of eight tokens' elements of a stage, decoded to f16.
pub const EIGHT_BYTES: u32 = EIGHT * STEP * 2;

/// The tokens of a group and where they lie decoded, as an array of them lies in global memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct Tokens {
    /// Address of the packed values `[m, k/2]`, a multiple of 16.
    pub values: u64,
    /// Address of their scales in the blocked layout, a multiple of 16.
    pub scales: u64,
    /// Address of the decoded values, a multiple of 16: for every stage of K, for every eight tokens, [`EIGHT_BYTES`] as
    /// `wgmma` reads its B (`gated_sm90/order.rs`). What is missing of the last stage is zero, of the last eight anything
    /// finite.
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
    /// Warps of a block that decodes, each eight tokens' elements of a stage.
    pub const WARPS: u32 = 4;

    /// Threads of a block.
    pub const THREADS: u32 = Self::WARPS * 32;

    /// Pieces of [`EIGHT_BYTES`] that tokens decode to.
    pub const fn pieces(m: u32, k: u32) -> u64 {
        m.div_ceil(EIGHT) as u64 * k.div_ceil(STEP) as u64
    }

    /// Blocks that decode the tokens: what the next group's [`first_block`](Self::first_block) is further on. The grid is
    /// their sum, which must stay below 2³¹.
    pub const fn blocks(m: u32, k: u32) -> u64 {
        Self::pieces(m, k).div_ceil(Self::WARPS as u64)
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

/// One tile of C and its group, as an array of them lies in global memory: one place to read for whoever works on a tile.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Tile {
    /// Its group.
    pub group: Group,
    /// First column of C; a multiple of [`Instance::columns`].
    pub first_column: u32,
    /// First token; a multiple of [`EIGHT`].
    pub first_token: u32,
    /// Tokens, from 1 to the entry's [`Instance::tile_tokens`].
    pub tokens: u32,
    /// Index of the tile that the block computes next; 0 if there is none.
    pub next: u32,
}

/// The one parameter of a kernel.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Launch {
    /// Address of the array of [`Tile`]: block b's first is the one of index b.
    pub tiles: u64,
    /// [`OUTPUT_F16`](crate::format::OUTPUT_F16) or [`OUTPUT_BF16`](crate::format::OUTPUT_BF16).
    pub output: u32,
    /// Keeps the size a multiple of the alignment.
    pub unused: u32,
}

/// Calls `$each!` with every entry that multiplies: its name, the matrices of weights (2 for gated, 1 for plain), the most
/// tokens of a tile, the warpgroups that multiply, the stages of weights, the buffers of tokens.
///
/// Few tokens leave decoding weights as the work, and registers for four warpgroups to do it; many take the registers of
/// two. Tokens come from the L2 cache, weights from memory, whose latency stages hide: some 64 KB on their way are enough. Where
/// memory is what binds, more are worse: multiprocessors that are served first run ahead, and the last ones end alone.
#[macro_export]
macro_rules! sm90_instances {
    ($each:ident) => {
        $each! {
            gated_sm90_t16 = 2, 16, 4, 3, 6;
            gated_sm90_t64 = 2, 64, 2, 9, 4;
            gated_sm90_t128 = 2, 128, 2, 7, 3;
            plain_sm90_t16 = 1, 16, 4, 3, 6;
            plain_sm90_t64 = 1, 64, 2, 9, 4;
            plain_sm90_t128 = 1, 128, 2, 7, 3;
        }
    };
}

macro_rules! table {
    ($(
        $entry:ident = $matrices:literal, $tile_tokens:literal, $consumers:literal, $stages:literal, $buffers:literal;
    )*) => {
        /// Every entry that multiplies; of an operation, the smallest tile first.
        pub const INSTANCES: &[Instance] = &[$(Instance {
            entry: stringify!($entry),
            matrices: $matrices,
            tile_tokens: $tile_tokens,
            consumers: $consumers,
            stages: $stages,
            buffers: $buffers,
        }),*];
    };
}
sm90_instances!(table);

/// An entry that multiplies, and what it takes of the hardware.
///
/// Shared memory of a block: stages, then buffers of decoded tokens, then barriers. A stage: the slabs of each panel.
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
    /// Stages of the pipeline that brings weights from global to shared memory.
    pub stages: u32,
    /// Buffers of decoded tokens.
    pub buffers: u32,
}

impl Instance {
    /// Bytes of 128 rows' scales in a stage.
    pub const SCALE_BYTES: u32 = STEP_SCALE_TILES * SCALE_TILE_BYTES;

    /// The entry of an operation with tiles of so many tokens.
    ///
    /// # Panics
    /// If there is none.
    pub const fn of(matrices: u32, tile_tokens: u32) -> Self {
        let mut index = 0;
        while INSTANCES[index].matrices != matrices || INSTANCES[index].tile_tokens != tile_tokens {
            index += 1;
        }
        INSTANCES[index]
    }

    /// Whether blocks decode tokens themselves: so few that a grid before would take longer.
    pub const fn decodes_tokens(self) -> bool {
        self.tile_tokens <= 2 * EIGHT
    }

    /// Columns of C of a tile.
    pub const fn columns(self) -> u32 {
        PANELS / self.matrices * self.panel_rows()
    }

    /// Threads of a block, in one dimension: a warpgroup that loads, and those that multiply.
    pub const fn threads(self) -> u32 {
        (1 + self.consumers) * WARPGROUP
    }

    /// Rows of a panel.
    pub const fn panel_rows(self) -> u32 {
        self.consumers * WARPGROUP_ROWS
    }

    /// Slabs of a panel.
    pub const fn panel_slabs(self) -> u32 {
        self.panel_rows() / SLAB_ROWS
    }

    /// Bytes of a panel in a stage.
    pub const fn panel_bytes(self) -> u32 {
        self.panel_slabs() * SLAB_BYTES
    }

    /// Columns of the products that a tile of so many tokens takes, the tensor core's N: from half of the largest tile's on.
    pub const fn width(self, tokens: u32) -> u32 {
        let (least, width) = (self.tile_tokens / 2, tokens.next_multiple_of(EIGHT));
        if width < least { least } else { width }
    }

    /// Bytes of a stage.
    pub const fn stage_bytes(self) -> u32 {
        PANELS * self.panel_bytes()
    }

    /// Bytes of a stage's tokens decoded to f16.
    pub const fn buffer_bytes(self) -> u32 {
        self.tile_tokens / EIGHT * EIGHT_BYTES
    }

    /// Barriers of the turns that two warpgroups take to multiply.
    pub const TURN_BARRIERS: u32 = 2;

    /// Barriers: full and empty, of stages and of buffers; those of turns.
    pub const fn barriers(self) -> u32 {
        2 * (self.stages + self.buffers) + Self::TURN_BARRIERS
    }

    /// Dynamic shared memory of a block, in bytes.
    pub const fn shared_bytes(self) -> u32 {
        self.stages * self.stage_bytes() + self.buffers * self.buffer_bytes() + self.barriers() * BARRIER_BYTES
    }

    /// Stops the compiler where an entry asks for more than there is.
    pub const fn check(self) {
        assert!(self.matrices == 1 || self.matrices == 2);
        assert!((self.tile_tokens / 2).is_multiple_of(EIGHT));
        assert!(self.panel_rows().is_multiple_of(SLAB_ROWS), "a panel is of whole slabs");
        assert!(self.stages > 1 && self.buffers > 1, "who fills must not wait for who empties");
        assert!(self.shared_bytes() <= SHARED_BYTES, "stages and buffers do not fit shared memory");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    extern crate std;
    use std::{collections::BTreeSet, vec::Vec};

    #[test]
    fn every_instance_fits_and_has_a_name_of_its_own() {
        let names: BTreeSet<_> = INSTANCES.iter().map(|instance| instance.entry).collect();
        assert_eq!(names.len(), INSTANCES.len());
        for instance in INSTANCES {
            instance.check();
            assert_eq!(*instance, Instance::of(instance.matrices, instance.tile_tokens));
        }
    }

    #[test]
    fn budgets_are_as_counted_by_hand() {
        let instance = Instance::of(2, 128);
        assert_eq!((instance.stage_bytes(), instance.buffer_bytes()), (18_432, 32_768));
        assert_eq!((instance.columns(), Instance::of(1, 128).columns()), (128, 256));
        assert_eq!((Instance::of(2, 16).columns(), Instance::of(2, 16).stage_bytes()), (256, 36_864));
    }

    #[test]
    fn widths_go_from_half_a_tile_to_a_whole_one() {
        let widths: Vec<_> = [1, 64, 65, 80, 81, 128].map(|tokens| Instance::of(2, 128).width(tokens)).into();
        assert_eq!(widths, [64, 64, 72, 80, 88, 128]);
    }

    #[test]
    #[should_panic(expected = "shared memory")]
    fn more_stages_than_shared_memory_holds_are_refused() {
        Instance { stages: 8, ..Instance::of(2, 128) }.check();
    }
}
