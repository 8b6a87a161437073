//! Ping-pong of two warpgroups: one decodes while the products of the other one run.

use cuda_std::mbarrier::{Mbarrier, mbarrier_init, mbarrier_wait_parity};

use crate::decoding::{Fragment, TURN_BARRIERS, WARPS};

/// Turns of one warpgroup. Without turns, both warpgroups would decode at the same time, and then both would wait for
/// the tensor core.
pub struct PingPong {
    /// Barriers of this warpgroup's turns and of the other warpgroup's turns.
    barriers: [Mbarrier; 2],
    /// Parity of the phase after which it is this warpgroup's turn.
    parity: u32,
}

impl PingPong {
    /// Returns the turns of warpgroup `consumer`. Warpgroup 0 has the first turn: it waits for the phase before the
    /// first one, which counts as complete.
    #[inline(always)]
    pub const fn new(barriers: Mbarrier, consumer: u32) -> Self {
        Self { barriers: [barriers.nth(consumer), barriers.nth(consumer ^ 1)], parity: consumer ^ 1 }
    }

    /// Initializes both barriers.
    ///
    /// # Safety
    /// Nothing else uses the barriers' shared memory. Other threads use the barriers only after a barrier of the CTA.
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
    /// The barriers are initialized. The warpgroup calls [`wait`](Self::wait) and [`pass`](Self::pass) alternately.
    #[inline(always)]
    pub unsafe fn wait(&mut self) {
        // SAFETY: the barriers are initialized. The phase is the current or the preceding one, since the other
        // warpgroup is at most one turn ahead.
        unsafe { mbarrier_wait_parity(self.barriers[0], self.parity) };
        self.parity ^= 1;
    }

    /// Passes the turn to the other warpgroup.
    ///
    /// # Safety
    /// The barriers are initialized, and [`wait`](Self::wait) has returned for this turn. Every warp of the warpgroup
    /// calls this, with all lanes together.
    #[inline(always)]
    pub unsafe fn pass(&self, fragment: &Fragment) {
        // SAFETY: the barrier is initialized, and its phase expects one arrival per warp of this warpgroup.
        unsafe { fragment.arrive(self.barriers[1]) };
    }
}
