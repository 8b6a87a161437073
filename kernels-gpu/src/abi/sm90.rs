//! What host and `gated_sm90` agree on: descriptors, tiles, budgets, and the list of its entries.
//!
//! Weights lie on the tensor core's M, two panels of rows a tile; tokens on its N, which a tile chooses for itself.

#[cfg(not(target_arch = "nvptx64"))]
use bytemuck::{Pod, Zeroable};

use super::{BLOCK, SCALE_TILE_COLUMNS, SCALE_TILE_ROWS};

/// Threads of a warpgroup.
pub const WARPGROUP: u32 = 128;

/// Rows of a panel that a warpgroup multiplies: the tensor core's M.
pub const WARPGROUP_ROWS: u32 = 64;

/// Elements of K of a stage.
pub const STEP: u32 = 128;

/// Bytes of a row of values in a stage: what the 64-byte swizzle spans, and the inner size of a tensor map's box.
pub const STEP_BYTES: u32 = STEP / 2;

/// Lanes of a fragment of the tensor core that share a row.
pub const ROW_LANES: u32 = 4;

/// Bytes of a row in a stage that are a lane's: what a swizzle keeps together.
pub const LANE_BYTES: u32 = STEP_BYTES / ROW_LANES;

/// Elements of K of a tile of the scale layout.
pub const SCALE_TILE_K: u32 = BLOCK * SCALE_TILE_COLUMNS;

/// Tiles of the scale layout along a stage's K.
pub const STEP_SCALE_TILES: u32 = STEP / SCALE_TILE_K;

/// K is a multiple of this: rows of a tensor map are multiples of 16 bytes.
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

/// One group of a grouped problem, as an array of them lies in global memory.
///
/// Computes what [`super::Group`] says. Weights lie in slabs ([`SLAB_ROWS`]). A's values are behind a tensor map of u8 of 2
/// dimensions, `[m, k/2]` with the 64-byte swizzle, zeros outside, and a box of [`STEP_BYTES`] × the tokens of a tile; its
/// scales as there.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(not(target_arch = "nvptx64"), derive(Pod, Zeroable))]
pub struct Group {
    /// Address of the map of A's values; its box has as many rows as a tile may have tokens.
    pub a_map: u64,
    /// Address of A's scales, a multiple of 16.
    pub a_scales: u64,
    /// Addresses of the slabs of gate and up, multiples of 16.
    pub b: [u64; 2],
    /// Address of C [m, n], row-major, two bytes an element, a multiple of 16.
    pub c: u64,
    /// Products of the global scales: A's and gate's, A's and up's.
    pub alpha: [f32; 2],
    /// Rows of each B, columns of C; a multiple of 8.
    pub n: u32,
    /// Elements summed over; a multiple of [`K_ALIGNMENT`], not 0.
    pub k: u32,
}

/// One tile of C, as the list of them lies in global memory.
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(target_arch = "nvptx64"), derive(Pod, Zeroable))]
pub struct Tile {
    /// Index of its group.
    pub group: u32,
    /// First column of C; a multiple of [`Instance::columns`].
    pub first_column: u32,
    /// First token.
    pub first_token: u32,
    /// Tokens, from 1 to the entry's [`Instance::tile_tokens`].
    pub tokens: u32,
}

/// The one parameter of a kernel.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(not(target_arch = "nvptx64"), derive(Pod, Zeroable))]
pub struct Launch {
    /// Address of the array of [`Group`].
    pub groups: u64,
    /// Address of the array of [`Tile`].
    pub tiles: u64,
    /// Address of an array of u32, one more than blocks: block b computes tiles `starts[b]` to `starts[b + 1]`, not counting
    /// the last.
    pub starts: u64,
    /// [`super::OUTPUT_F16`] or [`super::OUTPUT_BF16`].
    pub output: u32,
    /// Keeps the size a multiple of the alignment.
    pub unused: u32,
}

/// Calls `$each!` with every entry of the kernel: its name, the matrices of weights (2 for gated, 1 for plain), the most
/// tokens of a tile, the step of its widths, the warpgroups that load and decode tokens, those that multiply, the stages that
/// are loaded, the buffers of decoded tokens.
///
/// Few tokens leave decoding weights as the work, and registers for four warpgroups to do it. Many tokens take the registers
/// of two, and seven warps to decode them. Buffers let the decoding of tokens run ahead of the products by as much as its
/// latency. Stages hide the latency of global memory: some 64 KB of weights on their way are enough. Where memory is what
/// binds, more are worse: multiprocessors that are served first run ahead, and the last ones end alone.
#[macro_export]
macro_rules! sm90_instances {
    ($each:ident) => {
        $each! {
            gated_sm90_t16 = 2, 16, 8, 1, 4, 3, 4;
            gated_sm90_t64 = 2, 64, 16, 2, 2, 7, 3;
            gated_sm90_t128 = 2, 128, 16, 2, 2, 4, 3;
            plain_sm90_t16 = 1, 16, 8, 1, 4, 3, 4;
            plain_sm90_t64 = 1, 64, 16, 2, 2, 7, 3;
            plain_sm90_t128 = 1, 128, 16, 2, 2, 4, 3;
        }
    };
}

