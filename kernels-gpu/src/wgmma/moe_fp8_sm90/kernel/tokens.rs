//! The warp that loads tokens and their scales: the rows of a tile are contiguous in each k-block.

use cuda_std::{
    global::GlobalAddress,
    griddepcontrol::{griddepcontrol_launch_dependents, griddepcontrol_wait},
    mbarrier::mbarrier_arrive_expect_tx,
    tma::cp_async_bulk_shared_global,
    warp::{ALL_LANES, lane_id, sync_warp},
};

use super::product::Product;
use crate::{
    sorted::{LINE_BYTES, line},
    units::k_blocks,
};

/// Bytes per scale.
const SCALE_BYTES: u32 = 4;

impl<const INDEX: usize, const R: usize> Product<INDEX, R> {
    /// Loads the tokens of the CTA's tiles. Runs in one warp.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs` holds, and the barriers are initialized. The whole warp calls this
    /// together.
    #[inline(always)]
    pub(super) unsafe fn load_tokens(&self) {
        let (mut tiles, mut buffers, mut scales) = (self.tiles(), self.buffers(), self.scales());
        let k_blocks = k_blocks(self.launch.k);
        // SAFETY: tokens and scales are complete after the wait for the previous grid. A buffer is written while it is
        // empty, and its full barrier expects the bytes of every copy.
        unsafe {
            griddepcontrol_wait();
            griddepcontrol_launch_dependents();
            loop {
                let tile = tiles.take();
                if tile.tokens == 0 {
                    return;
                }
                scales.wait_empty();
                if lane_id() == 0 {
                    let bytes = tile.tokens * SCALE_BYTES;
                    let source = GlobalAddress::new(self.launch.scales) + u64::from(tile.first_row * SCALE_BYTES);
                    mbarrier_arrive_expect_tx(scales.full(), bytes);
                    cp_async_bulk_shared_global(self.tile_scales(scales), source, bytes, scales.full());
                }
                sync_warp(ALL_LANES);
                scales.advance();
                let (lines, bytes) = (Self::INSTANCE.mma_n(tile.tokens), tile.tokens * LINE_BYTES);
                let mut source =
                    GlobalAddress::new(self.launch.tokens) + line(self.launch.row_capacity, 0, tile.first_row);
                for _ in 0..k_blocks {
                    buffers.wait_empty();
                    if lane_id() == 0 {
                        let (buffer, full) = (self.buffer(buffers), buffers.full());
                        mbarrier_arrive_expect_tx(full, lines * LINE_BYTES);
                        // The product may be wider than the tile. The same lines are loaded again for the rest, and
                        // their sums are not written to C.
                        let mut loaded = 0;
                        while loaded < lines * LINE_BYTES {
                            let more = bytes.min(lines * LINE_BYTES - loaded);
                            cp_async_bulk_shared_global(buffer + loaded, source, more, full);
                            loaded += more;
                        }
                    }
                    sync_warp(ALL_LANES);
                    buffers.advance();
                    source = source + line(self.launch.row_capacity, 1, 0);
                }
            }
        }
    }
}
