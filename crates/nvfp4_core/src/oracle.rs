//! The exact reference: the definition of a correct result.
//!
//! Every `e2m1 × e4m3` is an integer times 2⁻¹⁰, so every product of two is an integer times 2⁻²⁰ below 2⁴³. Up to 2²⁰
//! products, the maximum of K, fit an `i64`. So a dot product is a sum of integers: without rounding, in any order, the
//! same on any number of threads. The rest is f64: one rounding of the sum, the product with α, and the gate.

use rayon::prelude::*;

use crate::format::{FIXED_POINT_BITS, Matrix};
use crate::output::Output;
use crate::problem::{Step, Weights};

/// Unit of a dot product of fixed-point rows.
const PRODUCT_UNIT: f64 = 1.0 / (1u64 << (2 * FIXED_POINT_BITS)) as f64;

/// Number of tokens whose dot products with one weight row are computed together and share its loads.
const TOKENS: usize = 4;

/// One output element before rounding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Element {
    /// `α₁·(A·B1ᵀ)` and `α₂·(A·B2ᵀ)`; the second is 0 in a plain problem.
    pub pre: [f64; 2],
    /// Output element: `silu(pre[0])·pre[1]`, or `pre[0]`.
    pub value: f64,
}

/// Returns `x·σ(x)` (Hendrycks and Gimpel, "Gaussian Error Linear Units").
pub fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// Exact results of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Reference {
    groups: Vec<GroupReference>,
    gated: bool,
}

#[derive(Clone, Debug, PartialEq)]
struct GroupReference {
    n: usize,
    /// Pre-activations `[M, N]` of each projection.
    pre: Vec<Vec<f64>>,
}

impl Reference {
    /// Computes every element.
    /// # Panics
    /// Panics if the step was not built for these weights.
    pub fn new(weights: &Weights<'_>, step: &Step<'_>) -> Self {
        Self::with_progress(weights, step, &|_| ())
    }

