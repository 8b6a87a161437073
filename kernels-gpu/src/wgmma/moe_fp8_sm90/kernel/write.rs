//! The epilogue: a tile's sums, scaled, with their biases, activated → C.

// Loops over indices, not iterators: they unroll, so that arrays stay in registers.
#![allow(clippy::needless_range_loop)]

use cuda_std::{
    convert::{cvt_rn_bf16x2_f32, cvt_rn_f16x2_f32},
    float::fma_rn_f32,
    global::{GlobalAddress, ld_global_b32_or_zero, st_global_b32_where},
    integer::{opaque_b32, prmt_b32},
    shared::{SharedAddress, ld_shared_v2_b32},
    warp::{ALL_LANES, WARP_SIZE, lane_id, warp_shuffle_xor},
};

use super::Product;
use crate::{
    decoding::{BIAS_BYTES, CORE_MATRIX_ROWS, Fragment},
    epilogue::{Activation, NO_PARAMETERS, relu2, silu},
    format::OUTPUT_BF16,
    wgmma::moe_fp8_sm90::abi::Instance,
};

/// Bytes of an element of C.
const ELEMENT_BYTES: u64 = 2;

/// Tokens whose sums are in neighboring registers: those of a core matrix. A thread has two of them.
const STRIP_TOKENS: u32 = CORE_MATRIX_ROWS;

/// Registers of a strip.
const STRIP_REGISTERS: usize = 4;

/// What a sum lacks of its value: a decoded weight is an eighth of it.
const UNSCALE: f32 = 8.0;

/// The lanes that have the next column, or the one before.
const NEIGHBOUR: u32 = 4;

/// Straight-line code for each strip of the instance's tile, while a condition holds. An array stays in registers only if all its
/// indices are constants.
macro_rules! strips {
    ($strip:ident while $condition:expr => $body:block) => {
        strips!($strip while $condition => $body;
            0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31)
    };
    ($strip:ident while $condition:expr => $body:block; $($value:literal)*) => {
        'strips: {$({
            const $strip: usize = $value;
            if const { $value * STRIP_REGISTERS >= R } || !$condition {
                break 'strips;
            }
            $body
        })*}
    };
}

/// Where a tile's sums go, and what is done to them before.
pub(super) struct Target<const INDEX: usize, const R: usize> {
    /// Address of C `[.., n]`, row-major.
    pub c: u64,
    /// Columns of C.
    pub n: u32,
    /// C's type.
    pub output: u32,
    /// The scales of the tile's tokens.
    pub scales: SharedAddress,
    /// The factor of each matrix.
    pub alpha: [f32; 2],
    /// Address of a factor for each column of a plain C, which stands in for those; or 0.
    pub column_alpha: u64,
    /// Addresses of what is added, an f32 for each column of C, for each matrix of weights; 0 for nothing.
    pub bias: [u64; 2],
    /// What becomes of that.
    pub activation: Activation,
    /// The tile's first column.
    pub first_column: u32,
    /// The row of C of its first token.
    pub first_row: u32,
    /// Where the rows of a plain C end: those behind are not written.
    pub end_row: u32,
    /// The tile's tokens, a multiple of [`STRIP_TOKENS`].
    pub tokens: u32,
}

impl<const INDEX: usize, const R: usize> Target<INDEX, R> {
    const INSTANCE: Instance = Product::<INDEX, R>::INSTANCE;

    /// Whether a thread's two rows are one column of gate and up, and else neighboring columns.
    const ROW_OF_BOTH: bool = Product::<INDEX, R>::ROW_OF_BOTH;

