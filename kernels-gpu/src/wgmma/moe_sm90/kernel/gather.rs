//! The warps that gather tokens, 16 bytes a copy, to the buffers that `wgmma` reads.
//!
//! 16 bytes of a token are a row of a core matrix. In a strip, eight tokens, core matrix c has the tokens' c-th 16 bytes of the
//! k-block. A warp's copy has eight tokens and four core matrices: the lanes of a quarter warp write 128 bytes that lie
//! together, and read from each token 64 bytes that lie together.
//!
//! A buffer's barrier counts the copies as they complete. The threads that multiply make what was copied known to `wgmma`: a fence
//! of the thread that copies would wait for all of its copies, the later ones too.
//!
//! Nothing is copied where a strip has no token: products wait for copies on their way to shared memory. What lies there then, zeros
//! or a token of an earlier tile, goes into sums that are not written to C.

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

/// Bytes of a copy: a row of a core matrix.
const CHUNK_BYTES: u32 = 16;

/// Elements of a copy.
const CHUNK_ELEMENTS: u32 = CHUNK_BYTES / 2;

/// Core matrices that a warp's copy has rows of.
const COPY_CHUNKS: u32 = 4;

/// Copies that bring a strip.
const STRIP_COPIES: u32 = K_BLOCK / CHUNK_ELEMENTS / COPY_CHUNKS;

impl<I: Built, const BF16: bool, const P: usize> Moe<I, BF16, P> {
    /// Gathers the tokens of the block's tiles. One warp, the `warp`-th of [`Self::TOKEN_WARPS`]; each brings every third strip.
    ///
    /// # Safety
    /// The contract in this folder's `mod.rs`. The barriers have been initialized. The whole warp calls it together.
    #[inline(always)]
    pub(super) unsafe fn gather_tokens(&self, warp: u32) {
        let (mut tiles, mut buffers, k) = (self.tiles(), self.buffers(), self.launch.k);
        // SAFETY: tokens and lists are complete after the wait. A buffer is written while it is empty.
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
    /// Nothing has been copied to the buffers. The whole warp calls it together, with its own number.
    #[inline(always)]
    unsafe fn clear_buffers(&self, warp: u32) {
        let buffer_bytes = Self::INSTANCE.shape().buffer_bytes();
        for buffer in 0..Self::INSTANCE.buffers {
            let mut strip = warp;
            while strip < buffer_bytes / STRIP_BYTES {
                let strip_start = self.shared + (Self::BUFFERS + buffer * buffer_bytes + strip * STRIP_BYTES);
                for part in 0..STRIP_BYTES / (WARP_SIZE * CHUNK_BYTES) {
                    let place = (part * WARP_SIZE + lane_id()) * CHUNK_BYTES;
                    // SAFETY: the place is this lane's, in a strip that no other warp writes and that nobody reads yet.
                    unsafe { st_shared_v4_b32(strip_start + place, [0; 4]) };
                }
                strip += Self::TOKEN_WARPS;
            }
        }
        // SAFETY: the whole warp is here. Another lane copies to where this one has written.
        unsafe { sync_warp(ALL_LANES) };
    }

    /// Where this lane keeps where its token of a strip begins.
    #[inline(always)]
    fn source(&self, strip: u32) -> SharedAddress {
        self.shared + Self::SOURCES + strip * STRIP_SOURCE_BYTES + lane_id() * SOURCE_BYTES
    }

    /// Writes down where this lane's token of each of the warp's strips begins, in copies from the first token. Past the tile's last
    /// token it is the last one again, of which nothing is copied.
    ///
    /// # Safety
    /// The lists are complete.
    #[inline(always)]
    unsafe fn write_sources(&self, tile: &Tile, warp: u32, strips: u32) {
        let mut strip = warp;
        while strip < strips {
            let row = (strip * CORE_MATRIX_ROWS + lane_id() % CORE_MATRIX_ROWS).min(tile.tokens - 1) + tile.first_row;
            // SAFETY: the list has a number for every row; the place is this lane's.
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
