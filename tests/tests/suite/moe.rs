//! Checks MoE layers on every backend and architecture: each stage is right for any routing, and a token's bits depend
//! only on the token.

use nvfp4::backend::Backend;
use nvfp4::backend::emulated::{Schedule, Sums};
use nvfp4::moe::{self, Activation, LayerShape, MoeInputs};
use nvfp4::problem::{TokenDtype, TokenFormat};
use nvfp4_tests::moe::{
    DTYPES, On, backends, bits, check, emulated, emulated_of, inputs, run, shape, step, verified, weights,
};
use nvfp4_tests::{is_full, on_architectures, sampled};

on_architectures! {
    sm_90a sm_80 sm_100f sm_120f sm_120f_nvfp4 sm_100f_calibrated sm_120f_calibrated;
    {
        test_layers_are_right
        layers_of_models_are_right_scaled_down
        more_than_512_experts_are_right
        ragged_k_blocks_and_tiles_are_right
        every_activation_is_right_with_and_without_biases
        schedules_and_sms_do_not_change_the_bits
        repeated_missing_and_single_experts_are_right
        tokens_may_have_gaps_between_them
        weights_on_the_input_do_not_change_the_shared_expert
        infinities_and_nan_stay_within_their_token
        overflow_in_f16_stays_within_its_token
        bits_of_a_token_do_not_depend_on_the_batch
        different_steps_can_share_one_workspace
        layer_has_the_expected_number_of_launches
    }
}

fn test_layers_are_right(on: On) {
    let layers = moe::shape::builtin().iter().filter(|layer| layer.name.starts_with("layer-test-"));
    // A reduced run computes each layer with one of the types.
    let dtypes = |index: usize| if is_full() { &DTYPES[..] } else { &DTYPES[index % 2..][..1] };
    let of_types = layers.enumerate().flat_map(|(index, layer)| dtypes(index).iter().map(move |&dtype| (layer, dtype)));
    for (layer, dtype) in of_types {
        // The last name printed is the layer that failed.
        println!("{} {dtype:?}", layer.name);
        let weights = on.weights(layer, dtype);
        check(on.arch, &weights, &step(&weights, inputs(layer, dtype, layer.tokens)));
    }
}

/// Returns a layer of a model with the same activation, choices and shared expert, but small matrices and fewer experts.
fn scaled_down(model: &LayerShape) -> LayerShape {
    let small = |size: usize| 16 * (2 + size / 16 % 4);
    let mut layer = model.clone();
    layer.hidden = small(model.hidden);
    layer.intermediate = small(model.intermediate + 16);
    layer.shared_intermediate = model.shared_intermediate.map(small);
    layer.experts = (model.experts / 8).max(model.top_k + 1);
    layer
}

/// A reduced run computes a third of the models on each architecture, and each model on at least one.
fn layers_of_models_are_right_scaled_down(on: On) {
    let models: Vec<_> = moe::shape::builtin().iter().filter(|layer| !layer.router.is_empty()).collect();
    assert!(models.len() > 30, "only {} built-in layers are of models", models.len());
    let arches = ["sm_90a", "sm_80", "sm_100f", "sm_120f"];
    let first = arches.iter().position(|arch| *arch == on.arch).unwrap() + usize::from(on.input_scales);
    let (first, step_by) = if is_full() { (0, 1) } else { (first % 3, 3) };
    for (model, dtype) in models.into_iter().zip(DTYPES.into_iter().cycle()).skip(first).step_by(step_by) {
        // The last name printed is the model that failed.
        println!("{} {dtype:?}", model.name);
        let layer = scaled_down(model);
        let weights = on.weights(&layer, dtype);
        check(on.arch, &weights, &step(&weights, inputs(&layer, dtype, 7)));
    }
}

fn more_than_512_experts_are_right(on: On) {
    // The second layer is a part of a larger one. Its tokens take few rows of many experts, and many rows of one.
    let mut part = shape(48, 32, 600, 16);
    part.named_experts = Some(900);
    for (layer, tokens) in [(with_shared(shape(32, 16, 1024, 3), Some(16)), 9), (part, 45)] {
        let dtype = TokenDtype::Bf16;
        let weights = on.weights(&layer, dtype);
        let mut inputs = inputs(&layer, dtype, tokens);
        for ids in inputs.ids.to_mut().chunks_mut(layer.top_k) {
            ids[0] = layer.experts as i32 - 1;
        }
        check(on.arch, &weights, &step(&weights, inputs));
    }
}

