//! Definitions that host and `gated_simt` share: descriptors, the list of instances, tiles, and the layout of shared
//! memory.

use bytemuck::{Pod, Zeroable};

use crate::{
    format::{BLOCK, SCALE_TILE_COLUMNS},
    instances::table,
};

/// Dynamic shared memory that a CTA can have on every GPU without opting in, in bytes.
const SHARED_BYTES: u32 = 48 << 10;

/// A group of a grouped problem. An array of groups lies in global memory.
///
/// `C = silu(alpha[0]·A·B[0]ᵀ) ∘ (alpha[1]·A·B[1]ᵀ)`, gate first. A plain kernel computes `alpha[0]·A·B[0]ᵀ` and reads
/// index 1 of no field. Rows of values are K/2 bytes apart. Scales lie in the blocked layout, padded to whole tiles
/// ([`crate::format`]).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Group {
    /// Address of A's values [m, k/2], a multiple of 8.
    pub a: u64,
    /// Address of A's scales, a multiple of 4.
    pub a_scales: u64,
    /// Addresses of the values of gate and up [n, k/2], multiples of 8.
    pub b: [u64; 2],
    /// Addresses of the scales of gate and up, multiples of 4.
    pub b_scales: [u64; 2],
    /// Address of C [m, n], row-major, two bytes per element; a multiple of 8.
    pub c: u64,
    /// Products of the global scales: A's and gate's, A's and up's.
    pub alpha: [f32; 2],
    /// Rows of A and C: tokens; may be 0.
    pub m: u32,
    /// Rows of each B, columns of C; a multiple of 8.
    pub n: u32,
    /// Number of elements that are summed; a multiple of [`BLOCK`], not 0.
    pub k: u32,
    /// Number of tiles of all groups before this one: the tiles `first_tile..` are this group's.
    pub first_tile: u32,
}

/// The kernel's parameter.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct Launch {
    /// Address of the array of [`Group`].
    pub groups: u64,
    /// Number of groups, not 0.
    pub group_count: u32,
    /// Output format: [`OUTPUT_F16`](crate::format::OUTPUT_F16) or [`OUTPUT_BF16`](crate::format::OUTPUT_BF16).
    pub output: u32,
}

/// Passes the list of instances to `$each!`.
macro_rules! instances {
    ($each:ident) => {
        $each! {
            gated_simt = gated(Tile::LARGE);
            gated_simt_small = gated(Tile::SMALL);
            plain_simt = plain(Tile::LARGE);
            plain_simt_small = plain(Tile::SMALL);
        }
    };
}
#[cfg(feature = "gated_simt")]
pub(super) use instances;
instances!(table);

/// An instance of the kernel, and the resources that it takes.
///
/// An instance that does not fit does not compile:
///
/// ```
/// # use kernels_gpu::simt::gated_simt::abi::{Instance, Tile, gated};
/// const _: Instance = gated(Tile { tokens: 64, columns: 64, tokens_per_thread: 4, columns_per_thread: 4 });
/// ```
/// ```compile_fail,E0080
/// # use kernels_gpu::simt::gated_simt::abi::{Instance, Tile, gated};
/// const _: Instance = gated(Tile { tokens: 64, columns: 64, tokens_per_thread: 4, columns_per_thread: 8 });
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instance {
    /// Name of the entry.
    pub entry: &'static str,
    /// Number of matrices of weights: 2 for gated, 1 for plain.
    pub matrices: u32,
    /// The tile that a CTA computes.
    pub tile: Tile,
}

/// The gated kernel with this tile.
///
/// # Panics
/// If the tile does not have [`Instance::THREADS`] threads, or does not fit in shared memory.
pub const fn gated(tile: Tile) -> Instance {
    Instance { entry: "", matrices: 2, tile }.checked()
}

/// The plain kernel with this tile.
pub const fn plain(tile: Tile) -> Instance {
    Instance { entry: "", matrices: 1, tile }.checked()
}

