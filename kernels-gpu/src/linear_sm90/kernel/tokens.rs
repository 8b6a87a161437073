//! The warps that copy tokens, 16 bytes a copy, to the buffers that `wgmma` reads.
//!
//! 16 bytes of a token are a row of a core matrix. In a strip, eight tokens, core matrix c has the tokens' c-th 16 bytes of the
//! k-block. A warp's copy has eight tokens and four core matrices: the lanes of a quarter warp write 128 bytes that lie
//! together, and read from each token 64 bytes that lie together.
//!
//! A buffer's barrier counts the copies as they complete. The threads that multiply make what was copied known to `wgmma`.

use cuda_std::{
    cp_async::{cp_async_16_or_zero, cp_async_mbarrier_arrive_noinc},
    global::GlobalAddress,
    griddepcontrol::{griddepcontrol_launch_dependents, griddepcontrol_wait},
    warp::lane_id,
};

use super::{Linear, tiles::Tile};
use crate::{
    linear_sm90::abi::k_blocks,
    sm90::{CORE_MATRIX_BYTES, CORE_MATRIX_ROWS, K_BLOCK, STRIP_BYTES},
};

/// Bytes of a copy: a row of a core matrix.
const CHUNK_BYTES: u32 = 16;

/// Elements of a copy.
const CHUNK_ELEMENTS: u32 = CHUNK_BYTES / 2;

/// Core matrices that a warp's copy has rows of.
const COPY_CHUNKS: u32 = 4;

/// Copies that bring a strip.
const STRIP_COPIES: u32 = K_BLOCK / CHUNK_ELEMENTS / COPY_CHUNKS;

impl<const INDEX: usize, const BF16: bool, const P: usize> Linear<INDEX, BF16, P> {
    /// Copies the tokens of the block's tiles. One warp, the `warp`-th of [`Self::TOKEN_WARPS`]; each brings every third strip.
    ///
    /// # Safety
    /// The contract in `linear_sm90/mod.rs`. The barriers have been initialised. The whole warp calls it together.
    #[inline(always)]
    pub(super) unsafe fn copy_tokens(&self, warp: u32) {
        let (mut tiles, mut buffers, k) = (self.tiles(), self.buffers(), self.launch.k);
        griddepcontrol_wait();
        griddepcontrol_launch_dependents();
        while let Some(tile) = self.next(&mut tiles) {
            let strips = Self::INSTANCE.shape().mma_n(tile.tokens) / CORE_MATRIX_ROWS;
            for k_block in 0..k_blocks(k) {
                let (first, chunk) = (k_block * K_BLOCK, lane_id() / CORE_MATRIX_ROWS);
                let buffer = Self::buffer(self.shared, buffers);
                // SAFETY: tokens are complete after the wait. A buffer is written while it is empty.
                unsafe {
                    buffers.wait_empty();
                    let mut strip = warp;
                    while strip < strips {
                        let (token, is_there) = self.token(&tile, strip);
                        let source = token + u64::from(first * 2 + chunk * CHUNK_BYTES);
                        let target = buffer
                            + strip * STRIP_BYTES
                            + chunk * CORE_MATRIX_BYTES
                            + lane_id() % CORE_MATRIX_ROWS * CHUNK_BYTES;
                        for copy in 0..STRIP_COPIES {
                            let chunks = copy * COPY_CHUNKS;
                            cp_async_16_or_zero(
                                is_there && first + (chunk + chunks) * CHUNK_ELEMENTS < k,
                                target + chunks * CORE_MATRIX_BYTES,
                                source + u64::from(chunks * CHUNK_BYTES),
                            );
                        }
                        strip += Self::TOKEN_WARPS;
                    }
                    cp_async_mbarrier_arrive_noinc(buffers.full());
                }
                buffers.advance();
            }
        }
    }

    /// Where this lane's token of a strip begins, and whether there is one. Past the tile's last token are zeros: all blocks would read
    /// the same token again and again, and wait for each other.
    #[inline(always)]
    fn token(&self, tile: &Tile, strip: u32) -> (GlobalAddress, bool) {
        let token = strip * CORE_MATRIX_ROWS + lane_id() % CORE_MATRIX_ROWS;
        let is_there = token < tile.tokens;
        let row = if is_there { tile.first_row + token } else { tile.first_row };
        (GlobalAddress::new(self.launch.tokens) + u64::from(row) * self.launch.token_pitch, is_there)
    }
}