fn ragged_k_blocks_and_tiles_are_right(on: On) {
    for (hidden, intermediate) in [(16, 16), (48, 352), (176, 112), (272, 528), (528, 272)] {
        let layer = shape(hidden, intermediate, 3, 2);
        for dtype in DTYPES {
            let weights = on.weights(&layer, dtype);
            check(on.arch, &weights, &step(&weights, inputs(&layer, dtype, 11)));
        }
    }
}

/// Adds a shared expert with this intermediate size to a layer.
fn with_shared(mut layer: LayerShape, intermediate: Option<usize>) -> LayerShape {
    layer.shared_intermediate = intermediate;
    layer
}

/// Replaces the experts of the inputs by these ids, repeated.
fn naming<'a>(inputs: MoeInputs<'a>, ids: &[i32]) -> MoeInputs<'a> {
    let ids = ids.iter().copied().cycle().take(inputs.ids.len()).collect::<Vec<_>>();
    MoeInputs { ids: ids.into(), ..inputs }
}

fn repeated_missing_and_single_experts_are_right(on: On) {
    let layer = shape(96, 80, 5, 2);
    let dtype = TokenDtype::Bf16;
    let weights = on.weights(&layer, dtype);
    let ids = [&[3, 3][..], &[0, 4], &[-1, 2], &[-1, -7], &[i32::MAX, 5], &[1, 1, 2, -1, -1, 0], &[4, -1, 3, 0]];
    // Few rows per expert, and more.
    for (ids, tokens) in ids.into_iter().zip([21, 45].into_iter().cycle()) {
        check(on.arch, &weights, &step(&weights, naming(inputs(&layer, dtype, tokens), ids)));
    }
}

fn tokens_may_have_gaps_between_them(on: On) {
    let layer = shape(80, 48, 3, 1);
    for (dtype, (stride, tokens)) in DTYPES.into_iter().zip([(88, 5), (99, 55)]) {
        let weights = on.weights(&layer, dtype);
        let near = inputs(&layer, dtype, tokens);
        let nan = bits(dtype, f32::NAN);
        let far = near.hidden.chunks(80).flat_map(|token| [token, &vec![nan; stride - 80]].concat());
        let hidden = far.collect::<Vec<_>>().into();
        check(on.arch, &weights, &step(&weights, MoeInputs { hidden, stride, ..near }));
    }
}

/// Every activation. Some numbers of the tests exceed the limits.
const ACTIVATIONS: &[Activation] = &[
    Activation::Silu,
    Activation::SiluLimit { limit: 0.75 },
    Activation::GeluTanh,
    Activation::GptOss { alpha: 1.702, limit: 1.5 },
    Activation::SwigluStep { limit: 0.75 },
    Activation::Gelu,
    Activation::Situ { beta: 1.5, linear: Some(2.5) },
    Activation::GatedRelu2,
    Activation::Relu2,
];

fn every_activation_is_right_with_and_without_biases(on: On) {
    // Tiles of 16, 64 and 128 tokens; 16 tokens in narrow and wide tiles; also tiles of the shared expert.
    for (tokens, intermediate, experts, top_k) in [(5, 48, 3, 2), (30, 272, 2, 1), (130, 80, 1, 1)] {
        for (activation, biases) in ACTIVATIONS.iter().flat_map(|&of| [false, true].map(|biases| (of, biases))) {
            let layer = shape(80, intermediate, experts, top_k).with_activation(activation, biases);
            let layer = with_shared(layer, (tokens < 10).then_some(32));
            let dtype = DTYPES[usize::from(tokens == 30) ^ usize::from(biases)];
            println!("{tokens} {activation} {biases} {dtype:?}");
            let weights = on.weights(&layer, dtype);
            let step = step(&weights, inputs(&layer, dtype, tokens));
            for backend in backends(on.arch) {
                verified(backend.prepare_moe(&weights).unwrap().as_mut(), &weights, &step);
            }
        }
    }
}

fn weights_on_the_input_do_not_change_the_shared_expert(on: On) {
    let layer = with_shared(shape(80, 48, 2, 1), Some(32));
    // Few rows per expert; more rows only of the shared expert; more rows of every expert.
    for (dtype, tokens) in [(TokenDtype::F16, 5), (TokenDtype::Bf16, 21), (TokenDtype::F16, 40)] {
        let weights = on.weights(&layer, dtype);
        check(
            on.arch,
            &weights,
            &step(&weights, MoeInputs { weights_on_input: true, ..inputs(&layer, dtype, tokens) }),
        );
    }
}

