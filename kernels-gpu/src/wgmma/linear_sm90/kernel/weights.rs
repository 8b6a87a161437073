//! The warp that loads weights, by bulk copies of panels in their layout in memory.

use cuda_std::{
    global::GlobalAddress,
    mbarrier::mbarrier_arrive_expect_tx,
    tma::cp_async_bulk_shared_global,
    warp::{ALL_LANES, lane_id, sync_warp},
};

use super::Linear;
use crate::linear::{PANEL_BYTES, PANEL_ROWS, panel_offset};

impl<const INDEX: usize, const BF16: bool, const P: usize> Linear<INDEX, BF16, P> {
    /// Loads the weights of the CTA's tiles to stages. Runs in one warp. Weights do not depend on the previous grid.
    ///
    /// # Safety
    /// The contract in `linear_sm90/mod.rs` holds, and the barriers are initialized. The whole warp calls this
    /// together.
    #[inline(always)]
    pub(super) unsafe fn load_weights(&self) {
        let (mut stages, mut tiles) = (self.stages(), self.tiles());
        let last = (self.launch.n - 1) / PANEL_ROWS;
        while let Some(tile) = self.next(&mut tiles) {
            let [first, end] = self.k_range();
            for k_block in first..end {
                let (stage, full) = (Self::stage(self.shared, stages), stages.full());
                // SAFETY: the copies read panels of the matrix. A stage is written while it is empty, and its full
                // barrier expects the bytes of every copy.
                unsafe {
                    stages.wait_empty();
                    if lane_id() == 0 {
                        mbarrier_arrive_expect_tx(full, Self::INSTANCE.stage_bytes());
                        for index in 0..Self::INSTANCE.panels() {
                            // A panel past the end of the matrix is replaced by its last panel; the resulting columns
                            // are not written to C.
                            let panel = (tile.first_column / PANEL_ROWS + index).min(last);
                            let source =
                                GlobalAddress::new(self.launch.panels) + panel_offset(panel, k_block, self.launch.k);
                            cp_async_bulk_shared_global(stage + index * PANEL_BYTES, source, PANEL_BYTES, full);
                        }
                    }
                    sync_warp(ALL_LANES);
                }
                stages.advance();
            }
        }
    }
}
