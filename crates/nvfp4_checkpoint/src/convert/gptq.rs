//! GPTQ with the scales of NVFP4: rounds the numbers of a row in turn, and lets each number make up for the errors of the
//! numbers before it, so that the row's product with recorded tokens changes least.
//!
//! Let H = XᵀX + λ for tokens X `[T, K]`, and H = RRᵀ with R upper triangular. A row w that becomes q changes its products
//! by ‖Rᵀ(w − q)‖². Element i of Rᵀ(w − q) depends on the numbers up to i alone, so q is chosen from left to right: number
//! i is rounded from w_i + Σ_{j<i} R_ji (w_j − q_j) / R_ii. These are the decisions of GPTQ (Frantar et al., "GPTQ: Accurate
//! Post-Training Quantization for Generative Pre-trained Transformers", algorithm 1, columns in their order), which
//! computes them from a Cholesky factor of H⁻¹ = R⁻ᵀR⁻¹; Chen et al., "The Geometry of LLM Quantization: GPTQ as Babai's
//! Nearest Plane Algorithm", show that both are the same.
//!
//! The scale of a block is chosen when its first number's turn comes, for the numbers that are best for its earlier errors
//! and before rounding.

use gemm_common::Parallelism;
use rayon::prelude::*;

use nvfp4_core::Error;
use nvfp4_core::format::{BLOCK, e2m1, e4m3};
use nvfp4_core::quantize::{Loss, Scales, quantize_blocks_by};

/// λ as a part of the mean of H's diagonal: GPTQ's usual damping.
const DAMPING: f64 = 0.01;

/// Columns of the Cholesky factor that are computed together.
const PANEL: usize = 64;

/// XᵀX of tokens `[T, K]`, with the columns in reverse order: row-major `[K, K]`, 8·K² bytes.
pub(super) struct Hessian {
    k: usize,
    sums: Vec<f64>,
}

impl Hessian {
    /// Makes the sums over no tokens.
    pub(super) fn new(k: usize) -> Self {
        Self { k, sums: vec![0.0; k * k] }
    }

    /// Adds tokens `[.., K]`.
    pub(super) fn add(&mut self, tokens: &[f64]) {
        let k = self.k;
        let count = tokens.len() / k;
        // Element (a, t) of the left factor is column k - 1 - a of token t.
        let [lhs, rhs] =
            [View { first: k - 1, row: -1, column: k as isize }, View { first: k - 1, row: k as isize, column: -1 }];
        let all = View { first: 0, row: k as isize, column: 1 };
        add_product([k, k, count], 1.0, (tokens, lhs), (tokens, rhs), &mut self.sums, all, Parallelism::Rayon(0));
    }

    /// Returns R of the damped sums.
    ///
    /// # Errors
    /// Returns an error if all tokens are zero, or the sums overflow.
    pub(super) fn factor(mut self) -> Result<Factor, Error> {
        let (k, sums) = (self.k, &mut self.sums);
        let mean = (0..k).map(|i| sums[i * k + i]).sum::<f64>() / k as f64;
        if mean == 0.0 {
            return Err(Error::Invalid("all activations are 0; record the activations again".into()));
        }
        (0..k).for_each(|i| sums[i * k + i] += DAMPING * mean);
        for first in (0..k).step_by(PANEL) {
            let end = (first + PANEL).min(k);
            let width = end - first;
            for row in first..end {
                let (done, rest) = sums.split_at_mut(row * k);
                solve(&mut rest[first..=row], |column| &done[(first + column) * k + first..], row - first);
                let line = &mut rest[first..=row];
                let (before, diagonal) = line.split_at_mut(row - first);
                let square = diagonal[0] - before.iter().map(|x| x * x).sum::<f64>();
                if !(square > 0.0 && square.is_finite()) {
                    return Err(Error::Invalid(
                        "the products of the activations are not finite; record smaller ones".into(),
                    ));
                }
                diagonal[0] = square.sqrt();
            }
            let (done, below) = sums.split_at_mut(end * k);
            below.par_chunks_mut(k).for_each(|row| {
                solve(&mut row[first..end], |column| &done[(first + column) * k + first..], width);
            });
            let panel: Vec<f64> = below.chunks(k).flat_map(|row| &row[first..end]).copied().collect();
            let lines = k - end;
            let lhs = View { first: 0, row: width as isize, column: 1 };
            let rhs = View { first: 0, row: 1, column: width as isize };
            let trailing = View { first: end, row: k as isize, column: 1 };
            let threads = Parallelism::Rayon(0);
            add_product([lines, lines, width], -1.0, (&panel, lhs), (&panel, rhs), below, trailing, threads);
        }
        Ok(Factor { k, lower: self.sums })
    }
}

