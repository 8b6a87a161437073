//! Copies of a tile's tokens and weights from global memory to stages: 16 bytes per copy, because the rows of tokens
//! lie anywhere.
//!
//! A stage's tokens are rows of a k-block. The 16-byte pieces of a row are permuted by the row's lowest bits, so that
//! copies and `ldmatrix` have no bank conflicts. Weights are units as they lie in memory, the units of a panel one
//! after the other. Units and tokens that do not exist are zeros.

use cuda_std::{
    cp_async::{cp_async_16_or_zero, cp_async_commit_group},
    global::{GlobalAddress, ld_relaxed_gpu_global_b32},
    shared::SharedAddress,
    thread,
};

use super::moe::Moe;
use crate::{
    decoding::{Decode, PANELS, Packed, Tile},
    mma_sync::moe_sm80::abi::{COPY_BYTES, Instance, TOKEN_COPIES},
    units::{K_BLOCK, SLAB_ROWS, UNIT_BYTES, UNIT_ROWS, block_columns, block_start, k_blocks, unit_bytes, unit_offset},
};

/// Elements of a token per copy.
const COPY_ELEMENTS: u32 = COPY_BYTES / 2;

/// Rows of tokens after which the permutation of pieces repeats.
const EXCHANGED_ROWS: u32 = 8;

/// Maximum number of token rows per stage from which one thread copies pieces.
const MAX_ROWS: usize = 4;

/// Offset of a row's piece in the tokens of a stage, in bytes.
#[inline(always)]
pub(super) const fn token_place(row: u32, piece: u32) -> u32 {
    (row * TOKEN_COPIES + (piece ^ (row % EXCHANGED_ROWS))) * COPY_BYTES
}

/// One thread's copies of a tile: their sources and the next k-block.
pub(super) struct Copies {
    /// Address of each panel's slab in the first k-block.
    panels: [GlobalAddress; PANELS],
    /// Units of each panel's slab. The units of one k-block lie together, followed by the units of the next k-block.
    slab_units: [u32; PANELS],
    /// Units before each panel in its slab.
    first_units: [u32; PANELS],
    /// Units of each panel that the matrix has.
    units: [u32; PANELS],
    /// Start of each of the thread's rows of tokens, in pieces from the first token; [`Self::NO_ROW`] for rows that the
    /// tile lacks.
    rows: [u32; MAX_ROWS],
    /// Sum of the sizes of one unit in each k-block before the next one, in bytes.
    before: u32,
    /// The next k-block.
    k_block: u32,
    /// The stage of the next k-block.
    stage: u32,
}

impl Copies {
    /// Stands for a row that the tile lacks.
    const NO_ROW: u32 = u32::MAX;

    /// The copies of a tile, with the first `stages - 1` k-blocks in flight. A tile without tokens has no copies.
    ///
    /// # Safety
    /// The contract in `moe_sm80/mod.rs` holds. All threads of the CTA make this call, and no thread still reads a
    /// stage.
    #[inline(always)]
    pub(super) unsafe fn of<const INDEX: usize, const BF16: bool, const P: usize>(
        kernel: &Moe<INDEX, BF16, P>,
        tile: &Tile,
    ) -> Self
    where
        Packed<BF16>: Decode,
    {
        let instance = Moe::<INDEX, BF16, P>::INSTANCE;
        let launch = &kernel.launch;
        let (n, k) = (launch.n, launch.k);
        let panel_rows = instance.shape().panel_rows();
        let row_of =
            |panel: usize| tile.first_column + if instance.matrices == 2 { 0 } else { panel as u32 * panel_rows };
        let slab_of = |panel: usize| row_of(panel) / SLAB_ROWS * (SLAB_ROWS / UNIT_ROWS);
        let units_from = |unit: u32, most: u32| (n / UNIT_ROWS).saturating_sub(unit).min(most);
        let expert = u64::from(tile.expert) * launch.expert_bytes;
        let first_piece = |row: u32| -> u32 {
            if row >= tile.tokens {
                return Self::NO_ROW;
            }
            let row = tile.first_row + row;
            let token = match launch.rows {
                0 => row,
                // SAFETY: the list has a number for every row.
                rows => unsafe { ld_relaxed_gpu_global_b32(GlobalAddress::new(rows) + u64::from(row) * 4) },
            };
            token * (k / COPY_ELEMENTS)
        };
        let mut this = Self {
            panels: [0, 1].map(|panel| {
                let matrix = launch.b[if instance.matrices == 2 { panel } else { 0 }];
                GlobalAddress::new(matrix) + expert + unit_offset(n, k, slab_of(panel), 0)
            }),
            slab_units: [0, 1].map(|panel| units_from(slab_of(panel), SLAB_ROWS / UNIT_ROWS)),
            first_units: [0, 1].map(|panel| row_of(panel) % SLAB_ROWS / UNIT_ROWS),
            units: [0, 1].map(|panel| units_from(row_of(panel) / UNIT_ROWS, instance.panel_units())),
            rows: [0, 1, 2, 3].map(|row| {
                if row < Self::rows_of(instance) {
                    first_piece(Self::first_row() + row * Self::row_step(instance))
                } else {
                    0
                }
            }),
            before: 0,
            k_block: 0,
            stage: 0,
        };
        if tile.tokens > 0 {
            for _ in 1..instance.stages {
                // SAFETY: no thread reads a stage, and the loop starts at most one k-block per stage.
                unsafe { this.begin_next(kernel) };
            }
        }
        this
    }

