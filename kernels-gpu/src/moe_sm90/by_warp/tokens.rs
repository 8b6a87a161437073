//! A tile's tokens, from global memory to the block's buffers: 16 bytes a copy, since rows lie anywhere. A buffer has a chunk.
//!
//! In a buffer each k-block of the chunk lies by itself, row after row. The 16-byte pieces of a row are exchanged by the lowest bits of
//! its number, so that neither copies nor `ldmatrix` meet a bank of shared memory twice.

use cuda_std::{
    cp_async::cp_async_16_or_zero,
    global::{GlobalAddress, ld_relaxed_gpu_global_b32},
    integer::opaque_b32,
    shared::SharedAddress,
    thread,
};

use super::abi::{CHUNK, COPY_BYTES, Instance, TILE_TOKENS, TOKEN_COPIES};
use crate::{
    moe_sm90::abi::Launch,
    sm90::Tile,
    units::{K_BLOCK, block_columns, block_start, k_blocks},
};

/// Elements of a token that a copy brings.
const COPY_ELEMENTS: u32 = COPY_BYTES / 2;

/// Rows after which the exchange of pieces begins again.
const EXCHANGED_ROWS: u32 = 8;

/// Bytes of a k-block of a buffer.
pub(super) const K_BLOCK_BYTES: u32 = TILE_TOKENS * TOKEN_COPIES * COPY_BYTES;

/// The most rows that a thread copies pieces of.
const MAX_ROWS: usize = 2;

/// In place of a row.
const NO_ROW: u32 = u32::MAX;

/// Where a piece of a row lies in a k-block of a buffer.
#[inline(always)]
pub(super) const fn token_place(row: u32, piece: u32) -> u32 {
    (row * TOKEN_COPIES + (piece ^ (row % EXCHANGED_ROWS))) * COPY_BYTES
}

/// What a thread knows of the copies of a tile's tokens.
pub(super) struct Tokens {
    instance: Instance,
    buffers: SharedAddress,
    /// Where the thread's rows begin, in copies from the first token; [`NO_ROW`] where the tile has none.
    rows: [u32; MAX_ROWS],
    /// The first k-block of the next chunk.
    k_block: u32,
    /// The buffer that it goes to.
    buffer: u32,
}

impl Tokens {
    /// Those of a tile, of which the first chunks are begun. There are none of a tile without tokens.
    ///
    /// # Safety
    /// The contract in `moe_sm90/mod.rs`; the grid before has ended. All threads of the block call it, and none reads the buffers.
    #[inline(always)]
    pub(super) unsafe fn of(instance: Instance, launch: &Launch, tile: &Tile, buffers: SharedAddress) -> Self {
        let first_piece = |row: u32| -> u32 {
            if row >= tile.tokens {
                return NO_ROW;
            }
            let row = tile.first_row + row;
            let token = match launch.rows {
                0 => row,
                // SAFETY: the list has a number for every row.
                rows => unsafe { ld_relaxed_gpu_global_b32(GlobalAddress::new(rows) + u64::from(row) * 4) },
            };
            token * (launch.k / COPY_ELEMENTS)
        };
        let rows = [0, 1].map(|row| first_piece(Self::first_row() + row * Self::row_step(instance)));
        let mut this = Self { instance, buffers, rows, k_block: 0, buffer: 0 };
        if tile.tokens > 0 {
            for _ in 1..instance.buffers() {
                // SAFETY: what `# Safety` above asks.
                unsafe { this.begin_next(launch, tile.tokens) };
            }
        }
        this
    }

    /// How far the rows lie apart that a thread copies pieces of.
    const fn row_step(instance: Instance) -> u32 {
        instance.threads() / TOKEN_COPIES
    }

    /// The first of them.
    #[inline(always)]
    fn first_row() -> u32 {
        thread::thread_idx_x() / TOKEN_COPIES
    }

    /// Begins to copy the next chunk, as far as K has it.
    ///
    /// # Safety
    /// As [`Self::of`]; no thread reads the next buffer. The tile has so many tokens.
    #[inline(always)]
    pub(super) unsafe fn begin_next(&mut self, launch: &Launch, tokens: u32) {
        let (instance, k) = (self.instance, launch.k);
        // SAFETY: what `# Safety` above asks.
        unsafe {
            if self.k_block + CHUNK <= k / K_BLOCK {
                for step in 0..CHUNK {
                    self.copy(launch, tokens, step, K_BLOCK, self.k_block * K_BLOCK + step * K_BLOCK);
                }
            } else {
                // Opaque, so that no register holds anything of this over the main loop.
                let first = opaque_b32(self.k_block);
                for step in 0..k_blocks(k).saturating_sub(first).min(CHUNK) {
                    let k_block = first + step;
                    self.copy(launch, tokens, step, block_columns(k, k_block), block_start(k, k_block));
                }
            }
        }
        self.k_block += CHUNK;
        self.buffer = if self.buffer + 1 == instance.buffers() { 0 } else { self.buffer + 1 };
    }

    /// Begins to copy the thread's pieces of a k-block, so many columns from `start` on, to its place in the next buffer.
    ///
    /// # Safety
    /// As [`Self::begin_next`].
    #[inline(always)]
    unsafe fn copy(&self, launch: &Launch, tokens: u32, step: u32, columns: u32, start: u32) {
        let (instance, piece) = (self.instance, thread::thread_idx_x() % TOKEN_COPIES);
        // Rows that a thread has are of the same remainder, so that their pieces are exchanged alike.
        let place = self.buffer * instance.buffer_bytes() + step * K_BLOCK_BYTES;
        let target = self.buffers + (place + token_place(Self::first_row(), piece));
        let source = u64::from(start / COPY_ELEMENTS + piece);
        let copy = |index: u32, first_piece: u32| {
            let is_there = first_piece != NO_ROW && piece * COPY_ELEMENTS < columns;
            let source = (source + if is_there { u64::from(first_piece) } else { 0 }) * u64::from(COPY_BYTES);
            let target = target + index * Self::row_step(instance) * TOKEN_COPIES * COPY_BYTES;
            // Products of eight tokens read no other rows.
            if index * Self::row_step(instance) < tokens.next_multiple_of(EXCHANGED_ROWS) {
                // SAFETY: what `# Safety` above asks; nothing is read where there is no row.
                unsafe { cp_async_16_or_zero(is_there, target, GlobalAddress::new(launch.tokens) + source) };
            }
        };
        copy(0, self.rows[0]);
        if TILE_TOKENS > Self::row_step(instance) {
            copy(1, self.rows[1]);
        }
    }
}
