//! The epilogue: a tile's sums → scaled, with biases, activated → C.

// Loops go over indices, not iterators: they unroll, so that the arrays stay in registers.
#![allow(clippy::needless_range_loop)]

use core::marker::PhantomData;

use bytemuck::Zeroable;
use cuda_std::{
    float::fma_rn_f32,
    global::{GlobalAddress, ld_global_b32_or_zero, st_global_b16_where, st_global_b32_where},
    integer::{opaque_b32, prmt_b32},
};

use super::{CORE_MATRIX_ROWS, Fragment, Shape, WARPGROUP, WARPGROUP_ROWS};
use crate::{
    curve::with_curve,
    epilogue::{Activation, NO_PARAMETERS, convert, relu2, silu},
    sorted::{LINE_BYTES, bits16_place},
    unroll::unroll,
};

/// Accumulators per thread for one panel of a product with this N.
pub const fn registers(n: usize) -> usize {
    WARPGROUP_ROWS as usize * n / WARPGROUP as usize
}

/// Runs a block for the even and for the odd token. LLVM does not unroll a loop with the code of a curve, and without a
/// constant index the sums would lie in local memory.
macro_rules! both_tokens {
    ($odd:ident, $curves:expr, $body:block) => {
        if $curves {
            unroll!(ODD in 0 1, {
                let $odd = ODD;
                $body
            });
        } else {
            for $odd in 0..2 $body
        }
    };
}

/// Tokens per round. The same instructions write all rounds to C.
const ROUND_TOKENS: usize = 32;

/// Tokens of a core matrix. A thread has two neighboring tokens of each core matrix in its accumulators.
const CORE_TOKENS: usize = CORE_MATRIX_ROWS as usize;
const _: () =
    assert!(ROUND_TOKENS == 4 * CORE_TOKENS, "`write_placed` has one copy of its code per core matrix of a round");

/// Accumulators per thread for one core matrix of one panel.
const CORE_REGISTERS: usize = registers(CORE_TOKENS);

/// Accumulators per thread for one panel of a round.
const ROUND_REGISTERS: usize = registers(ROUND_TOKENS);

/// The sums of a thread's parts of a tile, round by round; [`Shape::rounds`] is their number. After the tile's last
/// token they may have any value.
pub type Sums<const P: usize, const ROUNDS: usize = 4> = [[[f32; ROUND_REGISTERS]; ROUNDS]; P];

/// A product's sums, padded to the size for the largest tile.
#[inline(always)]
pub fn pad<const REGISTERS: usize, const P: usize, const ROUNDS: usize>(
    sums: &[[f32; REGISTERS]; P],
) -> Sums<P, ROUNDS> {
    let mut padded: Sums<P, ROUNDS> = Zeroable::zeroed();
    for part in 0..P {
        padded[part].as_flattened_mut()[..REGISTERS].copy_from_slice(&sums[part]);
    }
    padded
}

/// Bytes of an element of C.
const ELEMENT_BYTES: u64 = 2;

/// Bytes of a bias, and of an α.
pub const BIAS_BYTES: u64 = 4;

/// Products of the global scales. A kernel knows at compile time which variant it has.
pub enum Alpha {
    /// One α per matrix of weights.
    OfMatrices([f32; 2]),
    /// Address of one α per column of C, f32.
    OfColumns(u64),
}

/// Layout of C in memory.
#[derive(Clone, Copy)]
pub enum Placing {
    /// Row-major, rows without gaps.
    Rows,
    /// The layout of [`sorted`](crate::sorted).
    Sorted {
        /// Capacity in rows of the sorted 16-bit tokens.
        rows: u32,
    },
}

/// Properties of a kernel that the epilogue needs. The kernel's threads have `P` parts of a tile's panels.
pub trait Written<const P: usize> {
    /// Shape for which the code is compiled.
    const SHAPE: Shape;
    /// Factor that undoes the scaling of the decoded operands.
    const UNSCALE: f32;
    /// `true` if a launch selects the activation, `false` if its activation never has parameters.
    const ANY_ACTIVATION: bool;
    /// `true` if the activation of a gated product is a [`Curve`](crate::curve::Curve).
    const CURVES: bool = false;
}

/// Destination of a tile's sums, and their conversion.
pub struct Target<K> {
    /// Address of C `[.., n]`.
    pub c: u64,
    /// Columns of C.
    pub n: u32,
    /// Factors of the sums.
    pub alpha: Alpha,
    /// Per matrix of weights, the address of the biases, one f32 per column of C, which are added to the scaled sums; 0
    /// for no biases.
    pub bias: [u64; 2],
    /// Activation of the biased sums.
    pub activation: Activation,
    /// The tile's first column.
    pub first_column: u32,
    /// Row of C of the tile's first token.
    pub first_row: u32,
    /// Number of the tile's tokens.
    pub tokens: u32,
    /// The kernel that computes the sums.
    pub kind: PhantomData<K>,
}

