//! A pipeline's buffers, which producers and consumers hand to each other, and the barriers by which they do.

use cuda_std::{
    mbarrier::{
        MBARRIER_BYTES, Mbarrier, mbarrier_arrive, mbarrier_arrive_cluster, mbarrier_init, mbarrier_wait_parity,
        mbarrier_wait_parity_cluster,
    },
    shared::SharedAddress,
    warp::{ALL_LANES, WARP_SIZE, warp_shuffle_idx},
};

/// Buffers used in turn, with two barriers each: one completes when the buffer is full, one when it is empty.
///
/// Each role has a ring of its own and goes round by itself. A producer waits for a buffer to be empty, a consumer for it
/// to be full. At first all buffers are empty. BLOCKS is 2 where the roles of a pair of blocks wait for each other.
#[derive(Clone, Copy)]
pub struct Ring<const BLOCKS: u32 = 1> {
    /// The first barrier: those for full come first, then those for empty.
    barriers: Mbarrier,
    /// Buffers.
    count: u32,
    /// Twice the index of the current buffer, plus the parity of its full phase: one register.
    place: u32,
}

/// Bytes of the barriers of a ring of so many buffers.
pub const fn ring_bytes(count: u32) -> u32 {
    2 * count * MBARRIER_BYTES
}

impl<const BLOCKS: u32> Ring<BLOCKS> {
    /// The ring of `count` buffers whose barriers lie at this address, a multiple of 8. It stands at its first buffer.
    #[inline(always)]
    pub const fn new(barriers: SharedAddress, count: u32) -> Self {
        Self { barriers: Mbarrier::at(barriers), count, place: 0 }
    }

    /// Initializes the barriers: phases of those for full and of those for empty take so many arrivals.
    ///
    /// # Safety
    /// The [`ring_bytes`] at the ring's address are shared memory that nothing else uses. Other threads use the ring only
    /// after a barrier of the block, and asynchronous copies only after `fence_mbarrier_init` besides.
    #[inline(always)]
    pub unsafe fn init(self, full_arrivals: u32, empty_arrivals: u32) {
        for index in 0..self.count {
            let ring = Self { place: 2 * index, ..self };
            // SAFETY: both lie inside of the ring's bytes, which are its own.
            unsafe {
                mbarrier_init(ring.full(), full_arrivals);
                mbarrier_init(ring.empty(), empty_arrivals);
            }
        }
    }

    /// The index of the current buffer.
    #[inline(always)]
    pub const fn index(self) -> u32 {
        self.place / 2
    }

    /// The same place, of which the compiler knows that it is the same in all lanes of the warp: what is computed from it then takes
    /// registers and instructions of the warp's, which products want their descriptors in.
    ///
    /// # Safety
    /// The whole warp calls it together.
    #[inline(always)]
    pub unsafe fn uniform(self) -> Self {
        // SAFETY: what `# Safety` above asks.
        Self { place: unsafe { warp_shuffle_idx(ALL_LANES, self.place, 0, WARP_SIZE).0 }, ..self }
    }

    /// The parity of its full phase.
    #[inline(always)]
    const fn parity(self) -> u32 {
        self.place % 2
    }

    /// The barrier at which its producers arrive.
    #[inline(always)]
    pub const fn full(self) -> Mbarrier {
        self.barriers.nth(self.index())
    }

    /// The barrier at which its consumers arrive.
    #[inline(always)]
    pub const fn empty(self) -> Mbarrier {
        self.barriers.nth(self.count + self.index())
    }

    /// Waits until the buffer is full.
    ///
    /// # Safety
    /// The ring has been initialized. Its producers are at most one round ahead.
    #[inline(always)]
    pub unsafe fn wait_full(self) {
        // SAFETY: a barrier of the ring, whose phase is the current one or the one before.
        unsafe { Self::wait(self.full(), self.parity()) }
    }

    /// Waits until the buffer is empty.
    ///
    /// # Safety
    /// The ring has been initialized. Its consumers are at most one round behind.
    #[inline(always)]
    pub unsafe fn wait_empty(self) {
        // SAFETY: a barrier of the ring, whose phase is the current one or the one before: of a fresh barrier, the phase
        // before the first is complete.
        unsafe { Self::wait(self.empty(), self.parity() ^ 1) }
    }

    /// Waits until the buffer, which was filled in this round, is empty again.
    ///
    /// # Safety
    /// The ring has been initialized. Nobody fills the buffer twice more before this returns.
    #[inline(always)]
    pub unsafe fn wait_emptied(self) {
        // SAFETY: a barrier of the ring, whose phase is the current one or the one before.
        unsafe { Self::wait(self.empty(), self.parity()) }
    }

    /// Waits for the phase of this parity.
    ///
    /// # Safety
    /// The barrier has been initialized; the phase is the current one or the one before.
    #[inline(always)]
    unsafe fn wait(barrier: Mbarrier, parity: u32) {
        // SAFETY: what `# Safety` above asks.
        unsafe {
            if BLOCKS > 1 {
                mbarrier_wait_parity_cluster(barrier, parity);
            } else {
                mbarrier_wait_parity(barrier, parity);
            }
        }
    }

    /// Arrives at a barrier of the ring; in a pair, at that of the pair's first block, which has this rank in the cluster.
    ///
    /// # Safety
    /// `barrier` is one of the ring's, which has been initialized, and its phase lacks an arrival. The first block of a
    /// pair has not ended.
    #[inline(always)]
    pub unsafe fn arrive(barrier: Mbarrier, leader: u32) {
        // SAFETY: what `# Safety` above asks.
        unsafe {
            if BLOCKS > 1 {
                mbarrier_arrive_cluster(barrier.in_block(leader));
            } else {
                mbarrier_arrive(barrier);
            }
        }
    }

    /// Goes on to the next buffer.
    #[inline(always)]
    pub const fn advance(&mut self) {
        self.place += 2;
        if self.index() == self.count {
            self.place = self.parity() ^ 1;
        }
    }

    /// The ring as it will stand at the next buffer.
    #[inline(always)]
    pub const fn next(mut self) -> Self {
        self.advance();
        self
    }

    /// In a pair, waits until all buffers are empty: then the thread of the other block has arrived here for the last time.
    /// A block alone need not wait: its own threads have issued all arrivals and seen them complete.
    ///
    /// # Safety
    /// As [`Ring::wait_empty`].
    #[inline(always)]
    pub unsafe fn drain(mut self) {
        if BLOCKS == 1 {
            return;
        }
        for _ in 0..self.count {
            // SAFETY: what `# Safety` above asks.
            unsafe { self.wait_empty() };
            self.advance();
        }
    }
}
