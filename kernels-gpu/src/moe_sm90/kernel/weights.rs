//! The warp that finds tiles and loads their weights, by bulk copies of the units as they lie in memory.

use cuda_std::{
    global::GlobalAddress,
    griddepcontrol::griddepcontrol_wait,
    mbarrier::{Mbarrier, mbarrier_arrive_expect_tx},
    shared::SharedAddress,
    thread,
    tma::cp_async_bulk_shared_global,
    warp::{ALL_LANES, lane_id, sync_warp},
};

use super::{
    Moe,
    tiles::{Tile, from_first_lane},
};
use crate::{
    ring::Ring,
    sm90::PANELS,
    units::{UNIT_BYTES, UNIT_ROWS, block_columns, k_blocks, unit_bytes, unit_offset},
};

impl<const INDEX: usize, const BF16: bool, const P: usize> Moe<INDEX, BF16, P> {
    /// Units of a piece.
    const PIECE_UNITS: u32 = Self::INSTANCE.piece_rows() / UNIT_ROWS;

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
            let mut asked = self.ask();
            let mut tile = self.find(thread::block_idx_x());
            self.write_down(&mut tiles, &tile);
            while tile.tokens > 0 {
                let next = self.find(from_first_lane(asked));
                self.write_down(&mut tiles, &next);
                asked = if next.tokens > 0 { self.ask() } else { 0 };
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
        let k = self.launch.k;
        for k_block in 0..k_blocks(k) {
            let (stage, full, columns) = (Self::stage(self.shared, *stages), stages.full(), block_columns(k, k_block));
            // SAFETY: the expert's own units. A stage is written while it is empty, and its full barrier expects the bytes of
            // every copy.
            unsafe {
                stages.wait_empty();
                if lane_id() == 0 {
                    let pieces = Self::INSTANCE.shape().panel_rows() / Self::INSTANCE.piece_rows();
                    let bytes = unit_bytes(columns);
                    mbarrier_arrive_expect_tx(full, PANELS as u32 * pieces * Self::PIECE_UNITS * bytes);
                    for panel in 0..PANELS as u32 {
                        for piece in 0..pieces {
                            let target = stage + Self::panel(panel) + piece * Self::PIECE_UNITS * UNIT_BYTES;
                            let (source, units) = self.piece(tile, panel, piece, k_block);
                            Self::load_piece(target, source, units, bytes, full);
                        }
                    }
                }
                sync_warp(ALL_LANES);
            }
            stages.advance();
        }
    }

    /// Loads the units of a piece. If there are fewer than it has, the same again stand in for those that lack: what becomes of
    /// them is not written to C.
    ///
    /// # Safety
    /// As [`Self::load_tile`]: so many units lie at `source`, and the whole piece's bytes at `target` are empty.
    #[inline(always)]
    unsafe fn load_piece(target: SharedAddress, source: GlobalAddress, units: u32, unit_bytes: u32, full: Mbarrier) {
        let mut loaded = 0;
        while loaded < Self::PIECE_UNITS {
            let more = units.min(Self::PIECE_UNITS - loaded);
            // SAFETY: what `# Safety` above asks.
            unsafe {
                cp_async_bulk_shared_global(target + loaded * unit_bytes, source, more * unit_bytes, full);
            }
            loaded += more;
        }
    }

    /// Where the units of a panel's `piece`-th rows lie, of one k-block, and how many of them the matrix has. If these rows lie
    /// outside of the matrix, it is others: what becomes of them is not written to C.
    #[inline(always)]
    fn piece(&self, tile: &Tile, panel: u32, piece: u32, k_block: u32) -> (GlobalAddress, u32) {
        let (n, k) = (self.launch.n, self.launch.k);
        let (matrix, first_row) = match (Self::INSTANCE.matrices, panel) {
            (2, 0) => (self.launch.b[0], tile.first_column),
            (2, _) => (self.launch.b[1], tile.first_column),
            _ => (self.launch.b[0], tile.first_column + panel * Self::INSTANCE.shape().panel_rows()),
        };
        let row = first_row + piece * Self::INSTANCE.piece_rows();
        let row = if row < n { row } else { tile.first_column };
        let unit = row / UNIT_ROWS;
        let expert = GlobalAddress::new(matrix) + u64::from(tile.expert) * self.launch.expert_bytes;
        (expert + unit_offset(n, k, unit, k_block), (n / UNIT_ROWS - unit).min(Self::PIECE_UNITS))
    }
}
