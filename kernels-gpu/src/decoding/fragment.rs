//! A thread's part of a panel.

use cuda_std::{
    integer::opaque_b32,
    mbarrier::{Mbarrier, mbarrier_arrive},
    thread,
    warp::{ALL_LANES, WARP_SIZE, lane_id, sync_warp},
};

use super::{WARPGROUP, WARPGROUP_ROWS, WARPS};

/// Lanes that share a row of a fragment (PTX ISA, "Register Fragments for wgmma.mma_async").
const ROW_LANES: u32 = 4;

/// Rows of a warp's A fragment.
const WARP_ROWS: u32 = 16;
const _: () = assert!(WARPS * WARP_ROWS == WARPGROUP_ROWS);

/// A thread's words of two rows of a panel.
///
/// A thread has rows g and g+8 of its warp's 16 rows of `wgmma`'s A (PTX ISA, "Register Fragments for
/// wgmma.mma_async"). They are the panel's rows 2g and 2g+1: neighboring columns of C, which a thread writes together.
/// If g is odd, the two rows are swapped, so that the eight loads of a quarter warp have no bank conflicts.
#[derive(Clone, Copy)]
pub struct Fragment {
    /// The thread's position among the lanes that share its rows.
    pub lane: u32,
    /// Rows g and g+8, as rows of the panel.
    pub rows: [u32; 2],
    /// Whether the thread arrives at barriers for its warp.
    leads: bool,
}

impl Fragment {
    /// This thread's fragment, in the `consumer`-th warpgroup that multiplies.
    #[inline(always)]
    pub fn new(consumer: u32) -> Self {
        let warp = thread::thread_idx_x() % WARPGROUP / WARP_SIZE;
        Self::of(lane_id(), consumer * WARPS + warp)
    }

    /// The fragment of a lane in the `warp`-th multiplying warp.
    #[inline(always)]
    pub const fn of(lane_id: u32, warp: u32) -> Self {
        let (lane, pair) = (lane_id % ROW_LANES, lane_id / ROW_LANES);
        let first_row = warp * WARP_ROWS + 2 * pair;
        let odd = pair % 2;
        Self { lane, rows: [first_row + odd, first_row + 1 - odd], leads: lane == 0 && pair == 0 }
    }

    /// This thread's fragment in a narrow gated tile: row g of its warp's eight rows, in gate's panel and in up's. The two
    /// rows are rows g and g+8 of `wgmma`'s A, so one thread has both.
    #[inline(always)]
    pub const fn narrow(&self) -> Self {
        let row = self.rows[0] / 2;
        Self { lane: self.lane, rows: [row, row], leads: self.leads }
    }

    /// This thread's fragment, computed again from the thread's index. Used for rare accesses, so that the fragment
    /// takes no registers in between.
    #[inline(always)]
    pub fn anew() -> Self {
        let thread = opaque_b32(thread::thread_idx_x());
        Self::of(thread % WARP_SIZE, thread / WARP_SIZE - WARPS)
    }

    /// Arrives once for the whole warp, behind all earlier accesses of its lanes.
    ///
    /// # Safety
    /// The barrier has been initialized, and its phase lacks an arrival. The whole warp makes this call together.
    #[inline(always)]
    pub unsafe fn arrive(&self, mbarrier: Mbarrier) {
        // SAFETY: the caller guarantees an initialized mbarrier whose phase lacks an arrival, and that the whole warp
        // is here.
        unsafe {
            sync_warp(ALL_LANES);
            if self.leads {
                mbarrier_arrive(mbarrier);
            }
        }
    }
}