macro_rules! table {
    ($(
        $entry:ident = $matrices:literal, $tile_tokens:literal, $width_step:literal, $producers:literal,
        $consumers:literal, $stages:literal, $buffers:literal;
    )*) => {
        /// Every entry of the kernel; of an operation, the smallest tile first.
        pub const INSTANCES: &[Instance] = &[$(Instance {
            entry: stringify!($entry),
            matrices: $matrices,
            tile_tokens: $tile_tokens,
            width_step: $width_step,
            producers: $producers,
            consumers: $consumers,
            stages: $stages,
            buffers: $buffers,
        }),*];
    };
}
sm90_instances!(table);

/// An entry of the kernel, and what it takes of the hardware.
///
/// Shared memory of a block: stages, then buffers of decoded tokens, then barriers. A stage: the slabs of each panel, a tile of
/// tokens, the scales of the tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instance {
    /// The entry's name.
    pub entry: &'static str,
    /// Matrices of weights: 2 for gated, 1 for plain.
    pub matrices: u32,
    /// The most tokens of a tile.
    pub tile_tokens: u32,
    /// The step of [`Instance::width`].
    pub width_step: u32,
    /// Warpgroups that load and decode tokens.
    pub producers: u32,
    /// Warpgroups that multiply.
    pub consumers: u32,
    /// Stages of the pipeline from global to shared memory.
    pub stages: u32,
    /// Buffers of decoded tokens.
    pub buffers: u32,
}

impl Instance {
    /// Bytes of 128 rows' scales in a stage.
    pub const SCALE_BYTES: u32 = STEP_SCALE_TILES * SCALE_TILE_BYTES;

    /// Rows of scale tiles that a tile's tokens meet at most: it may start in the middle of one.
    pub const TOKEN_SCALE_TILES: u32 = 2;

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

    /// Columns of C of a tile.
    pub const fn columns(self) -> u32 {
        PANELS / self.matrices * self.panel_rows()
    }

    /// Threads of a block, in one dimension.
    pub const fn threads(self) -> u32 {
        (self.producers + self.consumers) * WARPGROUP
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
        let (least, width) = (self.tile_tokens / 2, tokens.next_multiple_of(self.width_step));
        if width < least { least } else { width }
    }

    /// Bytes of a tile of packed tokens in a stage.
    pub const fn token_bytes(self) -> u32 {
        self.tile_tokens * STEP_BYTES
    }

    /// Bytes of a stage.
    pub const fn stage_bytes(self) -> u32 {
        PANELS * self.panel_bytes() + self.token_bytes() + Self::TOKEN_SCALE_TILES * Self::SCALE_BYTES
    }

    /// Bytes of a stage's tokens decoded to f16.
    pub const fn buffer_bytes(self) -> u32 {
        self.tile_tokens * STEP * 2
    }

    /// Barriers: full and empty, of stages and of buffers.
    pub const fn barriers(self) -> u32 {
        2 * (self.stages + self.buffers)
    }

    /// Dynamic shared memory of a block, in bytes.
    pub const fn shared_bytes(self) -> u32 {
        self.stages * self.stage_bytes() + self.buffers * self.buffer_bytes() + self.barriers() * BARRIER_BYTES
    }

    /// Stops the compiler where an entry asks for more than there is.
    pub const fn check(self) {
        assert!(self.matrices == 1 || self.matrices == 2);
        assert!(self.width_step.is_multiple_of(8) && (self.tile_tokens / 2).is_multiple_of(self.width_step));
        assert!(self.panel_rows().is_multiple_of(SLAB_ROWS), "a panel is of whole slabs");
        assert!(self.tile_tokens <= SCALE_TILE_ROWS, "tokens of a tile meet two rows of scale tiles");
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
        assert_eq!((instance.stage_bytes(), instance.buffer_bytes()), (28_672, 32_768));
        assert_eq!((instance.columns(), Instance::of(1, 128).columns()), (128, 256));
        assert_eq!((Instance::of(2, 16).columns(), Instance::of(2, 16).stage_bytes()), (256, 39_936));
    }

    #[test]
    fn widths_go_from_half_a_tile_to_a_whole_one() {
        let widths: Vec<_> = [1, 64, 65, 80, 81, 128].map(|tokens| Instance::of(2, 128).width(tokens)).into();
        assert_eq!(widths, [64, 64, 80, 80, 96, 128]);
    }

    #[test]
    #[should_panic(expected = "shared memory")]
    fn more_stages_than_shared_memory_holds_are_refused() {
        Instance { stages: 5, ..Instance::of(2, 128) }.check();
    }
}
