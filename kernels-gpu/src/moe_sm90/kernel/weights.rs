//! The warp that finds tiles and loads their weights, by bulk copies of the units as they lie in memory.

use cuda_std::{
    global::GlobalAddress,
    griddepcontrol::griddepcontrol_wait,
    mbarrier::mbarrier_arrive_expect_tx,
    thread,
    warp::{ALL_LANES, lane_id, sync_warp},
};

use super::{Built, Moe};
use crate::{
    ring::Ring,
    sm90::{PANELS, Piece, Tile, from_first_lane},
    units::{K_BLOCK, UNIT_BYTES, UNIT_ROWS, block_columns, k_blocks, unit_bytes},
};

/// The most pieces of a stage.
const MAX_PIECES: usize = 4;

impl<I: Built, const BF16: bool, const P: usize> Moe<I, BF16, P> {
    /// Units that a piece has room for.
    const PIECE_UNITS: u32 = Self::INSTANCE.piece_rows() / UNIT_ROWS;

    /// Pieces of a stage.
    const PIECES: u32 = PANELS as u32 * Self::INSTANCE.shape().panel_rows() / Self::INSTANCE.piece_rows();

    /// Finds the block's tiles, writes them down, and loads their weights to stages. One warp.
    ///
    /// A tile is written down before the weights of the one before it are loaded: the warps that gather tokens are ahead of the
    /// warpgroups by as much as their buffers hold, and this warp must not make them wait.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs`. The barriers have been initialised. The whole warp calls it together.
    #[inline(always)]
    pub(super) unsafe fn load_weights(&self) {
        let (mut stages, mut tiles) = (self.stages(), self.tiles());
        // SAFETY: lists are read when they are complete.
        unsafe {
            if self.launch.lists_pending != 0 {
                griddepcontrol_wait();
            }
            let lists = self.lists();
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

    /// Loads the weights of a tile.
    ///
    /// # Safety
    /// As [`Self::load_weights`]; the tile is one of the block's.
    #[inline(always)]
    unsafe fn load_tile(&self, tile: &Tile, stages: &mut Ring) {
        let (k, whole) = (self.launch.k, self.launch.k / K_BLOCK);
        let pieces: [Piece; MAX_PIECES] = core::array::from_fn(|index| self.piece(tile, index as u32));
        // Bytes of a unit in all k-blocks before, and in this one.
        let (mut before, mut bytes) = (0, UNIT_BYTES);
        for k_block in 0..k_blocks(k) {
            if k_block >= whole {
                bytes = unit_bytes(block_columns(k, k_block));
            }
            let (stage, full) = (Self::stage(self.shared, *stages), stages.full());
            // SAFETY: the expert's own units. A stage is written while it is empty, and its full barrier expects the bytes of
            // every copy.
            unsafe {
                stages.wait_empty();
                if lane_id() == 0 {
                    mbarrier_arrive_expect_tx(full, Self::PIECES * Self::PIECE_UNITS * bytes);
                    for index in 0..Self::PIECES {
                        let target = stage + index * Self::PIECE_UNITS * UNIT_BYTES;
                        pieces[index as usize].load(target, before, bytes, Self::PIECE_UNITS, full);
                    }
                }
                sync_warp(ALL_LANES);
            }
            before += bytes;
            stages.advance();
        }
    }

    /// A piece of a tile's panels, counted through both. If its rows lie outside of the matrix, it is others: what becomes of them
    /// is not written to C.
    #[inline(always)]
    fn piece(&self, tile: &Tile, index: u32) -> Piece {
        let (n, k) = (self.launch.n, self.launch.k);
        let (panel, row) = (index * 2 / Self::PIECES, index * Self::INSTANCE.piece_rows());
        let (matrix, row) = match (Self::INSTANCE.matrices, panel) {
            (2, 0) => (self.launch.b[0], row),
            (2, _) => (self.launch.b[1], row - Self::INSTANCE.shape().panel_rows()),
            _ => (self.launch.b[0], row),
        };
        let row = if tile.first_column + row < n { tile.first_column + row } else { tile.first_column };
        let expert = GlobalAddress::new(matrix) + u64::from(tile.expert) * self.launch.expert_bytes;
        Piece::new(expert, n, k, row / UNIT_ROWS, Self::PIECE_UNITS)
    }
}
