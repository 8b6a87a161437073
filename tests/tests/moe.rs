//! The MoE layer on every backend and architecture that computes one: each stage is right whatever tokens choose, and a token's bits do not
//! depend on anything but the token.

use nvfp4::backend::Backend;
use nvfp4::backend::emulated::Schedule;
use nvfp4::moe::{self, Activation, LayerShape, MoeInputs};
use nvfp4::problem::{TokenDtype, TokenFormat};
use nvfp4_tests::moe::{
    DTYPES, On, backends, bits, check, emulated, emulated_of, inputs, run, shape, step, verified, weights,
};
use nvfp4_tests::on_architectures;

on_architectures! {
    sm_90a sm_80 sm_100f sm_120f sm_120f_nvfp4 sm_100f_calibrated sm_120f_calibrated;
    {
        the_test_layers_are_right
        widths_that_are_no_whole_k_blocks_or_tiles_are_right
        every_activation_is_right_with_biases_and_without_on_every_instance
        schedules_and_multiprocessors_make_no_difference
        tokens_may_all_name_one_expert_or_one_twice_or_none
        tokens_may_lie_apart
        weights_on_the_input_leave_the_shared_expert_alone
        infinities_and_nan_stay_within_their_token
        what_is_too_large_for_f16_is_an_infinity_of_its_token_alone
        the_bits_of_a_token_do_not_depend_on_the_batch
        steps_of_other_routing_and_sizes_follow_each_other_in_one_workspace
        a_chain_has_two_to_four_launches_for_each_kind_of_experts_and_two_for_few_tokens
    }
}

fn the_test_layers_are_right(on: On) {
    let layers = moe::shape::builtin().iter().filter(|layer| layer.name.starts_with("layer-test-"));
    for (layer, dtype) in layers.flat_map(|layer| DTYPES.map(|dtype| (layer, dtype))) {
        // Names the culprit where one fails.
        println!("{} {dtype:?}", layer.name);
        let weights = on.weights(layer, dtype);
        check(on.arch, &weights, &step(&weights, inputs(layer, dtype, layer.tokens)));
    }
}

fn widths_that_are_no_whole_k_blocks_or_tiles_are_right(on: On) {
    for (hidden, intermediate) in [(16, 16), (48, 352), (176, 112), (272, 528), (528, 272)] {
        let layer = shape(hidden, intermediate, 3, 2);
        for dtype in DTYPES {
            let weights = on.weights(&layer, dtype);
            check(on.arch, &weights, &step(&weights, inputs(&layer, dtype, 11)));
        }
    }
}

/// The layer with an expert of this I besides that all tokens share.
fn with_shared(mut layer: LayerShape, intermediate: Option<usize>) -> LayerShape {
    layer.shared_intermediate = intermediate;
    layer
}

/// The inputs with these experts, again and again.
fn naming<'a>(inputs: MoeInputs<'a>, ids: &[i32]) -> MoeInputs<'a> {
    let ids = ids.iter().copied().cycle().take(inputs.ids.len()).collect::<Vec<_>>();
    MoeInputs { ids: ids.into(), ..inputs }
}

fn tokens_may_all_name_one_expert_or_one_twice_or_none(on: On) {
    let layer = shape(96, 80, 5, 2);
    let dtype = TokenDtype::Bf16;
    let weights = on.weights(&layer, dtype);
    let ids = [&[3, 3][..], &[0, 4], &[-1, 2], &[-1, -7], &[i32::MAX, 5], &[1, 1, 2, -1, -1, 0], &[4, -1, 3, 0]];
    // Few rows an expert, and more.
    for (ids, tokens) in ids.into_iter().zip([21, 45].into_iter().cycle()) {
        check(on.arch, &weights, &step(&weights, naming(inputs(&layer, dtype, tokens), ids)));
    }
}