    /// Like [`Reference::new`]; any thread calls `progress` with the number of dot products finished since its last
    /// call.
    ///
    /// # Panics
    /// Panics if the step was not built for these weights.
    pub fn with_progress(weights: &Weights<'_>, step: &Step<'_>, progress: &(dyn Fn(usize) + Sync)) -> Self {
        let groups = weights
            .experts()
            .iter()
            .zip(step.activations())
            .enumerate()
            .map(|(group, (expert, tokens))| {
                let pre =
                    |(weight, alpha): (&Matrix<'_>, f64)| products(tokens, weight, alpha * PRODUCT_UNIT, progress);
                let alphas = step.alphas(group);
                GroupReference { n: expert.n(), pre: expert.projections().zip(alphas).map(pre).collect() }
            })
            .collect();
        Self { groups, gated: weights.op().projections() == 2 }
    }

    /// Returns an element of a group.
    #[inline]
    pub fn element(&self, group: usize, row: usize, column: usize) -> Element {
        let group = &self.groups[group];
        let at = row * group.n + column;
        element([group.pre[0][at], if self.gated { group.pre[1][at] } else { 0.0 }], self.gated)
    }

    /// Returns the pre-activations of a group, `[M, N]` for each projection (gate and up, or one).
    pub fn pre_activations(&self, group: usize) -> &[Vec<f64>] {
        &self.groups[group].pre
    }

    /// Returns the output of a step, rounded to the output type.
    pub fn output(&self, step: &Step<'_>) -> Output {
        let mut output = Output::new(step.problem());
        let dtype = output.dtype();
        for (group, bits) in output.groups_mut().enumerate() {
            let n = step.problem().groups()[group].n;
            bits.par_iter_mut().enumerate().for_each(|(at, bits)| {
                *bits = dtype.round(self.element(group, at / n, at % n).value);
            });
        }
        output
    }
}

/// Computes one element, to check a sample of a large output.
///
/// # Panics
/// Panics if the element is out of range, or the step was not built for these weights.
pub fn element_at(weights: &Weights<'_>, step: &Step<'_>, group: usize, row: usize, column: usize) -> Element {
    let expert = &weights.experts()[group];
    let (mut token, mut weight) = (vec![0; expert.k()], vec![0; expert.k()]);
    step.activations()[group].fixed_point_row(row, &mut token);
    let mut pre = [0.0; 2];
    for ((pre, matrix), alpha) in pre.iter_mut().zip(expert.projections()).zip(step.alphas(group)) {
        matrix.fixed_point_row(column, &mut weight);
        *pre = dot_products([&token], &weight)[0] as f64 * (alpha * PRODUCT_UNIT);
    }
    element(pre, weights.op().projections() == 2)
}

/// Returns `Σ|products|` times α for each projection and element of a group, in the layout of
/// [`Reference::pre_activations`]. It bounds the error of a floating-point sum.
pub fn magnitudes(weights: &Weights<'_>, step: &Step<'_>, group: usize) -> Vec<Vec<f64>> {
    let tokens = absolute(&step.activations()[group]);
    let projections = weights.experts()[group].projections().zip(step.alphas(group));
    projections.map(|(weight, alpha)| products(&tokens, &absolute(weight), alpha * PRODUCT_UNIT, &|_| ())).collect()
}

/// Returns the matrix of absolute values.
fn absolute<'a>(matrix: &'a Matrix<'_>) -> Matrix<'a> {
    let values: Vec<u8> = matrix.values().iter().map(|byte| byte & 0x77).collect();
    Matrix::new(matrix.rows(), matrix.k(), values, matrix.scales(), matrix.global_scale())
        .expect("clearing signs keeps a matrix valid")
}

fn element(pre: [f64; 2], gated: bool) -> Element {
    Element { pre, value: if gated { silu(pre[0]) * pre[1] } else { pre[0] } }
}

/// Returns `unit · tokens·weightᵀ`, `[M, N]`.
fn products(tokens: &Matrix<'_>, weight: &Matrix<'_>, unit: f64, progress: &(dyn Fn(usize) + Sync)) -> Vec<f64> {
    /// Weight rows decoded at a time: 32 rows of K = 7168 take 917 KB, which fits a core's L2 cache.
    const WEIGHT_ROWS: usize = 32;
    let (k, n) = (weight.k(), weight.rows());
    let mut rows = vec![0; tokens.rows() * k];
    rows.par_chunks_mut(k).enumerate().for_each(|(row, out)| tokens.fixed_point_row(row, out));

    // Computed as [N, M], so that each task owns whole rows.
    let m = tokens.rows();
    let mut transposed = vec![0.0; n * m];
    transposed.par_chunks_mut(WEIGHT_ROWS * m.max(1)).enumerate().for_each(|(chunk, out)| {
        let mut weights = vec![0; out.len() / m * k];
        for (row, weights) in weights.chunks_mut(k).enumerate() {
            weight.fixed_point_row(chunk * WEIGHT_ROWS + row, weights);
        }
        for (tile, tokens) in rows.chunks(TOKENS * k).enumerate() {
            for (weights, out) in weights.chunks(k).zip(out.chunks_mut(m)) {
                let out = &mut out[tile * TOKENS..];
                if tokens.len() == TOKENS * k {
                    let tokens = std::array::from_fn::<_, TOKENS, _>(|token| &tokens[token * k..][..k]);
                    for (out, sum) in out.iter_mut().zip(dot_products(tokens, weights)) {
                        *out = sum as f64 * unit;
                    }
                } else {
                    for (out, token) in out.iter_mut().zip(tokens.chunks(k)) {
                        *out = dot_products([token], weights)[0] as f64 * unit;
                    }
                }
            }
        }
        progress(out.len());
    });
    let mut products = vec![0.0; m * n];
    products.par_chunks_mut(n).enumerate().for_each(|(row, out)| {
        for (column, out) in out.iter_mut().enumerate() {
            *out = transposed[column * m + row];
        }
    });
    products
}

/// Returns exact dot products of some tokens with one weight row, with the widest vectors of this machine.
fn dot_products<const T: usize>(tokens: [&[i32]; T], weight: &[i32]) -> [i64; T] {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: AVX-512F was detected on the line above.
            return unsafe { dot_products_avx512(tokens, weight) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: AVX2 was detected on the line above.
            return unsafe { dot_products_avx2(tokens, weight) };
        }
    }
    dot_products_portable(tokens, weight)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn dot_products_avx512<const T: usize>(tokens: [&[i32]; T], weight: &[i32]) -> [i64; T] {
    dot_products_portable(tokens, weight)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn dot_products_avx2<const T: usize>(tokens: [&[i32]; T], weight: &[i32]) -> [i64; T] {
    dot_products_portable(tokens, weight)
}

#[inline(always)]
fn dot_products_portable<const T: usize>(tokens: [&[i32]; T], weight: &[i32]) -> [i64; T] {
    /// Number of partial sums of a dot product; one block of K fills whole vectors.
    const LANES: usize = crate::format::BLOCK;
    let (weight, tail) = weight.as_chunks::<LANES>();
    assert!(tail.is_empty(), "K must be a multiple of a block");
    let tokens = tokens.map(|token| token.as_chunks::<LANES>().0);
    let mut sums = [[0i64; LANES]; T];
    for (block, weight) in weight.iter().enumerate() {
        for (sums, token) in sums.iter_mut().zip(tokens) {
            let token = &token[block];
            for lane in 0..LANES {
                // Never overflows (see the start of this file). Checked operators, which tests are built with, do not
                // vectorize.
                let product = i64::from(token[lane]).wrapping_mul(i64::from(weight[lane]));
                sums[lane] = sums[lane].wrapping_add(product);
            }
        }
    }
    sums.map(|lanes| lanes.iter().sum())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::e4m3;
    use crate::problem::{Expert, Op, TokenDtype};
    use num_bigint::BigInt;
    use proptest::prelude::*;

    /// Generates any valid matrix: every value code, every scale.
    fn matrix(rows: usize, k: usize) -> impl Strategy<Value = Matrix<'static>> {
        let values = prop::collection::vec(any::<u8>(), rows * k / 2);
        let scales = prop::collection::vec(0..=e4m3::MAX_CODE, rows * k / 16);
        (values, scales, 1e-6f32..1e-3)
            .prop_map(move |(values, scales, global)| Matrix::new(rows, k, values, scales, global).unwrap())
    }

    fn gated() -> impl Strategy<Value = (Matrix<'static>, Matrix<'static>, Matrix<'static>)> {
        (0usize..7, 1usize..3, 1usize..12).prop_flat_map(|(m, n, blocks)| {
            let k = blocks * 16;
            (matrix(m, k), matrix(n * 8, k), matrix(n * 8, k))
        })
    }

    /// Dot product of two rows in unbounded integers, computed from the packed bytes by the format's definition.
    fn big_dot_product(a: &Matrix<'_>, row: usize, b: &Matrix<'_>, column: usize) -> BigInt {
        let number = |matrix: &Matrix<'_>, row: usize, k: usize| {
            let code = matrix.row_values(row)[k / 2] >> (k % 2 * 4) & 0xF;
            let scale = matrix.row_scales(row)[k / 16];
            let (exponent, mantissa) = (scale >> 3, BigInt::from(scale & 7));
            let scale = if exponent == 0 { mantissa } else { (mantissa + 8) << (exponent - 1) };
            let magnitude = [0, 1, 2, 3, 4, 6, 8, 12][usize::from(code & 7)];
            scale * if code & 8 == 0 { magnitude } else { -magnitude }
        };
        (0..a.k()).map(|k| number(a, row, k) * number(b, column, k)).sum()
    }

