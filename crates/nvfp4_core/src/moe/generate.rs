//! Layers and steps generated from a seed. Every expert and every token has its own random generator. The same seed
//! therefore gives the same bytes for any number of threads, and a token the same numbers for any T.

use rand::{Rng, RngExt};
use rand_distr::{Distribution, StandardNormal};
use rayon::prelude::*;

pub use super::routing::Routing;
use super::{Biases, LayerShape, MoeExpert, MoeInputs, MoeWeights};
use crate::bias::Bias;
use crate::error::Error;
use crate::fp4::{self, InputScales};
use crate::generate::{Generator, Role, matrix, row_rng};
use crate::problem::TokenDtype;

/// Number of the random generators of a step, beyond the numbers of experts.
const STEP: usize = 1 << 32;

/// Number of the random generators of biases, beyond the numbers of weights.
const BIASES: usize = 1 << 33;

/// Generates the layer of a shape. Calls `progress` after each expert.
///
/// # Errors
/// If the sizes are invalid.
pub fn weights(
    shape: &LayerShape,
    generator: Generator,
    dtype: TokenDtype,
    seed: u64,
    progress: &dyn Fn(),
) -> Result<MoeWeights<'static>, Error> {
    shape.sizes(dtype).check()?;
    let expert = |number: usize, intermediate: usize| {
        let (hidden, matrix) = (shape.hidden, |role, n, k| matrix(generator, role, number, n, k, seed));
        let has_gate = shape.activation.has_gate();
        let bias = |role, n| shape.biases.then(|| biases(dtype, role, number, n, seed));
        let expert = MoeExpert {
            gate: has_gate.then(|| matrix(Role::Gate, intermediate, hidden)).transpose()?,
            up: matrix(Role::Up, intermediate, hidden)?,
            down: matrix(Role::Down, hidden, intermediate)?,
            biases: Biases {
                gate: has_gate.then(|| bias(Role::Gate, intermediate)).flatten(),
                up: bias(Role::Up, intermediate),
                down: bias(Role::Down, hidden),
            },
        };
        progress();
        Ok::<_, Error>(expert)
    };
    let experts = (0..shape.experts).map(|number| expert(number, shape.intermediate)).collect::<Result<_, _>>()?;
    let layer = MoeWeights::with_activation(dtype, shape.top_k, shape.activation, experts)?;
    let mut layer = layer.with_token_format(shape.token_format);
    if let Some(intermediate) = shape.shared_intermediate {
        layer = layer.with_shared(expert(shape.experts, intermediate)?)?;
    }
    if shape.input_scales {
        let experts = shape.experts + usize::from(shape.shared_intermediate.is_some());
        layer = layer.with_input_scales((0..experts).map(input_scales).collect())?;
    }
    let Some(named) = shape.named_experts else { return Ok(layer) };
    let map = (0..named).map(|id| if id < shape.experts { id as i32 } else { -1 });
    layer.with_expert_map(map.collect())
}

/// Input scales of an expert, for tokens and an intermediate whose largest magnitudes are a few units. Some generated
/// tokens are larger.
fn input_scales(number: usize) -> InputScales {
    let of_largest = |largest: usize| largest as f32 / fp4::LARGEST;
    InputScales { gate_up: of_largest(3 + number % 3), down: of_largest(2 + number % 5) }
}

/// Biases of a projection, normally distributed: f32 in experts with even numbers, the token type in the others.
fn biases(dtype: TokenDtype, role: Role, number: usize, n: usize, seed: u64) -> Bias<'static> {
    let mut rng = row_rng(seed, BIASES + number, role, 0);
    let numbers = (0..n).map(|_| StandardNormal.sample(&mut rng));
    if number.is_multiple_of(2) {
        Bias::F32(numbers.collect())
    } else {
        Bias::Token(numbers.map(|number| dtype.round_f32(number)).collect())
    }
}

/// Generates the inputs of a step with `tokens` tokens for the layer of a shape.
///
/// # Errors
/// If the sizes are invalid.
pub fn inputs(
    shape: &LayerShape,
    generator: Generator,
    routing: Routing,
    dtype: TokenDtype,
    tokens: usize,
    seed: u64,
) -> Result<MoeInputs<'static>, Error> {
    let sizes = shape.sizes(dtype);
    sizes.check()?;
    let length = |width: usize| tokens.checked_mul(width).filter(|&all| all < isize::MAX as usize / 4);
    let lengths = length(sizes.hidden).zip(length(sizes.top_k));
    let (elements, choices) = lengths.ok_or(Error::TooLarge)?;
    let (mut hidden, mut ids, mut weights) = (vec![0u16; elements], vec![0i32; choices], vec![0f32; choices]);
    let popularity = popularity(sizes.named_experts, routing, seed);
    let rows = hidden.par_chunks_mut(sizes.hidden).zip(ids.par_chunks_mut(sizes.top_k));
    rows.zip(weights.par_chunks_mut(sizes.top_k)).enumerate().for_each(|(token, ((hidden, ids), weights))| {
        token_numbers(generator, dtype, seed, token, hidden);
        let mut rng = row_rng(seed, STEP, Role::Gate, token);
        route(&popularity, &mut rng, ids, weights);
    });
    let mut rng = row_rng(seed, STEP, Role::Up, 0);
    let shared = sizes.shared_intermediate.map(|_| (0..tokens).map(|_| rng.random_range(0.0..1.0)).collect::<Vec<_>>());
    Ok(MoeInputs {
        tokens,
        hidden: hidden.into(),
        stride: sizes.hidden,
        ids: ids.into(),
        weights: weights.into(),
        weights_on_input: shape.weights_on_input,
        shared_weights: shared.map(Into::into),
    })
}

