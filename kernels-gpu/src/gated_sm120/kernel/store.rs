//! The epilogue: sums → C. Each lane stores its own, two neighbouring columns at a time; a warp stores 32 bytes of a token.

use cuda_std::global::{GlobalAddress, st_global_b32};

use super::{
    Placed, Sm120, Work,
    multiply::{Multiplier, TileSums},
};
use crate::{
    epilogue::convert,
    gated_sm120::abi::{N_STEP, SLAB_ROWS, STRIP_ROWS, Tile},
};

/// Bytes of an element of C.
const ELEMENT_BYTES: u64 = 2;

impl<W: Work, const COLUMNS: usize> Multiplier<W, COLUMNS> {
    /// Scales, activates and writes the warp's elements of a tile of C.
    ///
    /// # Safety
    /// `sums` and `terms` are the tile's, whose group is `group`, and the contract holds of both. Whole warps call it.
    #[inline(always)]
    pub unsafe fn store(&self, tile: &Tile, group: &Placed, terms: &W::Terms, sums: &TileSums<COLUMNS>) {
        let (c, n, work) = (group.c, group.n, self.block.work);
        let gated = Sm120::<W, COLUMNS>::INSTANCE.matrices == 2;
        // Rows 2g and 2g + 1 of the strip.
        let column = tile.first_column + self.strip * STRIP_ROWS + self.lane / 4 * 2;
        unroll!(PART in 0 1, {
            // Gated sums are one element.
            let column = column + PART as u32 * SLAB_ROWS;
            let inside = column < n && (PART == 0 || !gated);
            unroll!(COLUMN in 0 1 2 3 4 5 6 7, {
                unroll!(ODD in 0 1, {
                    let token = self.first_token + COLUMN as u32 * N_STEP + self.lane % 4 * 2 + ODD as u32;
                    if COLUMN < COLUMNS && inside && token < tile.tokens {
                        let element = |row: usize| {
                            let place = [COLUMN % COLUMNS, row, ODD];
                            let sum = |slab: usize| sums[slab][COLUMN % COLUMNS][row * 2 + ODD];
                            if gated {
                                work.gated(group, terms, place, [sum(0), sum(1)])
                            } else {
                                work.plain(group, terms, PART, place, sum(PART))
                            }
                        };
                        let (first, second) = (element(0), element(1));
                        let (low, high) = if self.swapped() { (second, first) } else { (first, second) };
                        let row = u64::from(tile.first_token + token) * u64::from(n);
                        let address = GlobalAddress::new(c) + (row + u64::from(column)) * ELEMENT_BYTES;
                        // SAFETY: two elements of C that are this lane's alone; N and the column are even.
                        unsafe { st_global_b32(address, convert(work.output(), low, high)) };
                    }
                });
            });
        });
    }
}
