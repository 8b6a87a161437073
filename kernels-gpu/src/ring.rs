//! Buffers that two roles hand to each other, and the barriers by which they do.

use cuda_std::{
    cluster::mapa,
    mbarrier::{
        MBARRIER_BYTES, mbarrier_arrive, mbarrier_arrive_cluster, mbarrier_init, mbarrier_wait_parity,
        mbarrier_wait_parity_cluster,
    },
};

/// Buffers used in turn, and the barriers that say which are full and which empty.
///
/// A role goes round on its own: the one that fills waits for a buffer to be empty, the one that empties it for it to be
/// full. All buffers are empty at first. BLOCKS is 2 where the roles of a pair of blocks wait for each other.
#[derive(Clone, Copy)]
pub struct Ring<const BLOCKS: u32 = 1> {
    /// Shared address of the barriers: full ones, then empty ones.
    barriers: u32,
    /// Buffers.
    count: u32,
    /// Twice the index of the buffer at hand, plus the parity of its full phase: one register.
    place: u32,
}

/// Bytes of the barriers of a ring of so many buffers.
pub const fn ring_bytes(count: u32) -> u32 {
    2 * count * MBARRIER_BYTES
}

impl<const BLOCKS: u32> Ring<BLOCKS> {
    /// The ring of `count` buffers whose barriers lie at a shared address, at its first buffer.
    #[inline(always)]
    pub const fn new(barriers: u32, count: u32) -> Self {
        Self { barriers, count, place: 0 }
    }

    /// Makes the barriers, whose phases take so many arrivals.
    ///
    /// # Safety
    /// The barriers' place in shared memory is nobody else's, and nobody uses them yet.
    #[inline(always)]
    pub unsafe fn init(self, full_arrivals: u32, empty_arrivals: u32) {
        for index in 0..self.count {
            let ring = Self { place: 2 * index, ..self };
            // SAFETY: the caller's promise.
            unsafe {
                mbarrier_init(ring.full(), full_arrivals);
                mbarrier_init(ring.empty(), empty_arrivals);
            }
        }
    }

    /// The index of the buffer at hand.
    #[inline(always)]
    pub const fn index(self) -> u32 {
        self.place / 2
    }

    /// The parity of its full phase.
    #[inline(always)]
    const fn parity(self) -> u32 {
        self.place % 2
    }

    /// Its barrier for those who fill it.
    #[inline(always)]
    pub const fn full(self) -> u32 {
        self.barriers + self.index() * MBARRIER_BYTES
    }

    /// Its barrier for those who empty it.
    #[inline(always)]
    pub const fn empty(self) -> u32 {
        self.barriers + (self.count + self.index()) * MBARRIER_BYTES
    }

    /// Waits until the buffer is full.
    ///
    /// # Safety
    /// The barriers are made; whoever fills is at most one round ahead.
    #[inline(always)]
    pub unsafe fn wait_full(self) {
        // SAFETY: the caller's promise.
        unsafe { Self::wait(self.full(), self.parity()) }
    }

    /// Waits until the buffer is empty.
    ///
    /// # Safety
    /// The barriers are made; whoever empties is at most one round behind.
    #[inline(always)]
    pub unsafe fn wait_empty(self) {
        // SAFETY: the caller's promise. Of a fresh barrier, the phase before the first is complete.
        unsafe { Self::wait(self.empty(), self.parity() ^ 1) }
    }

    /// Waits until the buffer, which was filled in this round, is empty again.
    ///
    /// # Safety
    /// The barriers are made; nobody fills the buffer twice more before this returns.
    #[inline(always)]
    pub unsafe fn wait_emptied(self) {
        // SAFETY: the caller's promise.
        unsafe { Self::wait(self.empty(), self.parity()) }
    }

    #[inline(always)]
    unsafe fn wait(barrier: u32, parity: u32) {
        // SAFETY: the caller's promise.
        unsafe {
            if BLOCKS > 1 {
                mbarrier_wait_parity_cluster(barrier, parity);
            } else {
                mbarrier_wait_parity(barrier, parity);
            }
        }
    }

    /// Arrives at a barrier of the ring, of a pair at that of the first block.
    ///
    /// # Safety
    /// One of the ring's barriers, which are made; the first block has not ended.
    #[inline(always)]
    pub unsafe fn arrive(barrier: u32) {
        // SAFETY: the caller's promise.
        unsafe {
            if BLOCKS > 1 {
                mbarrier_arrive_cluster(mapa(barrier, 0));
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

    /// Waits until all buffers of a pair's block are empty: the other block's thread arrives here no more. A block alone has
    /// issued all that arrives, and knows it complete.
    ///
    /// # Safety
    /// As [`Ring::wait_empty`].
    #[inline(always)]
    pub unsafe fn drain(mut self) {
        if BLOCKS == 1 {
            return;
        }
        for _ in 0..self.count {
            // SAFETY: the caller's promise.
            unsafe { self.wait_empty() };
            self.advance();
        }
    }
}
