//! Buffers between two roles, and the barriers that hand them over.

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
pub(super) struct Ring<const BLOCKS: u32> {
    /// Shared address of the barriers: full ones, then empty ones.
    barriers: u32,
    /// Buffers.
    count: u32,
    /// The buffer at hand.
    pub index: u32,
    /// The parity of its full phase.
    parity: u32,
}

impl<const BLOCKS: u32> Ring<BLOCKS> {
    #[inline(always)]
    pub const fn new(barriers: u32, count: u32) -> Self {
        Self { barriers, count, index: 0, parity: 0 }
    }

    #[inline(always)]
    pub unsafe fn init(self, full_arrivals: u32, empty_arrivals: u32) {
        for index in 0..self.count {
            let ring = Self { index, ..self };
            // SAFETY: the barriers' places, which nobody uses yet.
            unsafe {
                mbarrier_init(ring.full(), full_arrivals);
                mbarrier_init(ring.empty(), empty_arrivals);
            }
        }
    }

    #[inline(always)]
    pub const fn full(self) -> u32 {
        self.barriers + self.index * MBARRIER_BYTES
    }

    #[inline(always)]
    pub const fn empty(self) -> u32 {
        self.barriers + (self.count + self.index) * MBARRIER_BYTES
    }

    #[inline(always)]
    pub unsafe fn wait_full(self) {
        // SAFETY: a barrier; whoever fills is at most one round ahead.
        unsafe { Self::wait(self.full(), self.parity) }
    }

    #[inline(always)]
    pub unsafe fn wait_empty(self) {
        // SAFETY: a barrier; whoever empties is at most one round behind.
        unsafe { Self::wait(self.empty(), self.parity ^ 1) }
    }

    /// Waits until the buffer at hand, which has been filled, is empty again.
    #[inline(always)]
    pub unsafe fn wait_emptied(self) {
        // SAFETY: a barrier; nobody fills the buffer twice more before this returns.
        unsafe { Self::wait(self.empty(), self.parity) }
    }

    #[inline(always)]
    unsafe fn wait(barrier: u32, parity: u32) {
        // SAFETY: the caller's promise.
        unsafe {
            if BLOCKS > 1 {
                mbarrier_wait_parity_cluster(barrier, parity)
            } else {
                mbarrier_wait_parity(barrier, parity)
            }
        }
    }

    /// Arrives at a barrier of the ring, of a pair at that of the first block, whose thread multiplies for both.
    #[inline(always)]
    pub unsafe fn arrive(barrier: u32) {
        // SAFETY: a barrier; the first block ends with the second.
        unsafe { if BLOCKS > 1 { mbarrier_arrive_cluster(mapa(barrier, 0)) } else { mbarrier_arrive(barrier) } }
    }

    #[inline(always)]
    pub const fn advance(&mut self) {
        self.index += 1;
        if self.index == self.count {
            self.index = 0;
            self.parity ^= 1;
        }
    }

    /// Waits until all buffers of a pair's block are empty: the other block's thread arrives here no more. A block alone has
    /// issued all that arrives, and knows it complete.
    #[inline(always)]
    pub unsafe fn drain(mut self) {
        if BLOCKS == 1 {
            return;
        }
        for _ in 0..self.count {
            // SAFETY: as `wait_empty`.
            unsafe { self.wait_empty() };
            self.advance();
        }
    }
}
