//! The warp that loads sorted tokens: one line of all rows of a tile is contiguous in memory.

use cuda_std::{
    global::GlobalAddress,
    griddepcontrol::{griddepcontrol_launch_dependents, griddepcontrol_wait},
    mbarrier::mbarrier_arrive_expect_tx,
    tma::cp_async_bulk_shared_global,
    warp::{ALL_LANES, lane_id, sync_warp},
};

use super::{Built, Moe};
use crate::{
    sorted::{K_BLOCK_LINES, LINE_BYTES, line},
    units::k_blocks,
};

impl<I: Built, const BF16: bool, const P: usize> Moe<I, BF16, P> {
    /// Loads the tokens of the CTA's tiles. Runs in one warp.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs` holds, and the barriers are initialized. The whole warp calls this
    /// together.
    #[inline(always)]
    pub(super) unsafe fn load_tokens(&self) {
        let (mut tiles, mut buffers, k_blocks) = (self.tiles(), self.buffers(), k_blocks(self.launch.k));
        let next_line = line(self.launch.row_capacity, 1, 0);
        // SAFETY: the tokens are complete after the wait for the previous grid. A buffer is written while it is empty,
        // and its full barrier expects the bytes of every copy.
        unsafe {
            griddepcontrol_wait();
            griddepcontrol_launch_dependents();
            loop {
                let tile = tiles.take();
                if tile.tokens == 0 {
                    return;
                }
                // The product may be wider than the tile. Sums of rows past the tile are not written to C.
                let bytes = Self::INSTANCE.shape().mma_n(tile.tokens) * LINE_BYTES;
                let mut source =
                    GlobalAddress::new(self.launch.tokens) + line(self.launch.row_capacity, 0, tile.first_row);
                for _ in 0..k_blocks {
                    buffers.wait_empty();
                    if lane_id() == 0 {
                        let (buffer, full) = (Self::buffer(self.shared, buffers), buffers.full());
                        mbarrier_arrive_expect_tx(full, K_BLOCK_LINES * bytes);
                        for index in 0..K_BLOCK_LINES {
                            let target = buffer + index * Self::INSTANCE.lines_bytes();
                            let source = source + u64::from(index) * next_line;
                            cp_async_bulk_shared_global(target, source, bytes, full);
                        }
                    }
                    sync_warp(ALL_LANES);
                    buffers.advance();
                    source = source + u64::from(K_BLOCK_LINES) * next_line;
                }
            }
        }
    }
}