    proptest! {
        #[test]
        fn sums_match_big_integers((tokens, gate, up) in gated()) {
            let expert = Expert::Gated { gate: gate.clone(), up: up.clone() };
            let weights = Weights::new(Op::Gated, vec![expert]).unwrap();
            let step = Step::new(&weights, vec![tokens.clone()], TokenDtype::F16).unwrap();
            let reference = Reference::new(&weights, &step);
            for row in 0..tokens.rows() {
                for column in 0..gate.rows() {
                    let element = reference.element(0, row, column);
                    for ((weight, alpha), pre) in [&gate, &up].into_iter().zip(step.alphas(0)).zip(element.pre) {
                        let sum = i64::try_from(big_dot_product(&tokens, row, weight, column)).unwrap();
                        prop_assert_eq!(pre, sum as f64 * (alpha / 1_048_576.0));
                    }
                    prop_assert_eq!(element, element_at(&weights, &step, 0, row, column));
                    prop_assert_eq!(element.value, silu(element.pre[0]) * element.pre[1]);
                }
            }
        }

        #[test]
        fn every_vector_width_gives_the_same_sum(tokens in prop::collection::vec(-2_752_512i32..=2_752_512, 4 * 48),
                                         weight in prop::collection::vec(-2_752_512i32..=2_752_512, 48)) {
            let tokens = std::array::from_fn::<_, 4, _>(|i| &tokens[i * 48..][..48]);
            prop_assert_eq!(dot_products(tokens, &weight), dot_products_portable(tokens, &weight));
        }
    }