/// Replaces the first `count` numbers x of a line by y with y·Lᵀ = x. `line_of(c)` begins with the first c + 1 elements of
/// row c of L.
fn solve<'l>(line: &mut [f64], line_of: impl Fn(usize) -> &'l [f64], count: usize) {
    for column in 0..count {
        let of_factor = line_of(column);
        let sum: f64 = line[..column].iter().zip(of_factor).map(|(x, l)| x * l).sum();
        line[column] = (line[column] - sum) / of_factor[column];
    }
}

/// R, as the Cholesky factor of the reversed sums: lower triangular, row-major `[K, K]`. Above the diagonal lie other
/// numbers.
pub(super) struct Factor {
    k: usize,
    lower: Vec<f64>,
}

impl Factor {
    /// Returns R_ji, for j ≤ i.
    fn at(&self, j: usize, i: usize) -> f64 {
        let k = self.k;
        self.lower[(k - 1 - j) * k + (k - 1 - i)]
    }

    /// Quantizes rows `[.., K]` to packed values and scales, which have the sizes of
    /// [`nvfp4_core::quantize::quantize_blocks`].
    ///
    /// # Errors
    /// [`Error::NotFinite`] with the index of a number.
    pub(super) fn quantize(
        &self,
        rule: Scales,
        numbers: &[f32],
        global: f32,
        values: &mut [u8],
        scales: &mut [u8],
    ) -> Result<Loss, Error> {
        let k = self.k;
        let rows = numbers.len() / k;
        let mut replaced = vec![0.0; numbers.len()];
        // `errors` is w − q, `[K, rows]`. `sums` has the weighted sums of one block, `[16, rows]`.
        let (mut errors, mut sums) = (vec![0.0; k * rows], vec![0.0; BLOCK * rows]);
        for first in (0..k).step_by(BLOCK) {
            let of_block = Corner {
                rows: std::array::from_fn(|i| {
                    std::array::from_fn(|j| if j <= i { self.at(first + j, first + i) } else { 0.0 })
                }),
            };
            sums.fill(0.0);
            // Element (i, j) is R_ji for i in the block.
            let lhs = View { first: (k - 1) * k + k - 1 - first, row: -1, column: -(k as isize) };
            let dense = View { first: 0, row: rows as isize, column: 1 };
            add_product(
                [BLOCK, rows, first],
                1.0,
                (&self.lower, lhs),
                (&errors, dense),
                &mut sums,
                dense,
                Parallelism::None,
            );
            for row in 0..rows {
                let here = row * k + first..row * k + first + BLOCK;
                let block: [f64; BLOCK] = std::array::from_fn(|i| f64::from(numbers[here.start + i]));
                let before = std::array::from_fn(|i| sums[i * rows + row]);
                let scale = &mut scales[here.start / BLOCK..here.end / BLOCK];
                let values = &mut values[here.start / 2..here.end / 2];
                let best = of_block.best(&block, &before).map(|number| number as f32);
                quantize_blocks_by(rule, &best, global, values, scale).map_err(|error| error.further_on(here.start))?;
                let unit = e4m3::decode(scale[0]) * global;
                let codes = of_block.round(&block, &before, unit);
                for (i, code) in codes.into_iter().enumerate() {
                    let number = e2m1::decode(code) * unit;
                    replaced[here.start + i] = number;
                    errors[(first + i) * rows + row] = block[i] - f64::from(number);
                }
                let pairs = codes.as_chunks::<2>().0;
                values.iter_mut().zip(pairs).for_each(|(value, [low, high])| *value = low | high << 4);
            }
        }
        Ok(Loss::between(numbers, &replaced))
    }
}

/// R_ji of a block: element i of `rows` has the numbers for j ≤ i.
struct Corner {
    rows: [[f64; BLOCK]; BLOCK],
}