impl Instance {
    /// Threads per CTA, in one dimension.
    pub const THREADS: u32 = 256;

    /// Number of buffers in shared memory: one is filled while the other is read.
    const STAGES: u32 = 2;

    /// Bytes of shared memory per stage: a [`Panel`] of A, then one of each B.
    pub const fn stage_bytes(self) -> u32 {
        self.tile.a_panel().bytes() + self.matrices * self.tile.b_panel().bytes()
    }

    /// Dynamic shared memory per CTA, in bytes.
    pub const fn shared_bytes(self) -> u32 {
        Self::STAGES * self.stage_bytes()
    }

    /// Returns the instance unchanged. Fails compilation if the instance takes more resources than there are.
    const fn checked(self) -> Self {
        let Tile { tokens, columns, tokens_per_thread, columns_per_thread } = self.tile;
        let threads = (tokens / tokens_per_thread) * (columns / columns_per_thread);
        assert!(threads == Self::THREADS, "the tile must have 256 threads");
        assert!(self.shared_bytes() <= SHARED_BYTES, "two stages do not fit in shared memory");
        self
    }
}

/// The part of C that a CTA computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tile {
    /// Rows of C.
    pub tokens: u32,
    /// Columns of C.
    pub columns: u32,
    /// Neighboring rows of C per thread.
    pub tokens_per_thread: u32,
    /// Neighboring columns of C per thread.
    pub columns_per_thread: u32,
}

impl Tile {
    /// Tile for many tokens per group.
    pub const LARGE: Self = Self { tokens: 64, columns: 64, tokens_per_thread: 4, columns_per_thread: 4 };

    /// Tile for few tokens per group, where most of the time goes into reading the weights once.
    pub const SMALL: Self = Self { tokens: 8, columns: 128, tokens_per_thread: 4, columns_per_thread: 1 };

    /// Number of tiles of a group: the next group's [`Group::first_tile`] is larger by this number. The grid has the
    /// sum over all groups, which must stay below 2³¹.
    pub const fn count(self, m: u32, n: u32) -> u64 {
        m.div_ceil(self.tokens) as u64 * n.div_ceil(self.columns) as u64
    }

    /// A's part of a stage. All threads of a quarter warp read the same row, so rows need not be interleaved.
    pub const fn a_panel(self) -> Panel {
        Panel { rows: self.tokens, interleave: 1 }
    }

    /// The part of a stage for each B. Neighboring threads read rows `columns_per_thread` apart.
    pub const fn b_panel(self) -> Panel {
        Panel { rows: self.columns, interleave: self.columns_per_thread }
    }
}

/// One operand's rows in a stage of shared memory: values decoded to one byte each, then scales as f32.
///
/// A *block* is the 16 bytes of a row that share a scale. Values lie one column of blocks after the other. Inside of a
/// column, rows that are equal modulo `interleave` lie side by side, in a *plane*. Threads that read every
/// `interleave`-th row at once then access all banks of shared memory evenly. Scales lie one column after the other,
/// with the rows in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Panel {
    /// Number of the operand's rows.
    pub rows: u32,
    /// Two rows that lie side by side in a plane differ by this number. It divides `rows`.
    pub interleave: u32,
}

impl Panel {
    /// Bytes after which the banks of shared memory repeat.
    const BANKS: u32 = 128;

    /// Bytes between columns of blocks. A quarter warp stores 2 rows × 4 columns. The 32 bytes beyond a multiple of all
    /// banks, like the extra block of a plane ([`Self::plane_rows`]), keep these stores on different banks.
    pub const fn column_stride(self) -> u32 {
        ((self.rows + self.interleave) * BLOCK).next_multiple_of(Self::BANKS) + 2 * BLOCK
    }