    #[test]
    fn largest_sum_fits_an_i64() {
        let k = crate::problem::MAX_K;
        let matrix =
            |rows: usize, code: u8| Matrix::new(rows, k, vec![code; rows * k / 2], vec![0x7E; rows * k / 16], 1e-9);
        let weights = Weights::new(Op::Plain, vec![Expert::Plain(matrix(8, 0xFF).unwrap())]).unwrap();
        let step = Step::new(&weights, vec![matrix(1, 0x77).unwrap()], TokenDtype::F16).unwrap();
        let pre = Reference::new(&weights, &step).element(0, 0, 7).pre[0];
        let exact = -(k as f64) * (6.0f64 * 448.0).powi(2) * f64::from(1e-9f32).powi(2);
        assert!((pre / exact - 1.0).abs() < 1e-15, "{pre} {exact}");
    }

    #[test]
    fn bits_are_independent_of_the_thread_count() {
        let numbers = |rows: usize, seed: u32| -> Vec<f32> {
            (0..rows as u32 * 320)
                .map(|i| (i.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 8) as f32 - 8e6)
                .collect()
        };
        let matrix = |rows, seed| crate::quantize::quantize(&numbers(rows, seed), rows, 320).unwrap();
        let expert = Expert::Gated { gate: matrix(72, 1), up: matrix(72, 2) };
        let weights = Weights::new(Op::Gated, vec![expert]).unwrap();
        let step = Step::new(&weights, vec![matrix(37, 3)], TokenDtype::F16).unwrap();
        let on = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| Reference::new(&weights, &step))
        };
        let one = on(1);
        assert!(one.element(0, 36, 71).value != 0.0);
        assert_eq!(one, on(2));
        assert_eq!(one, on(7));
    }

    #[test]
    fn magnitudes_equal_sums_of_absolute_products() {
        let tokens = Matrix::new(1, 16, vec![0x9A; 8], vec![0x38], 1.0).unwrap(); // −1, −0.5, …
        let weight = Matrix::new(8, 16, vec![0x1A; 64], vec![0x38; 8], 1.0).unwrap(); // −1, 0.5, …
        let weights = Weights::new(Op::Plain, vec![Expert::Plain(weight)]).unwrap();
        let step = Step::new(&weights, vec![tokens], TokenDtype::F16).unwrap();
        assert_eq!(magnitudes(&weights, &step, 0)[0], [10.0; 8]);
        assert_eq!(Reference::new(&weights, &step).pre_activations(0)[0], [6.0; 8]);
    }
}
