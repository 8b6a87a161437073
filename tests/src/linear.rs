//! Checks linear layers on every backend that computes them, each element against the reference.

use nvfp4::backend::{Layer, Linear};
use nvfp4::bias::Bias;
use nvfp4::generate::Generator;
use nvfp4::linear::compare::compare;
use nvfp4::linear::{LinearInputs, LinearOutput, LinearStep, LinearWeights, generate};
use nvfp4::problem::TokenDtype;

use crate::moe::backends;

/// Makes the weights of a layer `[n, k]`.
pub fn weights(n: usize, k: usize, dtype: TokenDtype) -> LinearWeights<'static> {
    generate::weights(Generator::Gaussian, n, k, dtype, 1).expect("valid sizes")
}

/// Adds a bias of varied numbers to the layer: in its token type if `of_tokens`, else in f32.
pub fn with_bias(weights: LinearWeights<'static>, of_tokens: bool) -> LinearWeights<'static> {
    let (sizes, number) = (weights.sizes(), |i: usize| (i % 29) as f32 / 3.0 - 4.0);
    let bias = if of_tokens {
        Bias::Token((0..sizes.n).map(|i| sizes.dtype.round_f32(number(i))).collect())
    } else {
        Bias::F32((0..sizes.n).map(number).collect())
    };
    weights.with_bias(bias).expect("one bias number per row")
}

/// Makes tokens for the layer.
pub fn inputs(weights: &LinearWeights<'_>, tokens: usize) -> LinearInputs<'static> {
    let sizes = weights.sizes();
    generate::inputs(Generator::Gaussian, tokens, sizes.k, sizes.dtype, 2).expect("valid sizes")
}

/// Runs a prepared layer and returns its output after checking every element.
pub fn verified(layer: &mut dyn Layer<Linear>, weights: &LinearWeights<'_>, step: &LinearStep<'_>) -> LinearOutput {
    let mut output = LinearOutput::new(step);
    layer.execute(step, &mut output).unwrap_or_else(|error| panic!("{}: {error}", layer.kernel()));
    let found = compare(weights, step, &output);
    if let Some(first) = found.first {
        let (wrong, checked) = (found.mismatches, found.checked);
        panic!("{}: {wrong} of {checked} elements are wrong, the first {first}", layer.kernel());
    }
    output
}

/// Checks a step on every backend: the output is right, and a rerun gives the same bits.
pub fn check(arch: &str, weights: &LinearWeights<'_>, inputs: LinearInputs<'_>) {
    let step = LinearStep::new(weights, inputs).expect("inputs of the layer");
    for backend in backends(arch) {
        let mut layer = backend.prepare_linear(weights).unwrap_or_else(|error| panic!("{}: {error}", backend.name()));
        let output = verified(layer.as_mut(), weights, &step);
        let again = verified(layer.as_mut(), weights, &step);
        assert!(again == output, "{}: a rerun gave different bits", backend.name());
    }
}
