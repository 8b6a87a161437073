//! Copies a tile's tokens from global memory to the CTA's buffers, 16 bytes per copy, because rows may lie anywhere. A
//! buffer holds one chunk.
//!
//! The distance of rows in a buffer is the length of a row plus one copy, so neither copies nor `ldmatrix` access a
//! bank of shared memory twice.

use cuda_std::{
    cp_async::cp_async_16_or_zero,
    global::{GlobalAddress, ld_relaxed_gpu_global_b32},
    integer::opaque_b32,
    shared::SharedAddress,
    thread,
};

use super::abi::{BUFFERS, CHUNK, COPY_BYTES, Instance, ROW_BYTES, TOKEN_COPIES};
use crate::{
    decoding::Tile,
    moe::Launch,
    units::{K_BLOCK, block_columns, block_start, k_blocks},
};

/// Elements of a token per copy.
const COPY_ELEMENTS: u32 = COPY_BYTES / 2;

/// Bytes of a token's k-block.
pub(super) const K_BLOCK_BYTES: u32 = TOKEN_COPIES * COPY_BYTES;

/// Maximum number of rows from which a thread copies pieces.
const MAX_ROWS: usize = 2;

/// Offset of a piece of a row in a buffer.
#[inline(always)]
pub(super) const fn token_place(row: u32, piece: u32) -> u32 {
    row * ROW_BYTES + piece * COPY_BYTES
}

/// A thread's state for the copies of a tile's tokens.
pub(super) struct Tokens {
    instance: Instance,
    /// Address of the thread's piece of its first row in the first buffer.
    target: SharedAddress,
    /// First piece of each of the thread's rows, counted in copies from the first token.
    pieces: [u32; MAX_ROWS],
    /// Number of the tile's rows from which the thread copies pieces.
    count: u32,
    /// Whether all chunks are in the buffers, for the second and further tiles of a run.
    are_complete: bool,
}

impl Tokens {
    /// Returns the state for a tile, and starts the copies of its first chunk. For a tile without tokens there are no
    /// copies.
    ///
    /// # Safety
    /// The contract in `moe_sm90/mod.rs` holds, and the previous grid has ended. All threads of the CTA call this, and
    /// none reads the buffers.
    #[inline(always)]
    pub(super) unsafe fn of(instance: Instance, launch: &Launch, tile: &Tile, buffers: SharedAddress) -> Self {
        let (first_row, piece) = (thread::thread_idx_x() / TOKEN_COPIES, thread::thread_idx_x() % TOKEN_COPIES);
        let count = tile.tokens.saturating_sub(first_row).div_ceil(Self::row_step(instance));
        let pieces = [0, 1].map(|index| {
            let row = tile.first_row + first_row + index * Self::row_step(instance);
            let token = match launch.rows {
                // SAFETY: the list has an entry for every row.
                list if list != 0 && index < count => unsafe {
                    ld_relaxed_gpu_global_b32(GlobalAddress::new(list) + u64::from(row) * 4)
                },
                _ => row,
            };
            token * (launch.k / COPY_ELEMENTS) + piece
        });
        let this =
            Self { instance, target: buffers + token_place(first_row, piece), pieces, count, are_complete: false };
        // SAFETY: the previous grid has ended, so tokens are complete; all threads of the CTA are here, and none reads
        // the buffers.
        unsafe { this.begin(launch, 0) };
        this
    }

    /// State before the first tile.
    pub(super) const fn none(instance: Instance, buffers: SharedAddress) -> Self {
        Self { instance, target: buffers, pieces: [0; MAX_ROWS], count: 0, are_complete: true }
    }

    /// State for the next tile of a run, which has the same tokens: all chunks are in the buffers.
    pub(super) const fn complete(self) -> Self {
        Self { are_complete: true, ..self }
    }

    /// Whether chunks of the tile's tokens are still copied. If not, no barrier is needed before a chunk.
    #[inline(always)]
    pub(super) const fn are_pending(&self) -> bool {
        self.instance.run == 1 || !self.are_complete
    }

    /// Distance between rows from which a thread copies pieces.
    const fn row_step(instance: Instance) -> u32 {
        instance.threads() / TOKEN_COPIES
    }

    /// Starts the copies of the chunk that begins with k-block `first`, up to the end of K.
    ///
    /// # Safety
    /// The contract in `moe_sm90/mod.rs` holds, and the previous grid has ended. All threads of the CTA call this, and
    /// none reads the chunk's buffer.
    #[inline(always)]
    pub(super) unsafe fn begin(&self, launch: &Launch, first: u32) {
        let k = launch.k;
        let buffer = self.target + first / CHUNK % BUFFERS * self.instance.buffer_bytes();
        // Starts the copy of one piece of each row to k-block `step` of the buffer. The source is `pieces` pieces and
        // `whole` whole k-blocks after the row's first piece.
        let copy = |step: u32, is_there: bool, pieces: u32, whole: u32| {
            for index in [0, 1] {
                let is_row = index * Self::row_step(self.instance) < self.instance.tile_tokens;
                if is_row && index < self.count {
                    let piece = u64::from(self.pieces[index as usize]) + u64::from(pieces);
                    let source = GlobalAddress::new(launch.tokens) + piece * u64::from(COPY_BYTES);
                    let source = source + u64::from(whole * K_BLOCK_BYTES);
                    let place = index * Self::row_step(self.instance) * ROW_BYTES + step * K_BLOCK_BYTES;
                    // SAFETY: the row has this piece, and the buffer its place; `is_there` disables the read of a
                    // missing piece.
                    unsafe { cp_async_16_or_zero(is_there, buffer + place, source) };
                }
            }
        };
        if first + CHUNK <= k / K_BLOCK {
            for step in 0..CHUNK {
                copy(step, true, first * TOKEN_COPIES, step);
            }
        } else {
            // Opaque, so that no register holds a value of this branch during the mainloop.
            let first = opaque_b32(first);
            let piece = thread::thread_idx_x() % TOKEN_COPIES;
            for step in 0..k_blocks(k).saturating_sub(first).min(CHUNK) {
                let is_there = piece * COPY_ELEMENTS < block_columns(k, first + step);
                copy(step, is_there, block_start(k, first + step) / COPY_ELEMENTS, 0);
            }
        }
    }
}
