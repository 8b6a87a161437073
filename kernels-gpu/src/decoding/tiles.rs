//! Tiles of C whose rows are known only on the device: each tile is found by its index, in lists that an earlier grid
//! made. A CTA's first warp finds the CTA's tiles and writes their descriptions to shared memory for the other warps.

use cuda_std::{
    global::{GlobalAddress, atom_global_add_u32, ld_global_b32, ld_relaxed_gpu_global_b32},
    shared::{SharedAddress, ld_shared_v4_b32, st_shared_v4_b32},
    thread,
    warp::{ALL_LANES, WARP_SIZE, lane_id, warp_shuffle_idx},
};

use super::TILE_BYTES;
use crate::{
    lists::{tile_size, token_tiles},
    schedule::last_begun_by_warp,
};

/// A tile, as every role of a CTA knows it.
#[derive(Clone, Copy)]
pub struct Tile {
    /// First column of C; a multiple of the instance's columns.
    pub first_column: u32,
    /// First row of C.
    pub first_row: u32,
    /// Number of rows; 0 after the CTA's last tile.
    pub tokens: u32,
    /// Index of the expert.
    pub expert: u32,
    /// The expert's factors, as the bits of f32.
    pub alpha: [u32; 2],
}

impl Tile {
    /// The description after the last tile.
    pub const NONE: Self = Self { first_column: 0, first_row: 0, tokens: 0, expert: 0, alpha: [0; 2] };

    /// Offset of [`Self::tokens`] in a description, in bytes.
    pub const TOKENS: u32 = 8;

    /// Reads a tile's description.
    ///
    /// # Safety
    /// A description was written to `slot`, and the barrier that announces it has been waited for.
    #[inline(always)]
    pub unsafe fn read(slot: SharedAddress) -> Self {
        // SAFETY: `slot` holds the `TILE_BYTES` of a tile, a multiple of 16; its barrier was waited for, so nothing
        // writes them now.
        let ([first_column, first_row, tokens, expert], [gate, up, ..]) =
            unsafe { (ld_shared_v4_b32(slot), ld_shared_v4_b32(slot + TILE_BYTES / 2)) };
        Self { first_column, first_row, tokens, expert, alpha: [gate, up] }
    }

    /// Writes the tile's description for the other roles of a CTA. They read it after the barrier that announces it.
    ///
    /// # Safety
    /// `slot` has [`TILE_BYTES`] bytes at a multiple of 16, which no thread reads.
    #[inline(always)]
    pub unsafe fn write(&self, slot: SharedAddress) {
        // SAFETY: the caller guarantees `TILE_BYTES` of shared memory at `slot`, a multiple of 16, that no thread reads
        // now.
        unsafe {
            st_shared_v4_b32(slot, [self.first_column, self.first_row, self.tokens, self.expert]);
            st_shared_v4_b32(slot + TILE_BYTES / 2, [self.alpha[0], self.alpha[1], 0, 0]);
        }
    }
}

/// The lists in which a product's tiles are found ([`Lists`](crate::lists::Lists)), and the division of C into tiles.
pub struct TileLists {
    /// Number of rows of the only expert, a multiple of 8, if the host knows it: then there are no lists. Otherwise 0.
    pub rows: u32,
    /// Maximum number of tokens per tile.
    pub tile_tokens: u32,
    /// Address of the product's ticket.
    pub ticket: u64,
    /// Address of the first row of each expert.
    pub firsts: u64,
    /// Address of the first tile of tokens of each expert.
    pub tile_firsts: u64,
    /// Per matrix, the address of one factor per expert.
    pub alpha: [u64; 2],
    /// Number of experts.
    pub experts: u32,
    /// Columns of C.
    pub n: u32,
    /// Number of matrices of weights: 1 or 2.
    pub matrices: u32,
    /// Columns of C per tile.
    pub columns: u32,
}

impl TileLists {
    /// Takes the index of the CTA's tile after tile `index`. Only the first lane gets it.
    ///
    /// # Safety
    /// The contract of the kernel holds, so `ticket` is the address of a u32, unless `rows` is not 0.
    #[inline(always)]
    pub unsafe fn ask(&self, index: u32) -> u32 {
        if self.rows > 0 {
            return index + thread::grid_dim_x();
        }
        if lane_id() > 0 {
            return 0;
        }
        // SAFETY: `ticket` is the address of a u32 in global memory; only atomics access it during the launch.
        thread::grid_dim_x() + unsafe { atom_global_add_u32(GlobalAddress::new(self.ticket), 1) }
    }

    /// The tile with this index. An expert's tiles with the same columns, which share weights, are neighbors.
    ///
    /// # Safety
    /// The lists are complete. The whole warp makes this call together, with the same index.
    #[inline(always)]
    pub unsafe fn find(&self, index: u32) -> Tile {
        let columns = self.n.div_ceil(self.columns);
        let token_tile = index / columns;
        // SAFETY: the lists of rows and tiles have `experts + 1` numbers, the lists of factors `experts`, and the
        // indices are within these bounds.
        unsafe {
            let (expert, [first_tile, next_tile]) = if self.rows > 0 {
                (0, [0, token_tiles(self.rows, self.tile_tokens)])
            } else {
                self.expert_of(token_tile)
            };
            if token_tile >= next_tile {
                return Tile::NONE;
            }
            let [first, next] = if self.rows > 0 { [0, self.rows] } else { neighbors(self.firsts, expert) };
            let matrices = [0, self.matrices as usize - 1];
            let alpha = matrices.map(|matrix| ld_global_b32(number(self.alpha[matrix], expert)));
            let (rows, tiles, of_expert) = (next - first, next_tile - first_tile, index - first_tile * columns);
            let (column, tile) = (of_expert / tiles, of_expert % tiles);
            let size = tile_size(rows, tiles);
            let tokens = (rows - tile * size).min(size);
            let first_column = column * self.columns;
            Tile { first_column, first_row: first + tile * size, tokens, expert, alpha }
        }
    }

    /// Returns the expert of a tile of tokens, with its first tile and the next expert's first tile.
    ///
    /// # Safety
    /// The requirements of [`Self::find`].
    #[inline(always)]
    unsafe fn expert_of(&self, token_tile: u32) -> (u32, [u32; 2]) {
        let &Self { tile_firsts, experts, .. } = self;
        // SAFETY: the whole warp is here. The indices are at most `experts`, and the list has `experts + 1` numbers.
        unsafe {
            let first = |index| ld_relaxed_gpu_global_b32(number(tile_firsts, index));
            let expert = last_begun_by_warp(experts, token_tile, first);
            (expert, neighbors(tile_firsts, expert))
        }
    }
}

/// Address of a number of a list.
#[inline(always)]
fn number(list: u64, index: u32) -> GlobalAddress {
    GlobalAddress::new(list) + u64::from(index) * 4
}

/// Reads a number of a list and the number after it.
///
/// # Safety
/// The list has both numbers, and is complete.
#[inline(always)]
unsafe fn neighbors(list: u64, index: u32) -> [u32; 2] {
    // SAFETY: the list has the numbers `index` and `index + 1`, and is complete.
    [index, index + 1].map(|index| unsafe { ld_relaxed_gpu_global_b32(number(list, index)) })
}

/// The first lane's value.
///
/// # Safety
/// The whole warp makes this call together.
#[inline(always)]
pub unsafe fn from_first_lane(value: u32) -> u32 {
    // SAFETY: the caller guarantees that all 32 lanes execute the shuffle together.
    unsafe { warp_shuffle_idx(ALL_LANES, value, 0, WARP_SIZE).0 }
}
