//! Buffers of shared memory that roles of a block hand to each other.

use cuda_std::mbarrier::{MBARRIER_BYTES, mbarrier_init, mbarrier_wait_parity};

/// Buffers used in turn, and the barriers that say which are full and which empty.
///
/// A role goes round on its own: the one that fills waits for a buffer to be empty, the one that empties it for it to be
/// full. All buffers are empty at first.
#[derive(Clone, Copy)]
pub struct Ring {
    /// Shared address of the barriers: full ones, then empty ones.
    barriers: u32,
    /// Buffers.
    count: u32,
    /// Twice the index of the buffer at hand, plus the parity of its full phase: one register.
    place: u32,
}

impl Ring {
    /// Bytes of the barriers of so many buffers.
    pub const fn bytes(count: u32) -> u32 {
        2 * count * MBARRIER_BYTES
    }

    /// The ring of so many buffers with the barriers at a shared address, at its first buffer.
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
        unsafe { mbarrier_wait_parity(self.full(), self.place % 2) }
    }

    /// Waits until the buffer is empty.
    ///
    /// # Safety
    /// The barriers are made; whoever empties is at most one round behind.
    #[inline(always)]
    pub unsafe fn wait_empty(self) {
        // SAFETY: the caller's promise. Of a fresh barrier, the phase before the first is complete.
        unsafe { mbarrier_wait_parity(self.empty(), (self.place % 2) ^ 1) }
    }

    /// Goes on to the next buffer.
    #[inline(always)]
    pub const fn advance(&mut self) {
        self.place += 2;
        if self.index() == self.count {
            self.place = (self.place % 2) ^ 1;
        }
    }
}
