//! Epilogue: scales a tile's sums, adds biases, activates, and writes C.

// Loops run over indices instead of iterators, so that they unroll and arrays stay in registers.
#![allow(clippy::needless_range_loop)]

use cuda_std::{
    convert::{cvt_rn_bf16x2_f32, cvt_rn_f16x2_f32},
    float::fma_rn_f32,
    global::{GlobalAddress, ld_global_b32_or_zero, st_global_b32_where},
    integer::{opaque_b32, prmt_b32},
    shared::{SharedAddress, ld_shared_v2_b32},
    warp::{ALL_LANES, WARP_SIZE, lane_id, warp_shuffle_xor},
};

use super::product::Product;
use crate::{
    curve::with_curve,
    decoding::{BIAS_BYTES, CORE_MATRIX_ROWS, Fragment},
    epilogue::{Activation, NO_PARAMETERS, relu2, silu},
    format::OUTPUT_BF16,
    wgmma::moe_fp8_sm90::abi::Instance,
};

/// Bytes per element of C.
const ELEMENT_BYTES: u64 = 2;

/// Number of tokens whose sums are in neighboring registers: the tokens of a core matrix. A thread has two of them.
const STRIP_TOKENS: u32 = CORE_MATRIX_ROWS;

/// Registers per strip.
const STRIP_REGISTERS: usize = 4;

/// Factor that undoes the scaling of the decoded weights, which are divided by 8.
const UNSCALE: f32 = 8.0;

/// Distance of lanes with neighboring columns.
const NEIGHBOUR: u32 = 4;

/// Emits straight-line code for each strip of the instance's tile, while a condition holds. An array stays in registers
/// only if all its indices are constants.
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

/// Destination of a tile's sums, and the operations on them.
pub(super) struct Target<const INDEX: usize, const R: usize> {
    /// Address of C `[.., n]`, row-major.
    pub c: u64,
    /// Number of columns of C.
    pub n: u32,
    /// Type of C.
    pub output: u32,
    /// Address of the scales of the tile's tokens.
    pub scales: SharedAddress,
    /// Factor of each matrix.
    pub alpha: [f32; 2],
    /// Address of one factor per column of a plain C, which replaces `alpha`; 0 for none.
    pub column_alpha: u64,
    /// Addresses of the biases, one f32 per column of C, for each matrix of weights; 0 for no bias.
    pub bias: [u64; 2],
    /// Activation of the scaled sums.
    pub activation: Activation,
    /// First column of the tile.
    pub first_column: u32,
    /// Row of C of the tile's first token.
    pub first_row: u32,
    /// End of the rows of a plain C. Rows at or after it are not written.
    pub end_row: u32,
    /// Number of tokens of the tile, a multiple of [`STRIP_TOKENS`].
    pub tokens: u32,
}

impl<const INDEX: usize, const R: usize> Target<INDEX, R> {
    const INSTANCE: Instance = Product::<INDEX, R>::INSTANCE;

    /// `true`: a thread has the same column of gate and of up. `false`: it has two neighboring columns.
    const ROW_OF_BOTH: bool = Product::<INDEX, R>::ROW_OF_BOTH;