    /// Number of token rows per stage from which one thread copies pieces.
    const fn rows_of(instance: Instance) -> u32 {
        instance.tile_tokens * TOKEN_COPIES / instance.threads()
    }

    /// Distance between two rows from which one thread copies pieces.
    const fn row_step(instance: Instance) -> u32 {
        instance.threads() / TOKEN_COPIES
    }

    /// First row from which this thread copies pieces.
    #[inline(always)]
    fn first_row() -> u32 {
        thread::thread_idx_x() / TOKEN_COPIES
    }

    /// Starts the copy of the next k-block, if there is one, as a group of copies. A thread has one group per k-block,
    /// empty after the last k-block.
    ///
    /// # Safety
    /// The contract in `moe_sm80/mod.rs` holds. All threads of the CTA make this call, and no thread reads the next
    /// stage.
    #[inline(always)]
    pub(super) unsafe fn begin_next<const INDEX: usize, const BF16: bool, const P: usize>(
        &mut self,
        kernel: &Moe<INDEX, BF16, P>,
    ) where
        Packed<BF16>: Decode,
    {
        let instance = Moe::<INDEX, BF16, P>::INSTANCE;
        let k = kernel.launch.k;
        if self.k_block < k_blocks(k) {
            let (mut columns, mut start) = (K_BLOCK, self.k_block * K_BLOCK);
            if self.k_block >= k / K_BLOCK {
                (columns, start) = (block_columns(k, self.k_block), block_start(k, self.k_block));
            }
            let stage = kernel.stage(self.stage);
            // SAFETY: no thread reads the next stage. The k-block is one of the matrix, so the tokens and the panels'
            // units have it.
            unsafe {
                self.copy_tokens(instance, kernel.launch.tokens, stage, columns, start);
                self.copy_weights(instance, stage + instance.token_bytes(), unit_bytes(columns));
            }
            self.before += unit_bytes(columns);
            self.k_block += 1;
            self.stage = if self.stage + 1 == instance.stages { 0 } else { self.stage + 1 };
        }
        cp_async_commit_group();
    }

    /// Starts the thread's copies of the tokens' columns from `start` on.
    ///
    /// # Safety
    /// The requirements of [`Self::begin_next`]; the tokens go to the stage at address `stage`.
    #[inline(always)]
    unsafe fn copy_tokens(&self, instance: Instance, tokens: u64, stage: SharedAddress, columns: u32, start: u32) {
        let piece = thread::thread_idx_x() % TOKEN_COPIES;
        // All rows of a thread have the same remainder, so that their pieces are permuted in the same way.
        let target = stage + token_place(Self::first_row(), piece);
        let source = GlobalAddress::new(tokens) + u64::from(start / COPY_ELEMENTS + piece) * u64::from(COPY_BYTES);
        for row in 0..Self::rows_of(instance) {
            let first_piece = self.rows[row as usize];
            let is_there = first_piece != Self::NO_ROW && piece * COPY_ELEMENTS < columns;
            let source = source + if is_there { u64::from(first_piece) * u64::from(COPY_BYTES) } else { 0 };
            let target = target + row * Self::row_step(instance) * TOKEN_COPIES * COPY_BYTES;
            // SAFETY: no thread reads the stage; a row that does not exist is not read.
            unsafe { cp_async_16_or_zero(is_there, target, source) };
        }
    }

    /// Starts the thread's copies of both panels' units, with `unit_bytes` bytes per unit.
    ///
    /// # Safety
    /// The requirements of [`Self::begin_next`]; the weights go to address `stage`.
    #[inline(always)]
    unsafe fn copy_weights(&self, instance: Instance, stage: SharedAddress, unit_bytes: u32) {
        const MOST_PIECES: u32 = UNIT_BYTES / COPY_BYTES;
        let (unit_pieces, most) = (unit_bytes / COPY_BYTES, PANELS as u32 * instance.panel_units() * MOST_PIECES);
        let panel_pieces = instance.panel_units() * unit_pieces;
        let sources = [0, 1].map(|panel| {
            let before = self.slab_units[panel] * self.before + self.first_units[panel] * unit_bytes;
            self.panels[panel] + u64::from(before)
        });
        let present = self.units.map(|units| units * unit_pieces);
        for round in 0..most.div_ceil(instance.threads()) {
            let index = thread::thread_idx_x() + round * instance.threads();
            let is_second = index >= panel_pieces;
            let piece = if is_second { index - panel_pieces } else { index };
            let (source, present, panel) =
                if is_second { (sources[1], present[1], 1) } else { (sources[0], present[0], 0) };
            if piece < panel_pieces {
                let target = stage + (panel * instance.panel_units() * UNIT_BYTES + piece * COPY_BYTES);
                let source = source + u64::from(piece) * u64::from(COPY_BYTES);
                // SAFETY: no thread reads the stage; a unit that does not exist is not read.
                unsafe { cp_async_16_or_zero(piece < present, target, source) };
            }
        }
    }
}
