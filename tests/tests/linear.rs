//! The linear layer on every backend that computes one: every element is right, and a token's bits do not depend on anything but
//! the token.

use nvfp4::backend::Backend;
use nvfp4::backend::emulated::Schedule;
use nvfp4::linear::{LinearInputs, LinearStep};
use nvfp4::problem::OutDtype;
use nvfp4_tests::linear::{backends, check, inputs, verified, weights, with_bias};
use nvfp4_tests::moe::{DTYPES, bits, hopper, hopper_of};

#[test]
fn sizes_that_are_no_whole_panels_tiles_or_k_blocks_are_right() {
    // Columns of less than a panel, of more than a tile of two or four panels; K of less than a k-block, of a half and of several.
    for (tokens, n, k) in
        [(1, 16, 16), (3, 80, 144), (16, 144, 128), (17, 272, 272), (64, 48, 2 * 128 + 64), (0, 32, 32)]
    {
        for dtype in DTYPES {
            let weights = weights(n, k, dtype);
            check(&weights, inputs(&weights, tokens));
        }
    }
}

#[test]
fn a_bias_is_added_in_either_type() {
    for (dtype, of_tokens) in [(OutDtype::F16, true), (OutDtype::Bf16, true), (OutDtype::Bf16, false)] {
        // Three panels: of a tile of 128 or 256 columns some lie outside.
        for tokens in [2, 70, 300] {
            let weights = with_bias(weights(176, 80, dtype), of_tokens);
            check(&weights, inputs(&weights, tokens));
        }
    }
}

#[test]
fn tokens_may_lie_apart() {
    for (dtype, stride) in DTYPES.into_iter().zip([88, 99]) {
        let weights = weights(48, 80, dtype);
        let near = inputs(&weights, 5);
        let nan = bits(dtype, f32::NAN);
        let far = near.x.chunks(80).flat_map(|token| [token, &vec![nan; stride - 80]].concat());
        check(&weights, LinearInputs { x: far.collect::<Vec<_>>().into(), stride, ..near });
    }
}

#[test]
fn infinities_nan_and_overflow_stay_within_their_token() {
    for dtype in DTYPES {
        let weights = weights(80, 112, dtype);
        let clean = inputs(&weights, 9);
        let mut dirty = clean.clone();
        let largest = if dtype == OutDtype::F16 { 65504.0 } else { f32::INFINITY };
        for (token, number) in [(1, f32::NAN), (4, f32::INFINITY), (8, largest)] {
            dirty.x.to_mut()[token * 112..][..112].fill(bits(dtype, number));
        }
        let [clean, dirty] = [clean, dirty].map(|inputs| LinearStep::new(&weights, inputs).unwrap());
        for backend in backends() {
            let mut layer = backend.prepare_linear(&weights).unwrap();
            let clean = verified(layer.as_mut(), &weights, &clean).out;
            let dirty = verified(layer.as_mut(), &weights, &dirty).out;
            for (token, (clean, dirty)) in clean.chunks(80).zip(dirty.chunks(80)).enumerate() {
                assert_eq!(clean == dirty, ![1, 4, 8].contains(&token), "{}: token {token}", backend.name());
            }
        }
    }
}

/// The tokens that stand at these places, in this order.
fn pick(inputs: &LinearInputs<'_>, places: &[usize]) -> LinearInputs<'static> {
    let rows = places.iter().flat_map(|&place| inputs.x[place * inputs.stride..][..inputs.stride].to_vec());
    LinearInputs { tokens: places.len(), x: rows.collect::<Vec<_>>().into(), stride: inputs.stride }
}

#[test]
fn the_bits_of_a_token_do_not_depend_on_the_batch() {
    for dtype in DTYPES {
        let weights = with_bias(weights(144, 208, dtype), true);
        let all = inputs(&weights, 130);
        for backend in backends() {
            let mut prepared = backend.prepare_linear(&weights).unwrap();
            let mut run = |inputs| {
                let step = LinearStep::new(&weights, inputs).unwrap();
                verified(prepared.as_mut(), &weights, &step).out
            };
            let whole = run(all.clone());
            let batches: [Vec<usize>; 3] = [vec![129], vec![7, 7, 7, 100, 0], (20..90).step_by(2).collect()];
            for places in batches {
                let part = run(pick(&all, &places));
                for (bits, place) in part.chunks(144).zip(places) {
                    let expected = &whole[place * 144..][..144];
                    assert!(bits == expected, "{}: token {place} has other bits in another batch", backend.name());
                }
            }
        }
    }
}

#[test]
fn every_instance_gives_the_same_bits() {
    // Tokens and multiprocessors that make the plan choose each of them: a test of the plan says so.
    for dtype in DTYPES {
        let weights = with_bias(weights(592, 208, dtype), false);
        let all = inputs(&weights, 128);
        let mut whole = Vec::new();
        for (tokens, sms) in [(128, 3), (64, 10), (32, 5), (32, 19), (16, 19), (1, 132)] {
            let step = LinearStep::new(&weights, pick(&all, &(0..tokens).collect::<Vec<_>>())).unwrap();
            let mut layer = hopper_of(Schedule::Fair, sms).prepare_linear(&weights).unwrap();
            let out = verified(layer.as_mut(), &weights, &step).out;
            if whole.is_empty() {
                whole = out;
            } else {
                assert!(whole.starts_with(&out), "{dtype:?}: other bits with {tokens} tokens on {sms} multiprocessors");
            }
        }
    }
}

#[test]
fn schedules_and_multiprocessors_make_no_difference() {
    for (dtype, tokens) in [(OutDtype::Bf16, 4), (OutDtype::F16, 40), (OutDtype::Bf16, 150)] {
        let weights = weights(336, 272, dtype);
        let step = LinearStep::new(&weights, inputs(&weights, tokens)).unwrap();
        let schedules = [Schedule::Fair, Schedule::Worst, Schedule::Seed(1), Schedule::Seed(2)];
        let gpus = schedules.map(hopper).into_iter().chain([1, 132].map(|sms| hopper_of(Schedule::Fair, sms)));
        let outputs: Vec<_> =
            gpus.map(|gpu| verified(gpu.prepare_linear(&weights).unwrap().as_mut(), &weights, &step)).collect();
        assert!(outputs.windows(2).all(|pair| pair[0] == pair[1]), "{tokens} tokens: other bits on another schedule");
    }
}

#[test]
fn a_step_is_one_launch_and_without_tokens_none() {
    let (weights, gpu) = (weights(64, 64, OutDtype::F16), hopper(Schedule::Fair));
    let mut layer = gpu.prepare_linear(&weights).unwrap();
    for tokens in [5, 0] {
        let step = LinearStep::new(&weights, inputs(&weights, tokens)).unwrap();
        verified(layer.as_mut(), &weights, &step);
        assert_eq!(layer.launches(), (tokens > 0).then_some(1));
    }
}