    /// Scales, activates and writes a thread's elements of C.
    ///
    /// # Safety
    /// `c`, `scales`, `column_alpha` and `bias` are valid for the tile's rows and columns. Only this warpgroup has the
    /// tile, and all its threads call this together. `sums` are the tile's sums, and `fragment` defines this thread's
    /// share of them.
    #[inline(always)]
    pub(super) unsafe fn write(&self, fragment: &Fragment, sums: [f32; R]) {
        let &Self { c, n, tokens, .. } = self;
        let [first, second] = fragment.rows;
        // If a thread has a column of both matrices, two lanes exchange elements of two tokens, and each lane then has
        // two columns of one token.
        let is_odd = lane_id() & NEIGHBOUR != 0;
        let column = self.first_column + if Self::ROW_OF_BOTH { first & !1 } else { first.min(second) };
        // Selector for `prmt`: the halves of a word, one per row, in the order of the rows in the panel.
        let in_order = if first <= second { 0x3210 } else { 0x1032 };
        let token = fragment.lane * 2;
        let own_row = self.first_row + token + if Self::ROW_OF_BOTH && is_odd { 1 } else { 0 };
        let row_bytes = u64::from(n) * ELEMENT_BYTES;
        let mut row = GlobalAddress::new(c) + (u64::from(own_row) * u64::from(n) + u64::from(column)) * ELEMENT_BYTES;
        // Columns of a tile may lie outside of C.
        let is_column = column < n;
        // SAFETY: the addresses in `bias` are 0, or of lists with one number per column of C. The sum of a number and
        // −0 is the number with its sign.
        let biases = unsafe { self.of_rows(fragment, self.bias, [-0.0; 2]) };
        // SAFETY: `column_alpha` is 0, or the address of a list with one number per column of C.
        let alphas = unsafe { self.alphas(fragment) }.map(|alpha| alpha * UNSCALE);
        // Number of rows from the thread's first row on.
        let rows_left = self.end_row.saturating_sub(own_row);
        let convert = |low: f32, high: f32| {
            let (bf16, f16) = (cvt_rn_bf16x2_f32(low, high), cvt_rn_f16x2_f32(low, high));
            if self.output == OUTPUT_BF16 { bf16 } else { f16 }
        };
        // Writes strip `strip`, whose sums are the registers from `first` on.
        macro_rules! write_strip {
            ($activate:ident, $sums:ident, $strip:expr, $first:expr) => {{
                // SAFETY: the scales belong to the strip's tokens, and only this thread writes these elements of C.
                // N and the column are even. The whole warp is here.
                unsafe {
                    let scales = ld_shared_v2_b32(self.scales + ($strip * STRIP_TOKENS + token) * 4);
                    // Scaled sum of row `of_row` for one of the two tokens.
                    let scaled = |odd: usize, of_row: usize| {
                        let sum = $sums[$first + 2 * of_row + odd];
                        fma_rn_f32(f32::from_bits(scales[odd]) * alphas[of_row], sum, biases[of_row])
                    };
                    if Self::ROW_OF_BOTH {
                        let own = |odd: usize| $activate(scaled(odd, 0), scaled(odd, 1));
                        let (even, odd) = (own(0), own(1));
                        let (given, kept) = if is_odd { (even, odd) } else { (odd, even) };
                        let (got, _) = warp_shuffle_xor(ALL_LANES, given.to_bits(), NEIGHBOUR, WARP_SIZE);
                        let got = f32::from_bits(got);
                        let elements = if is_odd { convert(got, kept) } else { convert(kept, got) };
                        st_global_b32_where(is_column, row, elements);
                    } else {
                        for odd in 0..2 {
                            if ($strip * STRIP_TOKENS + odd as u32) < rows_left {
                                let [first, second] = [0, 1].map(|of_row| $activate(scaled(odd, of_row), 0.0));
                                let elements = prmt_b32(convert(first, second), 0, in_order);
                                st_global_b32_where(is_column, row + odd as u64 * row_bytes, elements);
                            }
                        }
                    }
                }
                // Nothing reads the address behind the last strip.
                #[allow(unused_assignments)]
                {
                    row = row + STRIP_TOKENS as u64 * row_bytes;
                }
            }};
        }
        macro_rules! write_strips {
            ($activate:expr) => {{
                let activate = $activate;
                strips!(STRIP while (STRIP as u32 * STRIP_TOKENS) < tokens => {
                    write_strip!(activate, sums, STRIP as u32, STRIP * STRIP_REGISTERS)
                });
            }};
        }
        if Self::INSTANCE.curves {
            // The code of every curve for every strip would be too long, so a strip's sums move to the first registers.
            let (mut sums, mut strip) = (sums, 0);
            while strip * STRIP_TOKENS < tokens {
                with_curve!(&self.activation, |curve| write_strip!(curve, sums, strip, 0));
                sums = core::array::from_fn(|register| sums[(register + STRIP_REGISTERS).min(R - 1)]);
                strip += 1;
            }
            return;
        }
        // All threads follow the same path. The opaque value keeps the compiler from merging the variants in a loop
        // that would hold the sums of both.
        let has_parameters = opaque_b32(self.activation.kind) != NO_PARAMETERS;
        match (Self::INSTANCE.matrices == 2, has_parameters) {
            (true, false) => write_strips!(|gate: f32, up: f32| silu(gate) * up),
            (true, true) => write_strips!(|gate: f32, up: f32| self.activation.gated(gate, up)),
            (false, false) => write_strips!(|sum: f32, _: f32| sum),
            (false, true) => write_strips!(|sum: f32, _: f32| relu2(sum)),
        }
    }

    /// Returns the factors of a thread's two rows.
    ///
    /// # Safety
    /// `column_alpha` is 0, or the address of a list with one factor per column of C.
    #[inline(always)]
    unsafe fn alphas(&self, fragment: &Fragment) -> [f32; 2] {
        if Self::ROW_OF_BOTH {
            return self.alpha;
        }
        // SAFETY: `column_alpha` is 0, or the address of a list with a factor per column of C.
        unsafe { self.of_rows(fragment, [self.column_alpha; 2], self.alpha) }
    }

    /// Returns one number per row of a thread: for each matrix, `lists` has the address of a list with one number per
    /// column of C, or 0 for the number in `otherwise`.
    ///
    /// # Safety
    /// Each address in `lists` is 0, or valid for one f32 per column of C.
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
