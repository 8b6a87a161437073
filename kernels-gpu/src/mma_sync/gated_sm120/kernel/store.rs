//! The epilogue: sums → C. Each lane stores its own elements, two neighboring columns at a time. A warp stores 32 bytes
//! of a token, which are one block in NVFP4.

use cuda_std::global::{GlobalAddress, st_global_b32};

use super::{
    multiply::{Multiplier, TileSums},
    sm120::Sm120,
    work::{Placed, Work},
};
use crate::{
    epilogue::convert,
    mma_sync::gated_sm120::abi::{N_STEP, SLAB_ROWS, SLABS, STRIP_ROWS, Tile},
    unroll::unroll,
};

/// Bytes of an element of C.
const ELEMENT_BYTES: u64 = 2;

/// Lowest and highest bit in which the numbers of the lanes that share a token differ.
const FIRST_LANES: u32 = 4;
const LAST_LANES: u32 = 16;

/// A lane's elements of C, as words of two neighbors. Indices: group of eight tokens, token of two, part of the lane's
/// columns (gated sums have one part).
type TileWords<const COLUMNS: usize> = [[[u32; 2]; 2]; COLUMNS];

impl<W: Work, const COLUMNS: usize> Multiplier<W, COLUMNS> {
    /// Scales, activates and writes the warp's elements of a tile of C.
    ///
    /// # Safety
    /// `sums` and `terms` belong to `tile`, whose group is `group`, and the contract holds for both. Whole warps make
    /// this call.
    #[inline(always)]
    pub unsafe fn store(&self, tile: &Tile, group: &Placed, terms: &W::Terms, sums: &TileSums<COLUMNS>) {
        // All words are computed before the first store, so that the registers of the sums are free.
        let (words, work) = (self.words(tile, group, terms, sums), self.block.work);
        // SAFETY: the caller guarantees that the tile is one of the work's and that `group` is its group.
        let quantized = unsafe { work.quantized(tile, group) };
        // Rows 2g and 2g + 1 of the strip.
        let first_column = tile.first_column + self.strip * STRIP_ROWS + self.lane / 4 * 2;
        unroll!(COLUMN in 0 1 2 3 4 5 6 7, {
            let eight = self.first_token + COLUMN as u32 * N_STEP;
            // The condition is the same for all lanes.
            if COLUMN < COLUMNS && eight < tile.tokens {
                unroll!(ODD in 0 1, {
                    let token = eight + self.lane % 4 * 2 + ODD as u32;
                    unroll!(PART in 0 1, {
                        if PART < Self::PARTS {
                            let column = first_column + PART as u32 * SLAB_ROWS;
                            let word = words[COLUMN % COLUMNS][ODD][PART];
                            // SAFETY: two elements of C that are this lane's alone; N and the column are even. Their
                            // block is the warp's.
                            unsafe {
                                if work.writes_bits16() && column < group.n && token < tile.tokens {
                                    let row = u64::from(tile.first_token + token) * u64::from(group.n);
                                    let at = GlobalAddress::new(group.c) + (row + u64::from(column)) * ELEMENT_BYTES;
                                    st_global_b32(at, word);
                                }
                                if quantized.is_there() {
                                    quantized.store::<FIRST_LANES, LAST_LANES, 1>([word], token, column);
                                }
                            }
                        }
                    });
                });
            }
        });
    }

    /// Number of parts of a lane's columns of C: one per slab, or one for gate and up together.
    const PARTS: usize = (SLABS / Sm120::<W, COLUMNS>::INSTANCE.matrices) as usize;

    /// Scales and activates a lane's sums of a tile.
    #[inline(always)]
    fn words(&self, tile: &Tile, group: &Placed, terms: &W::Terms, sums: &TileSums<COLUMNS>) -> TileWords<COLUMNS> {
        let (mut words, work) = ([[[0; 2]; 2]; COLUMNS], self.block.work);
        unroll!(COLUMN in 0 1 2 3 4 5 6 7, {
            if COLUMN < COLUMNS && self.first_token + COLUMN as u32 * N_STEP < tile.tokens {
                unroll!(ODD in 0 1, {
                    unroll!(PART in 0 1, {
                        if PART < Self::PARTS {
                            let element = |row: usize| {
                                let place = [COLUMN % COLUMNS, row, ODD];
                                let sum = |slab: usize| sums[slab][COLUMN % COLUMNS][row * 2 + ODD];
                                if Self::PARTS == 1 {
                                    work.gated(group, terms, place, [sum(0), sum(1)])
                                } else {
                                    work.plain(group, terms, PART, place, sum(PART))
                                }
                            };
                            let (first, second) = (element(0), element(1));
                            let (low, high) = if self.swapped() { (second, first) } else { (first, second) };
                            words[COLUMN % COLUMNS][ODD][PART] = convert(work.output(), low, high);
                        }
                    });
                });
            }
        });
        words
    }
}
