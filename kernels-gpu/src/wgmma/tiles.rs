//! Tiles that a block's first warp finds and writes down in shared memory for the others.

use cuda_std::{
    mbarrier::{Mbarrier, mbarrier_arrive},
    shared::{SharedAddress, ld_shared_b32},
    thread,
    warp::{ALL_LANES, lane_id, sync_warp},
};

use crate::{
    decoding::{TILE_BYTES, TILE_SLOTS, Tile, TileLists, from_first_lane},
    ring::Ring,
};

/// A block's tiles as one of its warps goes through them: a ring of [`TILE_SLOTS`] slots. A slot is full when the warp that finds tiles
/// has arrived, and empty when all others have.
#[derive(Clone, Copy)]
pub struct Tiles {
    ring: Ring,
    slots: SharedAddress,
}

impl Tiles {
    /// The ring whose barriers and slots lie at these addresses, multiples of 8 and of 16. It stands at the block's first tile.
    #[inline(always)]
    pub const fn new(barriers: SharedAddress, slots: SharedAddress) -> Self {
        Self { ring: Ring::new(barriers, TILE_SLOTS), slots }
    }

    /// Initializes the barriers, for so many warps that read tiles.
    ///
    /// # Safety
    /// As [`Ring::init`].
    #[inline(always)]
    pub unsafe fn init(self, readers: u32) {
        // SAFETY: the caller guarantees what `Ring::init` requires: the barriers' shared memory is unused, and other
        // threads wait for a barrier of the CTA.
        unsafe { self.ring.init(1, readers) };
    }

    /// Where the tile that the ring stands at is written down.
    #[inline(always)]
    fn slot(self) -> SharedAddress {
        self.slots + self.ring.index() * TILE_BYTES
    }

    /// Finds the block's tiles, writes them down, and calls `load` with each. One warp.
    ///
    /// A tile is written down before the one before it is loaded: warps that load tokens are ahead of those that multiply by as much as
    /// their buffers hold, and this warp must not make them wait.
    ///
    /// # Safety
    /// The barriers have been initialized, and the lists are complete. The whole warp calls it together, and no other warp of the block
    /// does.
    #[inline(always)]
    pub unsafe fn find(mut self, lists: &TileLists, mut load: impl FnMut(&Tile)) {
        // SAFETY: the barriers are initialized, the lists are complete, and only this whole warp calls this.
        unsafe {
            let mut index = thread::block_idx_x();
            let mut asked = lists.ask(index);
            let mut tile = lists.find(index);
            self.write_down(&tile);
            while tile.tokens > 0 {
                index = from_first_lane(asked);
                let next = lists.find(index);
                self.write_down(&next);
                asked = if next.tokens > 0 { lists.ask(index) } else { 0 };
                load(&tile);
                tile = next;
            }
        }
    }

    /// Writes a tile down for the other warps.
    ///
    /// # Safety
    /// As [`Self::find`].
    #[inline(always)]
    unsafe fn write_down(&mut self, tile: &Tile) {
        // SAFETY: the slot is empty after the wait.
        unsafe {
            self.ring.wait_empty();
            if lane_id() == 0 {
                tile.write(self.slot());
                mbarrier_arrive(self.ring.full());
            }
            sync_warp(ALL_LANES);
            self.ring.advance();
        }
    }

    /// Waits for the next tile and gives its slot back at once.
    ///
    /// # Safety
    /// The barriers have been initialized. The whole warp calls it together, and no more when it got a tile without tokens.
    #[inline(always)]
    pub unsafe fn take(&mut self) -> Tile {
        // SAFETY: the slot is full after the wait, and stays so until this warp has arrived.
        unsafe {
            self.ring.wait_full();
            let tile = Tile::read(self.slot());
            sync_warp(ALL_LANES);
            if lane_id() == 0 {
                mbarrier_arrive(self.ring.empty());
            }
            self.ring.advance();
            tile
        }
    }

    /// Waits for the next tile: how many tokens it has, the same in all lanes. It stays in its slot.
    ///
    /// # Safety
    /// As [`Self::take`].
    #[inline(always)]
    pub unsafe fn wait(&self) -> u32 {
        // SAFETY: the slot is full after the wait. Through the shuffle the compiler knows that the number is the same in all lanes.
        unsafe {
            self.ring.wait_full();
            from_first_lane(ld_shared_b32(self.slot() + Tile::TOKENS))
        }
    }

    /// The tile that was [waited for](Self::wait), and the barrier at which the warp must arrive to give its slot back. Goes on to the
    /// next one.
    ///
    /// # Safety
    /// It was waited for.
    #[inline(always)]
    pub unsafe fn read(&mut self) -> (Tile, Mbarrier) {
        // SAFETY: the slot's full barrier was waited for, so the slot holds a tile.
        let (tile, empty) = (unsafe { Tile::read(self.slot()) }, self.ring.empty());
        self.ring.advance();
        (tile, empty)
    }
}
