//! The warp that finds tiles and loads their weights, by bulk copies of the units as they lie in memory.

use cuda_std::{
    global::GlobalAddress,
    griddepcontrol::griddepcontrol_wait,
    mbarrier::mbarrier_arrive_expect_tx,
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
    units::{SLAB_BYTES, SLAB_ROWS, UNIT_BYTES, UNIT_ROWS, block_columns, k_blocks, row_unit_bytes, unit_bytes},
};

/// Units of a whole slab.
const SLAB_UNITS: u32 = SLAB_ROWS / UNIT_ROWS;

impl<const INDEX: usize> Moe<INDEX> {
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
                    let slabs = PANELS as u32 * Self::INSTANCE.panel_slabs();
                    mbarrier_arrive_expect_tx(full, slabs * SLAB_UNITS * unit_bytes(columns));
                    for panel in 0..PANELS as u32 {
                        for slab in 0..Self::INSTANCE.panel_slabs() {
                            let target = stage + Self::panel(panel) + slab * SLAB_BYTES;
                            let (source, units) = self.slab(tile, panel, slab, k_block);
                            Self::load_slab(target, source, units, unit_bytes(columns), full);
                        }
                    }
                }
                sync_warp(ALL_LANES);
            }
            stages.advance();
        }
    }

    /// Loads the units of a slab. If it has fewer than a whole one, others stand in for those that it lacks: what becomes of them
    /// is not written to C.
    ///
    /// # Safety
    /// As [`Self::load_tile`]: so many units lie at `source`, and the whole slab's bytes at `target` are empty.
    #[inline(always)]
    unsafe fn load_slab(
        target: SharedAddress,
        source: GlobalAddress,
        units: u32,
        unit_bytes: u32,
        full: cuda_std::mbarrier::Mbarrier,
    ) {
        let mut loaded = 0;
        while loaded < SLAB_UNITS {
            let more = units.min(SLAB_UNITS - loaded);
            // SAFETY: what `# Safety` above asks.
            unsafe {
                cp_async_bulk_shared_global(target + loaded * unit_bytes, source, more * unit_bytes, full);
            }
            loaded += more;
        }
    }

    /// Where the units of a panel's `slab`-th rows lie, of one k-block, and how many they are. If these rows lie outside of the
    /// matrix, it is others: what becomes of them is not written to C.
    #[inline(always)]
    fn slab(&self, tile: &Tile, panel: u32, slab: u32, k_block: u32) -> (GlobalAddress, u32) {
        let (n, k) = (self.launch.n, self.launch.k);
        let (matrix, first_row) = match (Self::INSTANCE.matrices, panel) {
            (2, 0) => (self.launch.b[0], tile.first_column),
            (2, _) => (self.launch.b[1], tile.first_column),
            _ => (self.launch.b[0], tile.first_column + panel * Self::INSTANCE.shape().panel_rows()),
        };
        let row = first_row + slab * SLAB_ROWS;
        let row = if row < n { row } else { tile.first_column };
        let units = ((n - row) / UNIT_ROWS).min(SLAB_UNITS);
        // As `units::unit_offset`, of a slab's first unit.
        let whole = k / crate::units::K_BLOCK;
        let between = if k_block > whole { unit_bytes(block_columns(k, whole)) } else { 0 };
        let in_slab = u64::from(units) * u64::from(k_block.min(whole) * UNIT_BYTES + between);
        let expert = GlobalAddress::new(matrix) + u64::from(tile.expert) * self.launch.expert_bytes;
        (expert + u64::from(row / UNIT_ROWS) * row_unit_bytes(k) + in_slab, units)
    }
}