impl Corner {
    /// Returns the numbers of a block that are best for earlier errors, before they are rounded. `before`: sums of R_ji times
    /// the error of number j, over all numbers before the block.
    fn best(&self, block: &[f64; BLOCK], before: &[f64; BLOCK]) -> [f64; BLOCK] {
        let mut errors = [0.0; BLOCK];
        for i in 0..BLOCK {
            errors[i] = -self.sum(i, &errors, before) / self.rows[i][i];
        }
        std::array::from_fn(|i| block[i] - errors[i])
    }

    /// Rounds the numbers of a block in turn; returns their codes. `unit`: product of both scales.
    fn round(&self, block: &[f64; BLOCK], before: &[f64; BLOCK], unit: f32) -> [u8; BLOCK] {
        let (mut errors, mut codes) = ([0.0; BLOCK], [0; BLOCK]);
        for i in 0..BLOCK {
            let wanted = block[i] + self.sum(i, &errors, before) / self.rows[i][i];
            // The addition turns −0 into 0, as in rounding to nearest.
            codes[i] = e2m1::encode(wanted as f32 / unit + 0.0);
            errors[i] = block[i] - f64::from(e2m1::decode(codes[i]) * unit);
        }
        codes
    }

    fn sum(&self, i: usize, errors: &[f64; BLOCK], before: &[f64; BLOCK]) -> f64 {
        before[i] + self.rows[i][..i].iter().zip(errors).map(|(r, error)| r * error).sum::<f64>()
    }
}

/// Place of a matrix in a slice: element (i, j) has the index `first + i·row + j·column`.
#[derive(Clone, Copy)]
struct View {
    first: usize,
    row: isize,
    column: isize,
}

impl View {
    /// Whether all elements of a matrix of these sizes, which are not 0, lie in a slice of this length.
    fn fits(&self, [lines, columns]: [usize; 2], length: usize) -> bool {
        let [down, right] = [(lines - 1) as isize * self.row, (columns - 1) as isize * self.column];
        let corners = [0, down, right, down + right].map(|offset| self.first as isize + offset);
        corners.into_iter().all(|index| (0..length as isize).contains(&index))
    }
}