    /// Offset of the block at this row and column of blocks, in bytes from the panel's start.
    pub const fn block_offset(self, row: u32, column: u32) -> u32 {
        let (lane, plane) = (row / self.interleave, row % self.interleave);
        column * self.column_stride() + (plane * self.plane_rows() + lane) * BLOCK
    }

    /// Number of places per plane. A plane has the rows with one remainder modulo `interleave`, and one unused place.
    pub const fn plane_rows(self) -> u32 {
        self.rows / self.interleave + 1
    }

    /// Offset of the scale at this row and column, in bytes from the panel's start.
    pub const fn scale_offset(self, row: u32, column: u32) -> u32 {
        SCALE_TILE_COLUMNS * self.column_stride() + (column * self.rows + row) * size_of::<f32>() as u32
    }

    /// Size in bytes.
    pub const fn bytes(self) -> u32 {
        self.scale_offset(0, SCALE_TILE_COLUMNS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    extern crate std;
    use std::{collections::BTreeSet, vec::Vec};

    const TILES: [Tile; 2] = [Tile::LARGE, Tile::SMALL];

    #[test]
    fn instances_fit_in_default_shared_memory() {
        for instance in INSTANCES {
            assert!(instance.shared_bytes() <= 48 << 10, "{}: {}", instance.entry, instance.shared_bytes());
        }
    }

    #[test]
    #[should_panic(expected = "the tile must have 256 threads")]
    fn tiles_with_uncovered_elements_are_refused() {
        gated(Tile { tokens: 128, ..Tile::LARGE });
    }

    #[test]
    #[should_panic(expected = "shared memory")]
    fn tiles_beyond_shared_memory_are_refused() {
        gated(Tile { tokens: 8, columns: 1024, tokens_per_thread: 8, columns_per_thread: 4 });
    }

    #[test]
    fn blocks_and_scales_of_a_panel_do_not_overlap() {
        for panel in TILES.into_iter().flat_map(|tile| [tile.a_panel(), tile.b_panel()]) {
            let mut used = BTreeSet::new();
            for column in 0..SCALE_TILE_COLUMNS {
                for row in 0..panel.rows {
                    let block = panel.block_offset(row, column);
                    let scale = panel.scale_offset(row, column);
                    assert!((block..block + BLOCK).chain(scale..scale + 4).all(|byte| used.insert(byte)));
                }
            }
            assert!(*used.last().unwrap() < panel.bytes());
        }
    }

    /// An access of 16 bytes per thread serves a quarter warp at a time: its 8 blocks must be on all 8 groups of 4
    /// banks.
    #[test]
    fn quarter_warp_accesses_have_no_bank_conflicts() {
        let distinct =
            |offsets: Vec<u32>| offsets.iter().map(|offset| offset % 128 / 16).collect::<BTreeSet<_>>().len();
        for tile in TILES {
            for panel in [tile.a_panel(), tile.b_panel()] {
                let store = |unit| panel.block_offset(unit / SCALE_TILE_COLUMNS, unit % SCALE_TILE_COLUMNS);
                for first in (0..panel.rows * SCALE_TILE_COLUMNS).step_by(8) {
                    assert_eq!(distinct((first..first + 8).map(store).collect()), 8, "store {panel:?} {first}");
                }
            }
            let panel = tile.b_panel();
            for first in (0..panel.rows / panel.interleave).step_by(8) {
                let load = |thread| panel.block_offset(thread * panel.interleave, 0);
                assert_eq!(distinct((first..first + 8).map(load).collect()), 8, "load {panel:?} {first}");
            }
        }
    }

    #[test]
    fn tiles_cover_all_rows_and_empty_groups_have_none() {
        assert_eq!(Tile::LARGE.count(0, 4096), 0);
        assert_eq!(Tile::LARGE.count(1, 8), 1);
        assert_eq!(Tile::LARGE.count(65, 72), 4);
        assert_eq!(Tile::SMALL.count(u32::MAX, u32::MAX), (1 << 29) * (1 << 25));
    }
}
