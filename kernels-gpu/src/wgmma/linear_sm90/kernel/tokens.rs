//! The warp that loads tokens, by tensor copies with the 128-byte swizzle that `wgmma` reads directly.
//!
//! A buffer has two boxes: the first 64 columns of the k-block of the tile's tokens, 128 bytes per token, then the
//! other columns. Elements outside of the tokens are filled with zeros. Rows that belong to the next tile are not
//! written to C.

use cuda_std::{
    griddepcontrol::{griddepcontrol_launch_dependents, griddepcontrol_wait},
    mbarrier::mbarrier_arrive_expect_tx,
    tma::cp_async_bulk_tensor_2d_shared_global,
    warp::{ALL_LANES, lane_id, sync_warp},
};

use super::Linear;
use crate::{decoding::K_BLOCK, linear::BOX_BYTES};

/// Boxes per buffer.
const BOXES: u32 = 2 * K_BLOCK / BOX_BYTES;

impl<const INDEX: usize, const BF16: bool, const P: usize> Linear<INDEX, BF16, P> {
    /// Bytes from one box of a buffer to the next.
    pub(super) const BOX_PITCH: u32 = Self::INSTANCE.tile_tokens * BOX_BYTES;

    /// Loads the tokens of the CTA's tiles. Runs in one warp.
    ///
    /// # Safety
    /// The contract in `linear_sm90/mod.rs` holds, and the barriers are initialized. The whole warp calls this
    /// together.
    #[inline(always)]
    pub(super) unsafe fn load_tokens(&self) {
        let (mut tiles, mut buffers) = (self.tiles(), self.buffers());
        let bytes = BOXES * BOX_BYTES * Self::INSTANCE.box_tokens(self.launch.m, self.launch.token_tiles);
        griddepcontrol_wait();
        griddepcontrol_launch_dependents();
        while let Some(tile) = self.next(&mut tiles) {
            let [first, end] = self.k_range();
            for k_block in first..end {
                let (buffer, full) = (Self::buffer(self.shared, buffers), buffers.full());
                // SAFETY: the tokens are complete after the wait for the previous grid. A buffer is written while it is
                // empty, and its full barrier expects the bytes of both boxes.
                unsafe {
                    buffers.wait_empty();
                    if lane_id() == 0 {
                        mbarrier_arrive_expect_tx(full, bytes);
                        for part in 0..BOXES {
                            let at = [(k_block * BOXES + part) * BOX_BYTES, tile.first_row].map(|place| place as i32);
                            let target = buffer + part * Self::BOX_PITCH;
                            cp_async_bulk_tensor_2d_shared_global(target, self.token_map, at, full);
                        }
                    }
                    sync_warp(ALL_LANES);
                }
                buffers.advance();
            }
        }
    }
}