impl<K> Target<K> {
    /// Like [`Self::write_placed`], with rows without gaps.
    ///
    /// # Safety
    /// The requirements of [`Self::write_placed`].
    #[inline(always)]
    pub unsafe fn write<const P: usize, const ROUNDS: usize>(
        &self,
        output: u32,
        fragment: &Fragment,
        sums: Sums<P, ROUNDS>,
    ) where
        K: Written<P>,
    {
        // SAFETY: the caller guarantees C and biases at their addresses, and a tile with sums that only this warpgroup
        // has. `Rows` places rows without gaps.
        unsafe { self.write_placed(output, Placing::Rows, fragment, sums) }
    }

    /// Scales, activates and writes a thread's elements of C, in the format `output`, a constant. The thread has the
    /// same rows of weights in each panel; in a narrow tile it has the rows of [`Fragment::narrow`].
    ///
    /// These instructions run once per tile, after so many other instructions that the instruction cache no longer has
    /// them. So there are few of them: the same instructions for every N and every round, for SiLU or for another
    /// activation.
    ///
    /// # Safety
    /// C and biases are valid for the tile at their addresses. Only this warpgroup has the tile. `sums` are the tile's
    /// sums, and `fragment` defines this thread's share of them.
    #[inline(always)]
    pub unsafe fn write_placed<const P: usize, const ROUNDS: usize>(
        &self,
        output: u32,
        placing: Placing,
        fragment: &Fragment,
        mut sums: Sums<P, ROUNDS>,
    ) where
        K: Written<P>,
    {
        let &Self { c, n, .. } = self;
        let [first, second] = fragment.rows;
        let column = self.first_column + first.min(second);
        // For `prmt`: the halves of a word, one per row, in the order of the rows in the panel.
        let in_order = if first < second { 0x3210 } else { 0x1032 };
        let mut token = fragment.lane * 2;
        let row_bytes = u64::from(n) * ELEMENT_BYTES;
        let element = u64::from(self.first_row + token) * u64::from(n) + u64::from(column);
        // Addresses of this thread's even token and of its odd token, which is the next one; per token, the distance in
        // bytes to the element of the second part; and the distance in bytes to the token eight tokens further on.
        let even = GlobalAddress::new(c) + element * ELEMENT_BYTES;
        let mut rows = [even, even + row_bytes];
        let mut second_part = [u64::from(K::SHAPE.panel_rows()) * ELEMENT_BYTES; 2];
        let mut core_bytes = CORE_TOKENS as u64 * row_bytes;
        if let Placing::Sorted { rows: capacity } = placing {
            let place = |odd: u32, column| bits16_place(capacity, n, self.first_row + token + odd, column);
            let places = [0, 1].map(|odd| place(odd, column));
            rows = places.map(|place| GlobalAddress::new(c) + place);
            if K::SHAPE.matrices == 1 && P == 2 {
                second_part = [0, 1].map(|odd| place(odd as u32, column + K::SHAPE.panel_rows()) - places[odd]);
            }
            core_bytes = CORE_TOKENS as u64 * u64::from(LINE_BYTES);
        }
        // Whether C has the columns of each part. They may lie outside of C, because N may be as small as 8.
        let parts: [bool; P] = core::array::from_fn(|part| column + part as u32 * K::SHAPE.panel_rows() < n);
        if !parts[0] {
            return;
        }
        // SAFETY: the loads read biases and factors only of columns that C has.
        let (biases, of_columns) = unsafe { (self.biases::<P>(fragment), self.alphas::<P>(fragment)) };
        let of_matrices = match self.alpha {
            Alpha::OfMatrices(alpha) => alpha.map(|alpha| K::UNSCALE * alpha),
            Alpha::OfColumns(_) => [0.0; 2],
        };
        let alpha = |matrix: usize, part: usize, row: usize| match self.alpha {
            Alpha::OfMatrices(_) => of_matrices[matrix],
            Alpha::OfColumns(_) => of_columns[part][row],
        };
        while token < self.tokens {
            let round = sums.map(|part| part[0]);
            // `activate` takes the scaled sums of gate and up, or of one element and 0.
            macro_rules! write_round {
                ($activate:expr) => {{
                    let activate = $activate;
                    unroll!(CORE in 0 1 2 3, {
                        both_tokens!(odd, K::CURVES, {
                            let in_round = CORE * CORE_TOKENS + odd;
                            let present = const { K::SHAPE.tile_tokens > (CORE * CORE_TOKENS) as u32 }
                                && token + (in_round as u32) < self.tokens;
                            let (first, second) = (CORE * CORE_REGISTERS + odd, CORE * CORE_REGISTERS + 2 + odd);
                            // Predicated, because with branches each element would wait for the element before it.
                            // SAFETY: two elements of C that are this thread's alone; N and the column are even.
                            let store = |present: bool, address: GlobalAddress, first: f32, second: f32| unsafe {
                                let elements = prmt_b32(convert(output, first, second), 0, in_order);
                                st_global_b32_where(present, address, elements);
                            };
                            // The sum of a part's row for this matrix, times alpha and with its bias.
                            let scaled = |matrix: usize, part: usize, row: usize| {
                                fma_rn_f32(alpha(matrix, part, row), round[part][[first, second][row]], biases[part][row])
                            };
                            if K::SHAPE.matrices == 2 && P == 2 {
                                let gated = |row: usize| activate(scaled(0, 0, row), scaled(1, 1, row));
                                store(present, rows[odd], gated(0), gated(1));
                            } else if K::SHAPE.matrices == 2 {
                                // The first row is gate's, the second is up's.
                                let gated = activate(scaled(0, 0, 0), scaled(1, 0, 1));
                                // SAFETY: an element of C that is this thread's alone.
                                unsafe { st_global_b16_where(present, rows[odd], convert(output, gated, 0.0) as u16) };
                            } else {
                                for part in 0..P {
                                    let address = rows[odd] + part as u64 * second_part[odd];
                                    let sum = |row: usize| activate(scaled(0, part, row), 0.0);
                                    store(present && parts[part], address, sum(0), sum(1));
                                }
                            }
                            rows[odd] = rows[odd] + core_bytes;
                        });
                    });
                }};
            }
            // All threads take the same branch. The opaque read keeps the compiler from making one loop per branch,
            // which would need registers for the sums of both.
            let has_parameters = K::ANY_ACTIVATION && opaque_b32(self.activation.kind) != NO_PARAMETERS;
            match (K::SHAPE.matrices == 2, has_parameters, K::CURVES) {
                (true, false, _) => write_round!(|gate: f32, up: f32| silu(gate) * up),
                (true, true, false) => write_round!(|gate: f32, up: f32| self.activation.gated(gate, up)),
                (true, true, true) => with_curve!(&self.activation, |curve| write_round!(curve)),
                (false, false, _) => write_round!(|sum: f32, _: f32| sum),
                (false, true, _) => write_round!(|sum: f32, _: f32| relu2(sum)),
            }
            token += ROUND_TOKENS as u32;
            sums = sums.map(|rounds| core::array::from_fn(|round| rounds[(round + 1).min(ROUNDS - 1)]));
        }
    }

