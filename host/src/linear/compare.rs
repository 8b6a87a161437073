//! Compares what a device made of a step with the reference: an element must lie where f32 sums can take it
//! ([`moe::oracle`](crate::moe::oracle) derives how far), and no tolerance is added to that.

use rand::{RngExt, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use rayon::prelude::*;

use super::{LinearOutput, LinearSizes, LinearStep, LinearWeights};
use crate::moe::compare::{MoeMismatch, Stage, StageComparison};
use crate::moe::oracle::{Expected, decode_token, decode_weights, product};

/// What an element may be: the dot product of a token with a row of weights, times the global scale, plus the bias.
///
/// A device rounds the sum with the bias to f32 once, or fuses it with the multiplication.
pub fn expected(token: &[f64], weights: &[f64], global: f32, bias: Option<f32>) -> Expected {
    let sum = product(token, weights, global);
    Expected::plain(bias.map_or(sum, |bias| sum.biased(bias)))
}

/// Compares every element.
///
/// # Panics
/// If step or output were not made for these weights.
pub fn compare(weights: &LinearWeights<'_>, step: &LinearStep<'_>, output: &LinearOutput) -> StageComparison {
    compare_with_progress(weights, step, output, &|_| ())
}

/// As [`compare`]; calls `progress` from any thread with the elements that it has compared since, `M·N` in all.
///
/// # Panics
/// As [`compare`].
pub fn compare_with_progress(
    weights: &LinearWeights<'_>,
    step: &LinearStep<'_>,
    output: &LinearOutput,
    progress: &(dyn Fn(usize) + Sync),
) -> StageComparison {
    let checker = Checker::new(weights, step, output);
    let (k, tokens) = (checker.step.sizes().k, step.tokens());
    let mut numbers = vec![0.0; tokens * k];
    numbers.par_chunks_mut(k).enumerate().for_each(|(token, out)| {
        decode_token(output.dtype(), step.token(token), out);
    });
    let columns = (0..step.sizes().n).into_par_iter().map_init(
        || (vec![0.0; k], Vec::new()),
        |(row, scratch), column| {
            decode_weights(weights.matrix(), column, scratch, row);
            let mut found = StageComparison::new(Stage::Output);
            for (token, numbers) in numbers.chunks(k).enumerate() {
                checker.add(&mut found, token, column, numbers, row);
            }
            progress(tokens);
            found
        },
    );
    columns.reduce(|| StageComparison::new(Stage::Output), StageComparison::merge)
}

/// Compares some elements, drawn by a seed: for steps whose every element takes too long.
///
/// # Panics
/// As [`compare`].
pub fn compare_sample(
    weights: &LinearWeights<'_>,
    step: &LinearStep<'_>,
    output: &LinearOutput,
    elements: usize,
    seed: u64,
) -> StageComparison {
    let checker = Checker::new(weights, step, output);
    let LinearSizes { n, k, dtype, .. } = step.sizes();
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
    let elements = if output.out.is_empty() { 0 } else { elements };
    let places: Vec<_> = (0..elements).map(|_| rng.random_range(0..output.out.len())).collect();
    let found = places.into_par_iter().map(|place| {
        let (token, column) = (place / n, place % n);
        let (mut numbers, mut row) = (vec![0.0; k], vec![0.0; k]);
        decode_token(dtype, step.token(token), &mut numbers);
        decode_weights(weights.matrix(), column, &mut Vec::new(), &mut row);
        let mut found = StageComparison::new(Stage::Output);
        checker.add(&mut found, token, column, &numbers, &row);
        found
    });
    found.reduce(|| StageComparison::new(Stage::Output), StageComparison::merge)
}

/// What elements are compared with.
struct Checker<'a> {
    step: &'a LinearStep<'a>,
    output: &'a LinearOutput,
    global: f32,
    bias: Option<std::borrow::Cow<'a, [f32]>>,
}

impl<'a> Checker<'a> {
    fn new(weights: &'a LinearWeights<'_>, step: &'a LinearStep<'_>, output: &'a LinearOutput) -> Self {
        assert_eq!(weights.sizes(), step.sizes(), "the step is one of this layer");
        assert!(output.check_fits(step).is_ok(), "an output of this step");
        Self { step, output, global: weights.matrix().global_scale(), bias: weights.bias() }
    }

    /// Adds an element, of a decoded token and a decoded row of weights.
    fn add(&self, found: &mut StageComparison, token: usize, column: usize, numbers: &[f64], row: &[f64]) {
        let bias = self.bias.as_ref().map(|bias| bias[column]);
        let expected = expected(numbers, row, self.global, bias);
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
    use crate::problem::OutDtype;

    /// The reference itself as an output.
    fn reference(weights: &LinearWeights<'_>, step: &LinearStep<'_>) -> LinearOutput {
        let LinearSizes { n, k, dtype, .. } = step.sizes();
        let mut output = LinearOutput::new(step);
        for (at, out) in output.out.iter_mut().enumerate() {
            let (mut numbers, mut row) = (vec![0.0; k], vec![0.0; k]);
            decode_token(dtype, step.token(at / n), &mut numbers);
            decode_weights(weights.matrix(), at % n, &mut Vec::new(), &mut row);
            let sum: f64 = numbers.iter().zip(&row).map(|(x, w)| x * w).sum();
            let bias = weights.bias().map_or(0.0, |bias| f64::from(bias[at % n]));
            *out = dtype.round(sum * f64::from(weights.matrix().global_scale()) + bias);
        }
        output
    }

    #[test]
    fn an_element_that_is_wrong_or_lacks_its_bias_is_found_with_its_place() {
        for (dtype, biased) in [(OutDtype::F16, true), (OutDtype::Bf16, false)] {
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