fn infinities_and_nan_stay_within_their_token(on: On) {
    // Both GEMMs have K tails: 48 columns are k-blocks of 32 and 16 columns, 80 columns are one short k-block.
    let plain = shape(48, 80, 2, 2);
    let of_activations = ACTIVATIONS.iter().map(|&activation| plain.clone().with_activation(activation, true));
    let layers = of_activations.chain([plain.clone()]).zip(DTYPES.into_iter().cycle());
    for ((layer, dtype), tokens) in layers.zip([9, 9, 21].into_iter().cycle()) {
        let weights = on.weights(&layer, dtype);
        let clean = naming(inputs(&layer, dtype, tokens), &[0, 1]);
        let mut dirty = clean.clone();
        for (token, number) in [(1, f32::NAN), (4, f32::INFINITY), (8, f32::NEG_INFINITY)] {
            dirty.hidden.to_mut()[token * 48..][..48].fill(bits(dtype, number));
        }
        let (clean, dirty) = (step(&weights, clean), step(&weights, dirty));
        for backend in backends(on.arch) {
            let mut layer = backend.prepare_moe(&weights).unwrap();
            let clean = verified(layer.as_mut(), &weights, &clean).hidden;
            let dirty = verified(layer.as_mut(), &weights, &dirty).hidden;
            for (token, (clean, dirty)) in clean.chunks(48).zip(dirty.chunks(48)).enumerate() {
                assert_eq!(clean == dirty, ![1, 4, 8].contains(&token), "{}: token {token}", backend.name());
            }
        }
    }
}

fn overflow_in_f16_stays_within_its_token(on: On) {
    let layer = shape(64, 64, 2, 1);
    let dtype = TokenDtype::F16;
    let weights = on.weights(&layer, dtype);
    let mut large = inputs(&layer, dtype, 6);
    let largest = bits(dtype, 65504.0);
    for element in &mut large.hidden.to_mut()[2 * 64..3 * 64] {
        *element = largest | *element & 0x8000;
    }
    let large = step(&weights, large);
    for backend in backends(on.arch) {
        let output = verified(backend.prepare_moe(&weights).unwrap().as_mut(), &weights, &large);
        let infinite = |token: usize| {
            let numbers = output.hidden[token * 64..][..64].iter().map(|&bits| dtype.decode(bits));
            numbers.filter(|number| !number.is_finite()).count()
        };
        // With input scales, large tokens saturate and do not overflow.
        assert_eq!(infinite(2) > 0, !on.input_scales, "token 2 must overflow exactly if there are no input scales");
        assert!([0, 1, 3, 4, 5].iter().all(|&token| infinite(token) == 0), "{}", backend.name());
    }
}

/// Returns the tokens at these indices, in this order.
fn pick<'a>(layer: &LayerShape, inputs: &MoeInputs<'_>, places: &[usize]) -> MoeInputs<'a> {
    fn rows<T: Copy>(of: &[T], width: usize, places: &[usize]) -> Vec<T> {
        places.iter().flat_map(|&place| of[place * width..][..width].to_vec()).collect()
    }
    MoeInputs {
        tokens: places.len(),
        hidden: rows(&inputs.hidden, layer.hidden, places).into(),
        stride: layer.hidden,
        ids: rows(&inputs.ids, layer.top_k, places).into(),
        weights: rows(&inputs.weights, layer.top_k, places).into(),
        weights_on_input: inputs.weights_on_input,
        shared_weights: inputs.shared_weights.as_ref().map(|weights| rows(weights, 1, places).into()),
    }
}

fn bits_of_a_token_do_not_depend_on_the_batch(on: On) {
    // With few experts, these batches reach every instance: up to 8, up to 48, and more rows per expert on average.
    let layer = with_shared(shape(208, 176, 2, 1), Some(96));
    for dtype in DTYPES {
        let weights = on.weights(&layer, dtype);
        let all = inputs(&layer, dtype, 130);
        for backend in backends(on.arch) {
            let mut prepared = backend.prepare_moe(&weights).unwrap();
            let whole = run(prepared.as_mut(), &step(&weights, all.clone())).unwrap().hidden;
            let batches: [Vec<usize>; 4] =
                [vec![129], (0..130).rev().collect(), vec![7, 7, 7, 100, 0], (20..90).step_by(2).collect()];
            for places in batches {
                let part = run(prepared.as_mut(), &step(&weights, pick(&layer, &all, &places))).unwrap().hidden;
                for (bits, place) in part.chunks(layer.hidden).zip(places) {
                    let expected = &whole[place * layer.hidden..][..layer.hidden];
                    assert!(bits == expected, "{}: token {place} has different bits in another batch", backend.name());
                }
            }
        }
    }
}