    /// The factors of the sums of a thread's two rows of each part, if each column has its own α.
    ///
    /// # Safety
    /// If [`Self::alpha`] is [`Alpha::OfColumns`], its address has one f32 per column of C.
    #[inline(always)]
    unsafe fn alphas<const P: usize>(&self, fragment: &Fragment) -> [[f32; 2]; P]
    where
        K: Written<P>,
    {
        let mut alphas = [[0.0; 2]; P];
        let Alpha::OfColumns(first) = self.alpha else { return alphas };
        for part in 0..P {
            for row in 0..2 {
                let column = self.first_column + fragment.rows[row] + part as u32 * K::SHAPE.panel_rows();
                let address = GlobalAddress::new(first) + u64::from(column) * BIAS_BYTES;
                // SAFETY: the address is in the list of global scales if the column is below N; otherwise nothing is
                // read.
                let bits = unsafe { ld_global_b32_or_zero(column < self.n, address) };
                alphas[part][row] = K::UNSCALE * f32::from_bits(bits);
            }
        }
        alphas
    }

    /// The biases of a thread's two rows of each part. A missing bias is −0, which keeps the sum and its sign.
    ///
    /// # Safety
    /// Each address in [`Self::bias`] that is not 0 has one f32 per column of C.
    #[inline(always)]
    unsafe fn biases<const P: usize>(&self, fragment: &Fragment) -> [[f32; 2]; P]
    where
        K: Written<P>,
    {
        let bias = |matrix: usize, column: u32| {
            let is_there = self.bias[matrix] != 0 && column < self.n;
            let address = GlobalAddress::new(self.bias[matrix]) + u64::from(column) * BIAS_BYTES;
            // SAFETY: the address is in the list of biases if `is_there`; otherwise nothing is read.
            let bits = unsafe { ld_global_b32_or_zero(is_there, address) };
            if is_there { f32::from_bits(bits) } else { -0.0 }
        };
        let mut biases = [[-0.0; 2]; P];
        for part in 0..P {
            for row in 0..2 {
                let column = self.first_column + fragment.rows[row];
                biases[part][row] = match (K::SHAPE.matrices, P) {
                    (2, 2) => bias(part, column),
                    // The first row is gate's, the second is up's.
                    (2, _) => bias(row, column),
                    _ => bias(0, column + part as u32 * K::SHAPE.panel_rows()),
                };
            }
        }
        biases
    }
}