    /// Scales, activates and writes a thread's elements of C.
    ///
    /// # Safety
    /// C, scales and biases lie there, and the tile is this warpgroup's, all of whose threads call it together. `sums` are the
    /// tile's, and `fragment` says which of them are this thread's.
    #[inline(always)]
    pub(super) unsafe fn write(&self, fragment: &Fragment, sums: [f32; R]) {
        let &Self { c, n, tokens, .. } = self;
        let [first, second] = fragment.rows;
        // Of a column of both matrices, two lanes exchange what they have of two tokens, and each has two columns of one.
        let is_odd = lane_id() & NEIGHBOUR != 0;
        let column = self.first_column + if Self::ROW_OF_BOTH { first & !1 } else { first.min(second) };
        // For `prmt`: the halves of a word, one for each row, in the order in which the rows lie in the panel.
        let in_order = if first <= second { 0x3210 } else { 0x1032 };
        let token = fragment.lane * 2;
        let own_row = self.first_row + token + if Self::ROW_OF_BOTH && is_odd { 1 } else { 0 };
        let row_bytes = u64::from(n) * ELEMENT_BYTES;
        let mut row = GlobalAddress::new(c) + (u64::from(own_row) * u64::from(n) + u64::from(column)) * ELEMENT_BYTES;
        // Columns of a tile may lie outside of C.
        let is_column = column < n;
        // SAFETY: numbers of columns that C has. The sum of anything and −0 is the former, its sign too.
        let biases = unsafe { self.of_rows(fragment, self.bias, [-0.0; 2]) };
        // SAFETY: as above.
        let alphas = unsafe { self.alphas(fragment) }.map(|alpha| alpha * UNSCALE);
        // Rows from the thread's first one on.
        let rows_left = self.end_row.saturating_sub(own_row);
        let convert = |low: f32, high: f32| {
            let (bf16, f16) = (cvt_rn_bf16x2_f32(low, high), cvt_rn_f16x2_f32(low, high));
            if self.output == OUTPUT_BF16 { bf16 } else { f16 }
        };
        macro_rules! write_strips {
            ($activate:expr) => {{
                let activate = $activate;
                strips!(STRIP while (STRIP as u32 * STRIP_TOKENS) < tokens => {
                    // SAFETY: scales of the strip's tokens; elements of C that are this thread's alone. N and the column are
                    // even. The whole warp is here.
                    unsafe {
                        let scales = ld_shared_v2_b32(self.scales + (STRIP as u32 * STRIP_TOKENS + token) * 4);
                        // A sum of a row for one of the two tokens.
                        let scaled = |odd: usize, of_row: usize| {
                            let sum = sums[STRIP * STRIP_REGISTERS + 2 * of_row + odd];
                            fma_rn_f32(f32::from_bits(scales[odd]) * alphas[of_row], sum, biases[of_row])
                        };
                        if Self::ROW_OF_BOTH {
                            let own = |odd: usize| activate(scaled(odd, 0), scaled(odd, 1));
                            let (even, odd) = (own(0), own(1));
                            let (given, kept) = if is_odd { (even, odd) } else { (odd, even) };
                            let (got, _) = warp_shuffle_xor(ALL_LANES, given.to_bits(), NEIGHBOUR, WARP_SIZE);
                            let got = f32::from_bits(got);
                            let elements = if is_odd { convert(got, kept) } else { convert(kept, got) };
                            st_global_b32_where(is_column, row, elements);
                        } else {
                            for odd in 0..2 {
                                if (STRIP as u32 * STRIP_TOKENS + odd as u32) < rows_left {
                                    let [first, second] = [0, 1].map(|of_row| activate(scaled(odd, of_row), 0.0));
                                    let elements = prmt_b32(convert(first, second), 0, in_order);
                                    st_global_b32_where(is_column, row + odd as u64 * row_bytes, elements);
                                }
                            }
                        }
                    }
                    row = row + STRIP_TOKENS as u64 * row_bytes;
                });
            }};
        }
        // All threads go one way. The compiler is not to make a loop of each: it would keep sums of both.
        let has_parameters = opaque_b32(self.activation.kind) != NO_PARAMETERS;
        match (Self::INSTANCE.matrices == 2, has_parameters) {
            (true, false) => write_strips!(|gate: f32, up: f32| silu(gate) * up),
            (true, true) => write_strips!(|gate: f32, up: f32| self.activation.gated(gate, up)),
            (false, false) => write_strips!(|sum: f32, _: f32| sum),
            (false, true) => write_strips!(|sum: f32, _: f32| relu2(sum)),
        }
    }

    /// The factors of a thread's two rows.
    ///
    /// # Safety
    /// As [`Self::of_rows`].
    #[inline(always)]
    unsafe fn alphas(&self, fragment: &Fragment) -> [f32; 2] {
        if Self::ROW_OF_BOTH {
            return self.alpha;
        }
        // SAFETY: `column_alpha` is 0, or the address of a list with a factor per column of C.
        unsafe { self.of_rows(fragment, [self.column_alpha; 2], self.alpha) }
    }

    /// A number for each of a thread's two rows: of lists for the columns of C that lie at these addresses, one for each matrix; where
    /// the address is 0, the other number.
    ///
    /// # Safety
    /// Lists lie there.
    #[inline(always)]
    unsafe fn of_rows(&self, fragment: &Fragment, lists: [u64; 2], otherwise: [f32; 2]) -> [f32; 2] {
        [0, 1].map(|row: usize| {
            let matrix = if Self::ROW_OF_BOTH { row } else { 0 };
            let column = self.first_column + fragment.rows[row];
            let is_there = lists[matrix] != 0 && column < self.n;
            let address = GlobalAddress::new(lists[matrix]) + u64::from(column) * BIAS_BYTES;
            // SAFETY: if `is_there`, the list has a number for this column; otherwise nothing is read.
            let bits = unsafe { ld_global_b32_or_zero(is_there, address) };
            if is_there { f32::from_bits(bits) } else { otherwise[matrix] }
        })
    }
}