/// Generates a token: normally distributed or, with [`Generator::AllCodes`], with magnitudes that span 13 powers of
/// two.
pub fn token_numbers(generator: Generator, dtype: TokenDtype, seed: u64, token: usize, out: &mut [u16]) {
    /// Root mean square of 2ˣ for x uniform in [-12, 1).
    const RMS: f32 = 0.471;
    let mut rng = row_rng(seed, STEP, Role::Tokens, token);
    // With this scale, gate and up of all-codes weights have the magnitude that `Role` defines.
    let scale = (out.len() as f32).powf(-0.25) / RMS;
    for out in out {
        let number = if generator == Generator::AllCodes {
            let magnitude = rng.random_range(-12f32..1.0).exp2() * scale;
            if rng.random() { magnitude } else { -magnitude }
        } else {
            StandardNormal.sample(&mut rng)
        };
        *out = dtype.round_f32(number);
    }
}

/// Relative probability of each expert.
fn popularity(experts: usize, routing: Routing, seed: u64) -> Vec<f64> {
    let mut popularity: Vec<f64> = (1..=experts)
        .map(|rank| match routing {
            Routing::Uniform => 1.0,
            Routing::Zipf => 1.0 / rank as f64,
        })
        .collect();
    // Assign a random rank to each expert (Fisher and Yates).
    let mut rng = row_rng(seed, STEP, Role::Down, 0);
    for last in (1..experts).rev() {
        popularity.swap(last, rng.random_range(0..=last));
    }
    popularity
}

/// Draws distinct experts in proportion to their popularity, and a weight for each. The weights of a token sum to 1 if
/// there are several (Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006). If there are fewer
/// experts than ids, the last ids are -1.
fn route(popularity: &[f64], rng: &mut impl Rng, ids: &mut [i32], weights: &mut [f32]) {
    let mut keys: Vec<(f64, i32)> = popularity
        .iter()
        .zip(0..)
        .map(|(popularity, id)| (rng.random_range(f64::MIN_POSITIVE..1.0).ln() / popularity, id))
        .collect();
    keys.sort_unstable_by(|a, b| b.0.total_cmp(&a.0));
    ids.fill(-1);
    ids.iter_mut().zip(keys).for_each(|(id, (_, named))| *id = named);
    weights.fill_with(|| rng.random_range(0.01..1.0));
    if weights.len() > 1 {
        let sum: f32 = weights.iter().sum();
        weights.iter_mut().for_each(|weight| *weight /= sum);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::moe::MoeStep;

    fn shape() -> LayerShape {
        crate::moe::shape::find("layer-test-8").unwrap()
    }

    fn step_of(shape: &LayerShape, routing: Routing, tokens: usize, seed: u64) -> MoeInputs<'static> {
        inputs(shape, Generator::Gaussian, routing, TokenDtype::Bf16, tokens, seed).unwrap()
    }

    #[test]
    fn experts_are_distinct_and_weights_sum_to_one() {
        let shape = shape();
        let inputs = step_of(&shape, Routing::Zipf, 200, 1);
        for (ids, weights) in inputs.ids.chunks(shape.top_k).zip(inputs.weights.chunks(shape.top_k)) {
            let distinct: std::collections::BTreeSet<_> = ids.iter().collect();
            assert_eq!(distinct.len(), shape.top_k);
            assert!(ids.iter().all(|&id| (0..shape.named_experts.unwrap() as i32).contains(&id)));
            assert!((weights.iter().sum::<f32>() - 1.0).abs() < 1e-5);
        }
    }

    #[test]
    fn zipf_prefers_few_experts_and_uniform_none() {
        let mut shape = shape();
        (shape.experts, shape.named_experts, shape.top_k) = (16, None, 1);
        let most = |routing| {
            let inputs = step_of(&shape, routing, 1600, 3);
            (0..16).map(|id| inputs.ids.iter().filter(|&&other| other == id).count()).max().unwrap()
        };
        // 1 / (1 + 1/2 + … + 1/16) = 0.296 of 1600 tokens, and 1/16 of them.
        assert!((420..530).contains(&most(Routing::Zipf)), "{}", most(Routing::Zipf));
        assert!(most(Routing::Uniform) < 150);
    }

    #[test]
    fn tokens_do_not_depend_on_threads_or_token_count() {
        let on = |threads, tokens| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| step_of(&shape(), Routing::Uniform, tokens, 5))
        };
        let (one, more) = (on(1, 7), on(3, 12));
        assert_eq!((&one.hidden[..], &one.ids[..]), (&more.hidden[..one.hidden.len()], &more.ids[..one.ids.len()]));
        assert_ne!(one.hidden[..8], step_of(&shape(), Routing::Uniform, 7, 6).hidden[..8]);
    }

    #[test]
    fn generated_steps_fit_generated_layers() {
        for shape in crate::moe::shape::builtin().iter().filter(|shape| shape.name.starts_with("layer-test-")) {
            for generator in Generator::ALL {
                let layer = weights(shape, generator, TokenDtype::F16, 0, &|| ()).unwrap();
                let inputs = inputs(shape, generator, Routing::Zipf, TokenDtype::F16, shape.tokens, 0).unwrap();
                assert_eq!(layer.sizes(), shape.sizes(TokenDtype::F16));
                assert!(MoeStep::new(&layer, inputs).unwrap().rows().count() <= shape.tokens * shape.top_k);
            }
        }
    }
}