/// Adds `factor` times the product of `lhs [m, k]` and `rhs [k, n]` to `sums [m, n]`, whose rows are contiguous.
fn add_product(
    [m, n, k]: [usize; 3],
    factor: f64,
    (lhs, at_lhs): (&[f64], View),
    (rhs, at_rhs): (&[f64], View),
    sums: &mut [f64],
    at_sums: View,
    threads: Parallelism,
) {
    if m == 0 || n == 0 || k == 0 {
        return;
    }
    assert!(at_lhs.fits([m, k], lhs.len()) && at_rhs.fits([k, n], rhs.len()) && at_sums.fits([m, n], sums.len()));
    // The function is fast for a column-major result, so it computes the transpose: rhsᵀ lhsᵀ.
    let multiply = gemm_f64::gemm::f64::get_gemm_fn();
    // SAFETY: the assertion puts every element of the three matrices into its slice. `sums` is borrowed mutably, so the
    // other slices do not overlap it.
    unsafe {
        multiply(
            n,
            m,
            k,
            sums[at_sums.first..].as_mut_ptr(),
            at_sums.row,
            at_sums.column,
            true,
            rhs.as_ptr().add(at_rhs.first),
            at_rhs.row,
            at_rhs.column,
            lhs.as_ptr().add(at_lhs.first),
            at_lhs.row,
            at_lhs.column,
            1.0,
            factor,
            false,
            false,
            false,
            threads,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers that look random, with columns that depend on each other.
    fn numbers(count: usize, seed: u64) -> Vec<f64> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as f64 / f64::from(1u32 << 31) - 0.5
        };
        (0..count).map(|_| next() + next() + next()).collect()
    }

    /// Tokens `[count, k]` in which every column has a part of the column before it.
    fn tokens(count: usize, k: usize, seed: u64) -> Vec<f64> {
        let mut tokens = numbers(count * k, seed);
        for token in tokens.chunks_mut(k) {
            (1..k).for_each(|column| token[column] += 0.8 * token[column - 1]);
        }
        tokens
    }

    fn hessian(tokens: &[f64], k: usize) -> Hessian {
        let mut hessian = Hessian::new(k);
        // In two parts, as they are read.
        let (one, other) = tokens.split_at(tokens.len() / k / 3 * k);
        hessian.add(one);
        hessian.add(other);
        hessian
    }

    #[test]
    fn factor_times_its_transpose_is_the_damped_sum() {
        for k in [16, 64, 80, 144] {
            let tokens = tokens(3 * k, k, 1);
            let factor = hessian(&tokens, k).factor().unwrap();
            let sum = |i: usize, j: usize| tokens.chunks(k).map(|token| token[i] * token[j]).sum::<f64>();
            let damping = DAMPING * (0..k).map(|i| sum(i, i)).sum::<f64>() / k as f64;
            for (i, j) in (0..k).flat_map(|i| (0..=i).map(move |j| (i, j))) {
                let expected = sum(i, j) + if i == j { damping } else { 0.0 };
                // (RRᵀ)_ij, where R has zeros below the diagonal.
                let got: f64 = (i..k).map(|c| factor.at(i, c) * factor.at(j, c)).sum();
                assert!((got - expected).abs() < 1e-9 * sum(i, i).max(sum(j, j)), "{k}: {i} {j}: {got} {expected}");
            }
        }
    }

    #[test]
    fn independent_columns_are_rounded_to_nearest() {
        let k = 48;
        let mut diagonal = Hessian::new(k);
        for i in 0..k {
            let mut token = vec![0.0; k];
            token[i] = 1.0 + i as f64;
            diagonal.add(&token);
        }
        let factor = diagonal.factor().unwrap();
        let rows: Vec<f32> = numbers(5 * k, 2).into_iter().map(|number| number as f32).collect();
        let global = 1e-3;
        for rule in Scales::ALL {
            let [mut ours, mut plain] =
                [(vec![0; 5 * k / 2], vec![0; 5 * k / 16]), (vec![0; 5 * k / 2], vec![0; 5 * k / 16])];
            let loss = factor.quantize(rule, &rows, global, &mut ours.0, &mut ours.1).unwrap();
            let expected = quantize_blocks_by(rule, &rows, global, &mut plain.0, &mut plain.1).unwrap();
            assert_eq!(ours, plain);
            assert!((loss.relative_rms() - expected.relative_rms()).abs() < 1e-6);
        }
    }

    #[test]
    fn products_with_other_tokens_change_less() {
        let (k, n) = (128, 24);
        let factor = hessian(&tokens(4 * k, k, 3), k).factor().unwrap();
        let rows: Vec<f32> = numbers(n * k, 4).into_iter().map(|number| number as f32).collect();
        let global = 1e-3;
        let held_out = tokens(64, k, 5);
        let error = |(values, scales): &(Vec<u8>, Vec<u8>)| -> f64 {
            let difference = |row: usize, column: usize| {
                let index = row * k + column;
                let code = values[index / 2] >> (4 * (index % 2));
                f64::from(rows[index]) - f64::from(e2m1::decode(code) * e4m3::decode(scales[index / 16]) * global)
            };
            let product =
                |token: &[f64], row| -> f64 { (0..k).map(|column| token[column] * difference(row, column)).sum() };
            held_out.chunks(k).flat_map(|token| (0..n).map(move |row| product(token, row).powi(2))).sum()
        };
        let [mut ours, mut plain] =
            [(vec![0; n * k / 2], vec![0; n * k / 16]), (vec![0; n * k / 2], vec![0; n * k / 16])];
        factor.quantize(Scales::Max, &rows, global, &mut ours.0, &mut ours.1).unwrap();
        quantize_blocks_by(Scales::Max, &rows, global, &mut plain.0, &mut plain.1).unwrap();
        let (ours, plain) = (error(&ours), error(&plain));
        assert!(ours < 0.7 * plain, "{ours} {plain}");
    }

    #[test]
    fn activations_without_a_direction_are_refused() {
        assert!(hessian(&[0.0; 64], 16).factor().err().unwrap().to_string().contains("all activations are 0"));
        assert!(hessian(&[1e200; 64], 16).factor().err().unwrap().to_string().contains("not finite"));
    }
}
