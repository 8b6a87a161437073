//! Which tiles a block computes: those of its own number and of every further one that is a grid away.

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
    /// Rows, not 0.
    pub tokens: u32,
}

/// The block's tiles that are left.
pub(super) struct Tiles {
    next: u32,
    end: u32,
    columns: u32,
    tokens_of_tile: u32,
}

impl<const INDEX: usize, const BF16: bool, const P: usize> Linear<INDEX, BF16, P> {
    /// The tiles of this block. Tiles of the same tokens are neighbors: all of the weights are read while these lie in the cache.
    #[inline(always)]
    pub(super) fn tiles(&self) -> Tiles {
        let columns = self.launch.n.div_ceil(Self::INSTANCE.columns());
        // SAFETY: C has columns, and where there is a launch, it has rows.
        unsafe { assert_unchecked(columns > 0 && self.launch.token_tiles > 0) };
        let end = columns * self.launch.token_tiles;
        let tokens_of_tile = tile_size(self.launch.m, self.launch.token_tiles);
        Tiles { next: thread::block_idx_x(), end, columns, tokens_of_tile }
    }

    /// The next tile. As tiles are as even as whole core matrices allow, the last ones may have no token, and are left out.
    #[inline(always)]
    pub(super) fn next(&self, tiles: &mut Tiles) -> Option<Tile> {
        while tiles.next < tiles.end {
            let (column, row) = (tiles.next % tiles.columns, tiles.next / tiles.columns);
            tiles.next += thread::grid_dim_x();
            let first_row = row * tiles.tokens_of_tile;
            if first_row < self.launch.m {
                let tokens = (self.launch.m - first_row).min(tiles.tokens_of_tile);
                return Some(Tile { first_column: column * Self::INSTANCE.columns(), first_row, tokens });
            }
        }
        None
    }
}
