//! Ping-pong of two warpgroups: while the products of one run, the other decodes.

use cuda_std::mbarrier::{Mbarrier, mbarrier_init, mbarrier_wait_parity};

use crate::decoding::{Fragment, TURN_BARRIERS, WARPS};

/// A warpgroup's turns. Left to themselves, both would decode at the same time, and then both would wait for the tensor core.
pub struct PingPong {
    /// The barriers of this warpgroup's turns, and of the other's.
    barriers: [Mbarrier; 2],
    /// The parity of the phase after which it is this one's turn.
    parity: u32,
}

impl PingPong {
    /// Warpgroup 0 has the first turn: it waits for the phase before the first, which is complete.
    #[inline(always)]
    pub const fn new(barriers: Mbarrier, consumer: u32) -> Self {
        Self { barriers: [barriers.nth(consumer), barriers.nth(consumer ^ 1)], parity: consumer ^ 1 }
    }

    /// Initializes both barriers.
    ///
    /// # Safety
    /// Nothing else uses their place in shared memory. Other threads use them only after a barrier of the block.
    #[inline(always)]
    pub unsafe fn init(barriers: Mbarrier) {
        for consumer in 0..TURN_BARRIERS {
            // SAFETY: the caller guarantees 8 bytes of unused shared memory per barrier; other threads wait for a
            // barrier of the CTA.
            unsafe { mbarrier_init(barriers.nth(consumer), WARPS) };
        }
    }

    /// Waits for this warpgroup's turn.
    ///
    /// # Safety
    /// The barriers have been initialized. The warpgroup waits and passes alternately.
    #[inline(always)]
    pub unsafe fn wait(&mut self) {
        // SAFETY: the phase is the current one or the one before, since the other warpgroup is at most one turn ahead.
        unsafe { mbarrier_wait_parity(self.barriers[0], self.parity) };
        self.parity ^= 1;
    }

    /// Gives the turn to the other warpgroup.
    ///
    /// # Safety
    /// As [`Self::wait`]; every warp of the warpgroup passes, all of its lanes together.
    #[inline(always)]
    pub unsafe fn pass(&self, fragment: &Fragment) {
        // SAFETY: a phase of the barrier takes an arrival of each warp of this warpgroup.
        unsafe { fragment.arrive(self.barriers[1]) };
    }
}
