//! The warp that finds tiles and loads their weights, by bulk copies of the units as they lie in memory.

use cuda_std::{
    global::GlobalAddress,
    mbarrier::{mbarrier_arrive, mbarrier_arrive_expect_tx},
    thread,
    warp::{ALL_LANES, lane_id, sync_warp},
};

use super::Product;
use crate::{
    moe_fp8_sm90::abi::{Instance, Launch},
    ring::Ring,
    sm90::{Piece, Tile, TileLists, from_first_lane},
    units::{K_BLOCK, UNIT_BYTES, UNIT_ROWS, block_columns, k_blocks, unit_bytes},
};

impl<const INDEX: usize, const P: usize, const R: usize> Product<INDEX, P, R> {
    /// Units that a piece has room for.
    const PIECE_UNITS: u32 = Self::INSTANCE.piece_rows() / UNIT_ROWS;

    /// Finds the block's tiles, writes them down, and loads their weights to stages. One warp.
    ///
    /// A tile is written down before the weights of the one before it are loaded: the warp that loads tokens is ahead of the
    /// warpgroups by as much as its buffers hold, and this warp must not make it wait.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs`. The barriers have been initialised. The whole warp calls it together.
    #[inline(always)]
    pub(super) unsafe fn load_weights(&self) {
        let (mut stages, mut tiles) = (self.stages(), self.tiles());
        let Launch { ticket, firsts, tile_firsts, alpha, experts, n, .. } = self.launch;
        let Instance { matrices, .. } = Self::INSTANCE;
        let columns = Self::INSTANCE.columns();
        let lists = TileLists { ticket, firsts, tile_firsts, alpha, experts, n, matrices, columns };
        // SAFETY: the lists were complete before this grid began.
        unsafe {
            let mut asked = lists.ask();
            let mut tile = lists.find(thread::block_idx_x());
            self.write_down(&mut tiles, &tile);
            while tile.tokens > 0 {
                let next = lists.find(from_first_lane(asked));
                self.write_down(&mut tiles, &next);
                asked = if next.tokens > 0 { lists.ask() } else { 0 };
                self.load_tile(&tile, &mut stages);
                tile = next;
            }
        }
    }

    /// Writes a tile down for the other roles.
    ///
    /// # Safety
    /// The barriers have been initialised. The whole first warp calls it together, with its own ring.
    #[inline(always)]
    unsafe fn write_down(&self, tiles: &mut Ring, tile: &Tile) {
        // SAFETY: the slot is empty after the wait.
        unsafe {
            tiles.wait_empty();
            if lane_id() == 0 {
                tile.write(self.slot(*tiles));
                mbarrier_arrive(tiles.full());
            }
            sync_warp(ALL_LANES);
            tiles.advance();
        }
    }

    /// Loads the weights of a tile.
    ///
    /// # Safety
    /// As [`Self::load_weights`]; the tile is one of the block's.
    #[inline(always)]
    unsafe fn load_tile(&self, tile: &Tile, stages: &mut Ring) {
        let (k, whole) = (self.launch.k, self.launch.k / K_BLOCK);
        let pieces = [self.piece(tile, 0), self.piece(tile, 1)];
        // Bytes of a unit in all k-blocks before, and in this one.
        let (mut before, mut bytes) = (0, UNIT_BYTES);
        for k_block in 0..k_blocks(k) {
            if k_block >= whole {
                bytes = unit_bytes(block_columns(k, k_block));
            }
            let (stage, full) = (self.stage(*stages), stages.full());
            // SAFETY: the expert's own units. A stage is written while it is empty, and its full barrier expects the bytes of
            // every copy.
            unsafe {
                stages.wait_empty();
                if lane_id() == 0 {
                    mbarrier_arrive_expect_tx(full, 2 * Self::PIECE_UNITS * bytes);
                    pieces[0].load(stage, before, bytes, Self::PIECE_UNITS, full);
                    pieces[1].load(stage + Self::INSTANCE.piece_bytes(), before, bytes, Self::PIECE_UNITS, full);
                }
                sync_warp(ALL_LANES);
            }
            before += bytes;
            stages.advance();
        }
    }

    /// The first or the second piece of a tile: of gate and of up, or one behind the other. If its rows lie outside of the matrix, it
    /// is others: what becomes of them is not written to C.
    #[inline(always)]
    fn piece(&self, tile: &Tile, index: u32) -> Piece {
        let (n, k) = (self.launch.n, self.launch.k);
        let (matrix, row) = if Self::INSTANCE.matrices == 2 {
            (self.launch.b[index as usize], tile.first_column)
        } else {
            (self.launch.b[0], tile.first_column + index * Self::INSTANCE.piece_rows())
        };
        let row = if row < n { row } else { tile.first_column };
        let expert = GlobalAddress::new(matrix) + u64::from(tile.expert) * self.launch.expert_bytes;
        Piece::new(expert, n, k, row / UNIT_ROWS, Self::PIECE_UNITS)
    }
}