fn schedules_and_sms_do_not_change_the_bits(on: On) {
    let layer = with_shared(shape(272, 144, 3, 2), Some(48));
    for (dtype, tokens) in [(TokenDtype::Bf16, 4), (TokenDtype::F16, 40), (TokenDtype::Bf16, 90)] {
        let weights = on.weights(&layer, dtype);
        let step = step(&weights, inputs(&layer, dtype, tokens));
        let schedules = vec![Schedule::Fair, Schedule::Seed(1), Schedule::Seed(2), Schedule::Worst];
        let gpus = sampled(schedules, 2).into_iter().map(|schedule| emulated(on.arch, schedule));
        let gpus = gpus.chain([1, 132].map(|sms| emulated_of(on.arch, Schedule::Fair, sms)));
        let outputs: Vec<_> =
            gpus.map(|gpu| verified(gpu.prepare_moe(&weights).unwrap().as_mut(), &weights, &step)).collect();
        assert!(outputs.windows(2).all(|pair| pair[0] == pair[1]), "{tokens} tokens: schedules gave different bits");
    }
}

#[test]
fn every_architecture_gives_the_same_bits_with_exact_sums() {
    let layer = with_shared(shape(272, 144, 3, 2), Some(48));
    for (dtype, tokens) in DTYPES.into_iter().zip([5, 60]) {
        let weights = weights(&layer, dtype);
        let step = step(&weights, inputs(&layer, dtype, tokens));
        let [portable, hopper, consumer] = ["sm_80", "sm_90a", "sm_120f"]
            .map(|arch| emulated(arch, Schedule::Fair).with_sums(Sums::Exact))
            .map(|gpu| run(gpu.prepare_moe(&weights).unwrap().as_mut(), &step).unwrap());
        assert!(portable == consumer, "{dtype:?}: bits of sm_80 and sm_120f differ");
        assert!(portable == hopper, "{dtype:?}: bits of sm_80 and sm_90a differ");
    }
}

fn different_steps_can_share_one_workspace(on: On) {
    let layer = shape(96, 80, 4, 2);
    let dtype = TokenDtype::Bf16;
    let weights = on.weights(&layer, dtype);
    for backend in backends(on.arch) {
        let mut prepared = backend.prepare_moe(&weights).unwrap();
        let steps =
            [(30, [0, 1]), (30, [3, 3]), (2, [-1, 2]), (35, [3, 0]), (30, [-1, -1]), (0, [0, 0]), (35, [-1, 2])];
        for (tokens, ids) in steps.into_iter().chain([(31, [2, 1])]) {
            let step = step(&weights, naming(inputs(&layer, dtype, tokens), &ids));
            verified(prepared.as_mut(), &weights, &step);
        }
    }
}

fn layer_has_the_expected_number_of_launches(on: On) {
    let gpu = emulated(on.arch, Schedule::Fair);
    // Quantized tokens need a launch before each GEMM. With input scales the first GEMM quantizes for the second.
    let products = match on {
        On { tokens: TokenFormat::Bits16, .. } => 2,
        On { input_scales: true, .. } => 3,
        _ => 4,
    };
    // With few NVFP4 tokens, the first launch makes the lists too, unless there is a shared expert.
    let lists = if on.tokens == TokenFormat::Nvfp4 { 0 } else { 1 };
    // On Hopper, many rows per expert need a launch that copies tokens to their rows. Few tokens need no launch for
    // lists and sums.
    let is_hopper = on.arch == "sm_90a" && on.tokens == TokenFormat::Bits16;
    let expands = usize::from(is_hopper);
    for (shared, tokens, launches) in [
        (None, 1, if is_hopper { 2 } else { lists + 1 + products }),
        (None, 9, lists + 1 + products),
        (Some(16), 1, 2 + 2 * products),
        (None, 40, lists + 1 + products + expands),
        (Some(16), 40, 2 + 2 * products + expands),
    ] {
        let layer = with_shared(shape(32, 32, 2, 1), shared);
        let weights = on.weights(&layer, TokenDtype::F16);
        let mut prepared = gpu.prepare_moe(&weights).unwrap();
        run(prepared.as_mut(), &step(&weights, inputs(&layer, TokenDtype::F16, tokens))).unwrap();
        assert_eq!(prepared.launches(), Some(launches));
        assert!(prepared.counters().is_some());
        run(prepared.as_mut(), &step(&weights, inputs(&layer, TokenDtype::F16, 0))).unwrap();
        assert_eq!(prepared.launches(), None, "a step without tokens must launch nothing");
    }
}