fn tokens_may_lie_apart(on: On) {
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

/// Every activation, with limits that some numbers exceed.
const ACTIVATIONS: [Activation; 5] = [
    Activation::Silu,
    Activation::SiluLimit { limit: 0.75 },
    Activation::GeluTanh,
    Activation::GptOss { alpha: 1.702, limit: 1.5 },
    Activation::Relu2,
];

fn every_activation_is_right_with_biases_and_without_on_every_instance(on: On) {
    // Tiles of 16, 64 and 128 tokens, the first narrow and wide; and the shared expert's.
    for (tokens, intermediate, experts, top_k) in [(5, 48, 3, 2), (30, 272, 2, 1), (130, 80, 1, 1)] {
        for (activation, biases) in ACTIVATIONS.into_iter().flat_map(|of| [false, true].map(|biases| (of, biases))) {
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

fn weights_on_the_input_leave_the_shared_expert_alone(on: On) {
    let layer = with_shared(shape(80, 48, 2, 1), Some(32));
    // Few rows an expert, more of the shared one alone, and more of all.
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
    // K tails of both products: 48 columns are a k-block of 32 and one of 16, 80 a short one.
    let plain = shape(48, 80, 2, 2);
    let of_activations = ACTIVATIONS.map(|activation| plain.clone().with_activation(activation, true));
    let layers = of_activations.into_iter().chain([plain]).zip(DTYPES.into_iter().cycle());
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

fn what_is_too_large_for_f16_is_an_infinity_of_its_token_alone(on: On) {
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
        // By input scales, large tokens saturate.
        assert_eq!(infinite(2) > 0, !on.input_scales, "the test's numbers are too small");
        assert!([0, 1, 3, 4, 5].iter().all(|&token| infinite(token) == 0), "{}", backend.name());
    }
}

/// The tokens of a step that stand at these places, in this order.
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

fn the_bits_of_a_token_do_not_depend_on_the_batch(on: On) {
    // With few experts, these batches go to every instance: on average an expert has up to 8, up to 48 and more rows.
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
                    assert!(bits == expected, "{}: token {place} has other bits in another batch", backend.name());
                }
            }
        }
    }
}

fn schedules_and_multiprocessors_make_no_difference(on: On) {
    let layer = with_shared(shape(272, 144, 3, 2), Some(48));
    for (dtype, tokens) in [(TokenDtype::Bf16, 4), (TokenDtype::F16, 40), (TokenDtype::Bf16, 90)] {
        let weights = on.weights(&layer, dtype);
        let step = step(&weights, inputs(&layer, dtype, tokens));
        let schedules = [Schedule::Fair, Schedule::Worst, Schedule::Seed(1), Schedule::Seed(2)];
        let gpus = schedules.map(|schedule| emulated(on.arch, schedule)).into_iter();
        let gpus = gpus.chain([1, 132].map(|sms| emulated_of(on.arch, Schedule::Fair, sms)));
        let outputs: Vec<_> =
            gpus.map(|gpu| verified(gpu.prepare_moe(&weights).unwrap().as_mut(), &weights, &step)).collect();
        assert!(outputs.windows(2).all(|pair| pair[0] == pair[1]), "{tokens} tokens: other bits on another schedule");
    }
}

#[test]
fn a_layer_has_the_same_bits_on_every_architecture() {
    let layer = with_shared(shape(272, 144, 3, 2), Some(48));
    for (dtype, tokens) in DTYPES.into_iter().zip([5, 60]) {
        let weights = weights(&layer, dtype);
        let step = step(&weights, inputs(&layer, dtype, tokens));
        let [portable, hopper, consumer] = ["sm_80", "sm_90a", "sm_120f"]
            .map(|arch| run(emulated(arch, Schedule::Fair).prepare_moe(&weights).unwrap().as_mut(), &step).unwrap());
        assert!(portable == consumer, "{dtype:?}: other bits on sm_80 than on sm_120f");
        assert!(portable == hopper, "{dtype:?}: other bits on sm_80 than on sm_90a");
    }
}

fn steps_of_other_routing_and_sizes_follow_each_other_in_one_workspace(on: On) {
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

fn a_chain_has_two_to_four_launches_for_each_kind_of_experts_and_two_for_few_tokens(on: On) {
    let gpu = emulated(on.arch, Schedule::Fair);
    // Where tokens are quantized, that is a launch before each product; with input scales the first product quantizes for the second.
    let products = match on {
        On { tokens: TokenFormat::Bits16, .. } => 2,
        On { input_scales: true, .. } => 3,
        _ => 4,
    };
    // On Hopper a launch brings tokens to their rows, where experts have many, and few tokens take no launch for lists and sums.
    let is_hopper = on.arch == "sm_90a" && on.tokens == TokenFormat::Bits16;
    let expands = usize::from(is_hopper);
    for (shared, tokens, launches) in [
        (None, 1, if is_hopper { 2 } else { 2 + products }),
        (None, 9, 2 + products),
        (Some(16), 1, 2 + 2 * products),
        (None, 40, 2 + products + expands),
        (Some(16), 40, 2 + 2 * products + expands),
    ] {
        let layer = with_shared(shape(32, 32, 2, 1), shared);
        let weights = on.weights(&layer, TokenDtype::F16);
        let mut prepared = gpu.prepare_moe(&weights).unwrap();
        run(prepared.as_mut(), &step(&weights, inputs(&layer, TokenDtype::F16, tokens))).unwrap();
        assert_eq!(prepared.launches(), Some(launches));
        assert!(prepared.counters().is_some());
        run(prepared.as_mut(), &step(&weights, inputs(&layer, TokenDtype::F16, 0))).unwrap();
        assert_eq!(prepared.launches(), None, "no token, no launch");
    }
}
