//! The tiles of a block, which its first warp writes down in shared memory for the others.

use cuda_std::{
    mbarrier::mbarrier_arrive,
    shared::SharedAddress,
    warp::{ALL_LANES, lane_id, sync_warp},
};

use super::{Built, Moe};
use crate::{
    moe_sm90::abi::{Instance, Launch},
    ring::Ring,
    sm90::{TILE_BYTES, Tile, TileLists},
};

impl<I: Built, const BF16: bool, const P: usize> Moe<I, BF16, P> {
    /// By which tiles are found.
    #[inline(always)]
    pub(super) fn lists(&self) -> TileLists {
        let Launch { ticket, firsts, tile_firsts, alpha, experts, n, .. } = self.launch;
        let Instance { matrices, .. } = Self::INSTANCE;
        TileLists { ticket, firsts, tile_firsts, alpha, experts, n, matrices, columns: Self::INSTANCE.columns() }
    }

    /// Where the tile that a ring stands at is written down.
    #[inline(always)]
    pub(super) fn slot(&self, tiles: Ring) -> SharedAddress {
        self.shared + Self::TILES + tiles.index() * TILE_BYTES
    }

    /// Writes a tile down for the other roles.
    ///
    /// # Safety
    /// The barriers have been initialised. The whole first warp calls it together, with its own ring.
    #[inline(always)]
    pub(super) unsafe fn write_down(&self, tiles: &mut Ring, tile: &Tile) {
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
}
