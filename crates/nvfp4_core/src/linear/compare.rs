//! Compares the output of a device with the reference. Each element must lie within the range of f32 sums that
//! [`moe::oracle`](crate::moe::oracle) derives, and no tolerance is added. With FP8 tokens every bit must match.

use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use rayon::prelude::*;

use super::{LinearOutput, LinearSizes, LinearStep, LinearWeights};
use crate::format::Matrix;
use crate::moe::compare::{MoeMismatch, Stage, StageComparison};
use crate::moe::oracle::{Expected, Operand, projected};

/// Compares every element.
///
/// # Panics
/// If the step or the output was not made for these weights.
pub fn compare(weights: &LinearWeights<'_>, step: &LinearStep<'_>, output: &LinearOutput) -> StageComparison {
    compare_with_progress(weights, step, output, &|_| ())
}

/// Does the same as [`compare`], and calls `progress` from any thread with the number of elements compared since its
/// last call. The numbers add up to `M·N`.
///
/// # Panics
/// In the same cases as [`compare`].
pub fn compare_with_progress(
    weights: &LinearWeights<'_>,
    step: &LinearStep<'_>,
    output: &LinearOutput,
    progress: &(dyn Fn(usize) + Sync),
) -> StageComparison {
    let checker = Checker::new(weights, step, output);
    let tokens: Vec<_> = (0..step.tokens()).into_par_iter().map(|token| checker.token(token)).collect();
    let columns = (0..step.sizes().n).into_par_iter().map(|column| {
        let row = checker.row(column);
        let mut found = StageComparison::new(Stage::Output);
        for (token, multiplied) in tokens.iter().enumerate() {
            checker.add(&mut found, token, column, multiplied, &row);
        }
        progress(tokens.len());
        found
    });
    columns.reduce(|| StageComparison::new(Stage::Output), StageComparison::merge)
}

/// Compares `elements` random elements, selected by a seed. For steps that are too large for [`compare`].
///
/// # Panics
/// In the same cases as [`compare`].
pub fn compare_sample(
    weights: &LinearWeights<'_>,
    step: &LinearStep<'_>,
    output: &LinearOutput,
    elements: usize,
    seed: u64,
) -> StageComparison {
    let checker = Checker::new(weights, step, output);
    let n = step.sizes().n;
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
    let elements = if output.out.is_empty() { 0 } else { elements };
    let places: Vec<_> = (0..elements).map(|_| rng.random_range(0..output.out.len())).collect();
    let found = places.into_par_iter().map(|place| {
        let (token, column) = (place / n, place % n);
        let mut found = StageComparison::new(Stage::Output);
        checker.add(&mut found, token, column, &checker.token(token), &checker.row(column));
        found
    });
    found.reduce(|| StageComparison::new(Stage::Output), StageComparison::merge)
}

/// Computes the range of each element.
struct Checker<'a> {
    step: &'a LinearStep<'a>,
    output: &'a LinearOutput,
    matrix: &'a Matrix<'a>,
    bias: Option<std::borrow::Cow<'a, [f32]>>,
    input_scale: Option<f32>,
}

impl<'a> Checker<'a> {
    fn new(weights: &'a LinearWeights<'_>, step: &'a LinearStep<'_>, output: &'a LinearOutput) -> Self {
        assert_eq!(weights.sizes(), step.sizes(), "the step was made for other weights");
        assert!(output.check_fits(step).is_ok(), "the output was made for another step");
        let (bias, input_scale) = (weights.bias(), weights.input_scale());
        Self { step, output, matrix: weights.matrix(), bias, input_scale }
    }

    /// Decodes a token.
    fn token(&self, token: usize) -> Operand {
        let LinearSizes { token_format, dtype, .. } = self.step.sizes();
        Operand::token(token_format, dtype, self.step.token(token), self.input_scale)
    }

    /// Decodes a row of weights.
    fn row(&self, row: usize) -> Operand {
        Operand::weights(self.step.sizes().token_format, self.matrix, row)
    }

    /// Compares one element, given the decoded token and the decoded row of weights.
    fn add(&self, found: &mut StageComparison, token: usize, column: usize, multiplied: &Operand, row: &Operand) {
        let bias = self.bias.as_ref().map(|bias| bias[column]);
        let expected = Expected::plain(projected(multiplied, row, self.matrix.global_scale(), bias));
        let got = self.output.dtype().decode(self.output.out[token * self.step.sizes().n + column]);
        let want = expected.want();
        let element = MoeMismatch { stage: Stage::Output, row: token, token, expert: None, column, got, want };
        found.add(self.output.dtype(), expected, element);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bias::Bias;
    use crate::generate::Generator;
    use crate::linear::generate;
    use crate::problem::{TokenDtype, TokenFormat};

    /// Computes the reference as an output.
    fn reference(weights: &LinearWeights<'_>, step: &LinearStep<'_>) -> LinearOutput {
        let LinearSizes { n, dtype, .. } = step.sizes();
        let mut output = LinearOutput::new(step);
        for (at, out) in output.out.iter_mut().enumerate() {
            let token = Operand::token(TokenFormat::Bits16, dtype, step.token(at / n), None);
            let row = Operand::weights(TokenFormat::Bits16, weights.matrix(), at % n);
            let (Operand::Bits16(numbers), Operand::Bits16(row)) = (token, row) else { unreachable!("16 bits") };
            let sum: f64 = numbers.iter().zip(&row).map(|(x, w)| x * w).sum();
            let bias = weights.bias().map_or(0.0, |bias| f64::from(bias[at % n]));
            *out = dtype.round(sum * f64::from(weights.matrix().global_scale()) + bias);
        }
        output
    }

    #[test]
    fn wrong_elements_and_missing_biases_are_found() {
        for (dtype, biased) in [(TokenDtype::F16, true), (TokenDtype::Bf16, false)] {
            let mut weights = generate::weights(Generator::Gaussian, 48, 80, dtype, 1).unwrap();
            if biased {
                weights = weights.with_bias(Bias::F32((0..48).map(|i| 0.3 + i as f32).collect())).unwrap();
            }
            let inputs = generate::inputs(Generator::Gaussian, 5, 80, dtype, 1).unwrap();
            let step = LinearStep::new(&weights, inputs).unwrap();
            let right = reference(&weights, &step);
            let found = compare(&weights, &step, &right);
            assert_eq!((found.checked, found.mismatches, found.unbounded), (5 * 48, 0, 0));
            assert_eq!(compare_sample(&weights, &step, &right, 100, 3).checked, 100);
            let mut wrong = right.clone();
            wrong.out[3 * 48 + 7] ^= 0x10;
            let first = compare(&weights, &step, &wrong).first.unwrap();
            assert_eq!((first.row, first.column), (3, 7));
            assert!(first.to_string().starts_with("output, token 3, column 7: got "), "{first}");
            wrong.poison();
            assert_eq!(compare(&weights, &step, &wrong).mismatches, 5 * 48);
            if biased {
                let plain = generate::weights(Generator::Gaussian, 48, 80, dtype, 1).unwrap();
                let step_of_plain =
                    LinearStep::new(&plain, generate::inputs(Generator::Gaussian, 5, 80, dtype, 1).unwrap()).unwrap();
                let without = reference(&plain, &step_of_plain);
                assert!(compare(&weights, &step, &without).mismatches > 5 * 46);
            }
        }
    }
}
