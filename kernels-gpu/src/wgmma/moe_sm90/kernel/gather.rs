//! Warps that gather tokens, 16 bytes per copy, to the buffers that `wgmma` reads.
//!
//! 16 bytes of a token are one row of a core matrix. In a strip of eight tokens, core matrix c has the tokens' c-th 16
//! bytes of the k-block. A warp's copy covers eight tokens and four core matrices: the lanes of a quarter warp write
//! 128 contiguous bytes, and read 64 contiguous bytes per token.
//!
//! A buffer's barrier counts the copies as they complete. The threads that multiply execute the fence that makes the
//! copied bytes visible to `wgmma`, because a fence in the copying thread would wait for all of its copies, also for
//! later ones.
//!
//! Nothing is copied to a place of a strip without a token, because products wait for copies in flight to shared
//! memory. The place then holds zeros or a token of an earlier tile, and its sums are not written to C.

use cuda_std::{
    cp_async::{cp_async_16_or_zero, cp_async_mbarrier_arrive_noinc},
    global::{GlobalAddress, ld_relaxed_gpu_global_b32},
    griddepcontrol::{griddepcontrol_launch_dependents, griddepcontrol_wait},
    shared::{SharedAddress, ld_shared_b32, st_shared_b32, st_shared_v4_b32},
    warp::{ALL_LANES, WARP_SIZE, lane_id, sync_warp},
};

use super::{Built, Moe};
use crate::{
    decoding::{CORE_MATRIX_BYTES, CORE_MATRIX_ROWS, K_BLOCK, STRIP_BYTES, Tile},
    units::{block_columns, block_start, k_blocks},
    wgmma::moe_sm90::abi::{SOURCE_BYTES, STRIP_SOURCE_BYTES},
};

/// Bytes per copy: a row of a core matrix.
const CHUNK_BYTES: u32 = 16;

/// Elements per copy.
const CHUNK_ELEMENTS: u32 = CHUNK_BYTES / 2;

/// Number of core matrices that a warp's copy has rows of.
const COPY_CHUNKS: u32 = 4;

/// Number of a warp's copies per strip.
const STRIP_COPIES: u32 = K_BLOCK / CHUNK_ELEMENTS / COPY_CHUNKS;

impl<I: Built, const BF16: bool, const P: usize> Moe<I, BF16, P> {
    /// Gathers the tokens of the CTA's tiles. Runs in one warp, the `warp`-th of [`Self::TOKEN_WARPS`], which loads
    /// every third strip.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs` holds, and the barriers are initialized. The whole warp calls this
    /// together.
    #[inline(always)]
    pub(super) unsafe fn gather_tokens(&self, warp: u32) {
        let (mut tiles, mut buffers, k) = (self.tiles(), self.buffers(), self.launch.k);
        // SAFETY: tokens and lists are complete after the wait for the previous grid. A buffer is written while it is
        // empty.
        unsafe {
            self.clear_buffers(warp);
            griddepcontrol_wait();
            griddepcontrol_launch_dependents();
            loop {
                let tile = tiles.take();
                if tile.tokens == 0 {
                    return;
                }
                let strips = Self::INSTANCE.shape().mma_n(tile.tokens) / CORE_MATRIX_ROWS;
                self.write_sources(&tile, warp, strips);
                for k_block in 0..k_blocks(k) {
                    let (mut columns, mut first) = (K_BLOCK, k_block * (K_BLOCK / CHUNK_ELEMENTS));
                    if k_block >= k / K_BLOCK {
                        (columns, first) = (block_columns(k, k_block), block_start(k, k_block) / CHUNK_ELEMENTS);
                    }
                    buffers.wait_empty();
                    let buffer = Self::buffer(self.shared, buffers);
                    let mut strip = warp;
                    while strip < strips {
                        let source = ld_shared_b32(self.source(strip)) + first;
                        let is_there = strip * CORE_MATRIX_ROWS + lane_id() % CORE_MATRIX_ROWS < tile.tokens;
                        for copy in 0..STRIP_COPIES {
                            let chunk = lane_id() / CORE_MATRIX_ROWS + copy * COPY_CHUNKS;
                            let source = u64::from(source + chunk) * u64::from(CHUNK_BYTES);
                            let target = buffer + strip * STRIP_BYTES + chunk * CORE_MATRIX_BYTES;
                            if is_there {
                                cp_async_16_or_zero(
                                    chunk * CHUNK_ELEMENTS < columns,
                                    target + lane_id() % CORE_MATRIX_ROWS * CHUNK_BYTES,
                                    GlobalAddress::new(self.launch.tokens) + source,
                                );
                            }
                        }
                        strip += Self::TOKEN_WARPS;
                    }
                    cp_async_mbarrier_arrive_noinc(buffers.full());
                    buffers.advance();
                }
            }
        }
    }

    /// Writes zeros to the warp's strips of all buffers.
    ///
    /// # Safety
    /// Nothing has been copied to the buffers. The whole warp calls this together, with its own number.
    #[inline(always)]
    unsafe fn clear_buffers(&self, warp: u32) {
        let buffer_bytes = Self::INSTANCE.shape().buffer_bytes();
        for buffer in 0..Self::INSTANCE.buffers {
            let mut strip = warp;
            while strip < buffer_bytes / STRIP_BYTES {
                let strip_start = self.shared + (Self::BUFFERS + buffer * buffer_bytes + strip * STRIP_BYTES);
                for part in 0..STRIP_BYTES / (WARP_SIZE * CHUNK_BYTES) {
                    let place = (part * WARP_SIZE + lane_id()) * CHUNK_BYTES;
                    // SAFETY: the place is in a strip that no other warp writes and that nobody reads yet, and no other
                    // lane writes this place.
                    unsafe { st_shared_v4_b32(strip_start + place, [0; 4]) };
                }
                strip += Self::TOKEN_WARPS;
            }
        }
        // SAFETY: the whole warp is here. After this, a lane may copy to a place that another lane has cleared.
        unsafe { sync_warp(ALL_LANES) };
    }

    /// Address where this lane stores the start of its token of a strip.
    #[inline(always)]
    fn source(&self, strip: u32) -> SharedAddress {
        self.shared + Self::SOURCES + strip * STRIP_SOURCE_BYTES + lane_id() * SOURCE_BYTES
    }

    /// Stores the start of this lane's token for each of the warp's strips, in copies from the first token. Past the
    /// tile's last token it stores the start of the last token again; nothing is copied from there.
    ///
    /// # Safety
    /// The lists are complete.
    #[inline(always)]
    unsafe fn write_sources(&self, tile: &Tile, warp: u32, strips: u32) {
        let mut strip = warp;
        while strip < strips {
            let row = (strip * CORE_MATRIX_ROWS + lane_id() % CORE_MATRIX_ROWS).min(tile.tokens - 1) + tile.first_row;
            // SAFETY: the list has an entry for every row, and no other lane writes the place.
            unsafe {
                let token = if self.launch.rows == 0 {
                    row
                } else {
                    ld_relaxed_gpu_global_b32(GlobalAddress::new(self.launch.rows) + u64::from(row) * 4)
                };
                st_shared_b32(self.source(strip), token * (self.launch.k / CHUNK_ELEMENTS));
            }
            strip += Self::TOKEN_WARPS;
        }
    }
}
