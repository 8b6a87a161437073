//! Tiles of a CTA: the tile with the CTA's index, and every further tile at the distance of the grid's size. The CTAs of
//! a cluster have one tile, with the cluster's index.

use core::hint::assert_unchecked;

use cuda_std::thread;

use super::Linear;
use crate::lists::tile_size;

/// A tile of C.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    /// First column of C; a multiple of the instance's columns.
    pub first_column: u32,
    /// First row of C.
    pub first_row: u32,
    /// Number of rows, not 0.
    pub tokens: u32,
}

/// Remaining tiles of the CTA.
pub(super) struct Tiles {
    next: u32,
    end: u32,
    columns: u32,
    tokens_of_tile: u32,
}

impl<const INDEX: usize, const BF16: bool, const P: usize> Linear<INDEX, BF16, P> {
    /// Returns the tiles of this CTA. Tiles of the same tokens are neighbors, so all weights are read while these
    /// tokens are in the cache.
    #[inline(always)]
    pub(super) fn tiles(&self) -> Tiles {
        let columns = self.launch.n.div_ceil(Self::INSTANCE.columns());
        // SAFETY: C has at least one column, and a launch has at least one tile of tokens.
        unsafe { assert_unchecked(columns > 0 && self.launch.token_tiles > 0) };
        let end = columns * self.launch.token_tiles;
        let tokens_of_tile = tile_size(self.launch.m, self.launch.token_tiles);
        Tiles { next: thread::block_idx_x() / Self::CLUSTER, end, columns, tokens_of_tile }
    }

    /// Returns the next tile. Tiles are as even as whole core matrices allow, so the last ones may have no tokens;
    /// these are skipped.
    #[inline(always)]
    pub(super) fn next(&self, tiles: &mut Tiles) -> Option<Tile> {
        while tiles.next < tiles.end {
            let (column, row) = (tiles.next % tiles.columns, tiles.next / tiles.columns);
            tiles.next += thread::grid_dim_x() / Self::CLUSTER;
            let first_row = row * tiles.tokens_of_tile;
            if first_row < self.launch.m {
                let tokens = (self.launch.m - first_row).min(tiles.tokens_of_tile);
                return Some(Tile { first_column: column * Self::INSTANCE.columns(), first_row, tokens });
            }
        }
        None
    }
}
