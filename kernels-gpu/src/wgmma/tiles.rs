//! Tiles that a CTA's first warp finds and writes to shared memory for the other warps.

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

/// A CTA's tiles, as one warp iterates over them: a ring of [`TILE_SLOTS`] slots. A slot is full after the finding warp
/// has arrived, and empty after all other warps have arrived.
#[derive(Clone, Copy)]
pub struct Tiles {
    ring: Ring,
    slots: SharedAddress,
}

impl Tiles {
    /// Returns the ring at the CTA's first tile. Its barriers lie at `barriers`, a multiple of 8, and its slots at
    /// `slots`, a multiple of 16.
    #[inline(always)]
    pub const fn new(barriers: SharedAddress, slots: SharedAddress) -> Self {
        Self { ring: Ring::new(barriers, TILE_SLOTS), slots }
    }

    /// Initializes the barriers for `readers` warps that read tiles.
    ///
    /// # Safety
    /// The requirements of [`Ring::init`].
    #[inline(always)]
    pub unsafe fn init(self, readers: u32) {
        // SAFETY: the caller guarantees what `Ring::init` requires: the barriers' shared memory is unused, and other
        // threads wait for a barrier of the CTA.
        unsafe { self.ring.init(1, readers) };
    }

    /// Address of the current slot.
    #[inline(always)]
    fn slot(self) -> SharedAddress {
        self.slots + self.ring.index() * TILE_BYTES
    }

    /// Finds the CTA's tiles, writes each one to its slot, and calls `load` with it. Runs in one warp.
    ///
    /// A tile is written before the preceding tile is loaded. Warps that load tokens run ahead of the warps that
    /// multiply by as much as their buffers hold, and must not wait for this warp.
    ///
    /// # Safety
    /// The barriers are initialized, and the lists are complete. The whole warp calls this together, and no other warp
    /// of the CTA calls it.
    #[inline(always)]
    pub unsafe fn find(mut self, lists: &TileLists, mut load: impl FnMut(&Tile)) {
        // SAFETY: the barriers are initialized, the lists are complete, and only this warp, with all its lanes, runs this.
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

    /// Writes a tile to its slot.
    ///
    /// # Safety
    /// The requirements of [`Self::find`].
    #[inline(always)]
    unsafe fn write_down(&mut self, tile: &Tile) {
        // SAFETY: the barriers are initialized. The slot is empty after the wait, and only this warp writes it.
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

    /// Waits for the next tile, reads it and releases its slot.
    ///
    /// # Safety
    /// The barriers are initialized. The whole warp calls this together, and not again after a tile without tokens.
    #[inline(always)]
    pub unsafe fn take(&mut self) -> Tile {
        // SAFETY: the slot is full after the wait, and stays full until this warp has arrived.
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

    /// Waits for the next tile, which stays in its slot. Returns its number of tokens, the same in all lanes.
    ///
    /// # Safety
    /// The requirements of [`Self::take`].
    #[inline(always)]
    pub unsafe fn wait(&self) -> u32 {
        // SAFETY: the slot is full after the wait. The shuffle shows the compiler that the number is the same in all
        // lanes.
        unsafe {
            self.ring.wait_full();
            from_first_lane(ld_shared_b32(self.slot() + Tile::TOKENS))
        }
    }

    /// Returns the tile after [`wait`](Self::wait), and the barrier at which the warp must arrive to release its slot.
    /// Advances to the next tile.
    ///
    /// # Safety
    /// [`wait`](Self::wait) has returned for this tile.
    #[inline(always)]
    pub unsafe fn read(&mut self) -> (Tile, Mbarrier) {
        // SAFETY: the caller waited at the slot's full barrier, so the slot holds a tile.
        let (tile, empty) = (unsafe { Tile::read(self.slot()) }, self.ring.empty());
        self.ring.advance();
        (tile, empty)
    }
}
