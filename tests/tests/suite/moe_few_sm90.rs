//! MoE layers with few tokens on Hopper: right for any routing, the same bits as all other kernels, and broken PTX must
//! cause faults or wrong outputs.

use std::collections::BTreeSet;

use nvfp4::backend::Backend;
use nvfp4::backend::emulated::{Emulated, Fault, Schedule, Sums};
use nvfp4::moe::{Activation, LayerShape, MoeInputs, MoeOutput, MoeWeights};
use nvfp4::problem::TokenDtype;
use nvfp4_tests::moe::{DTYPES, check, emulated, hopper_of, inputs, run, shape, step, verified, weights};
use nvfp4_tests::sabotage::{Sabotage, check_sampled_sabotages, fault_of, only_entries};

/// Entries for few tokens.
const NAMES: [&str; 4] = ["moe_few_gate_up_f16", "moe_few_gate_up_bf16", "moe_few_down_f16", "moe_few_down_bf16"];

/// Entries for a single token, used if there are more than a few strips per SM.
const ONE_NAMES: [&str; 4] = ["moe_one_gate_up_f16", "moe_one_gate_up_bf16", "moe_one_down_f16", "moe_one_down_bf16"];

/// Returns the kernel's text with only the entries of these names.
fn ptx(names: [&str; 4]) -> String {
    only_entries(nvfp4::kernels::ptx("moe_few_sm90").expect("a kernel of this name"), |name| names.contains(&name))
}

/// Makes inputs of `tokens` tokens that name these experts, repeated.
fn naming(layer: &LayerShape, dtype: TokenDtype, tokens: usize, ids: &[i32]) -> MoeInputs<'static> {
    let ids = ids.iter().copied().cycle().take(tokens * layer.top_k).collect::<Vec<_>>();
    MoeInputs { ids: ids.into(), ..inputs(layer, dtype, tokens) }
}

/// Runs a layer on an emulated Hopper GPU, checks every stage, and checks that the entries [`NAMES`] ran.
fn few(layer: &LayerShape, dtype: TokenDtype, inputs: MoeInputs<'_>, schedule: Schedule, sms: u32) -> MoeOutput {
    with(NAMES, layer, dtype, inputs, schedule, sms)
}

/// Same as [`few`], for a single token and the entries [`ONE_NAMES`].
fn one(layer: &LayerShape, dtype: TokenDtype, inputs: MoeInputs<'_>, schedule: Schedule, sms: u32) -> MoeOutput {
    with(ONE_NAMES, layer, dtype, inputs, schedule, sms)
}

/// Same as [`few`], for these entries of the token type.
fn with(
    names: [&str; 4],
    layer: &LayerShape,
    dtype: TokenDtype,
    inputs: MoeInputs<'_>,
    schedule: Schedule,
    sms: u32,
) -> MoeOutput {
    let weights = weights(layer, dtype);
    let step = step(&weights, inputs);
    let mut prepared = hopper_of(schedule, sms).prepare_moe(&weights).unwrap();
    let output = verified(prepared.as_mut(), &weights, &step);
    let used: BTreeSet<_> = prepared.counters().expect("a kernel ran").kernel.split(", ").map(str::to_owned).collect();
    let of_type = names.into_iter().filter(|name| name.ends_with("_bf16") == (dtype == TokenDtype::Bf16));
    assert_eq!(used, of_type.map(str::to_owned).collect());
    output
}

#[test]
fn all_kinds_of_k_blocks_and_strips_are_right() {
    for (hidden, intermediate) in [(16, 16), (96, 80), (176, 720), (944, 176), (1024, 96), (272, 96)] {
        let layer = shape(hidden, intermediate, 6, 2);
        for dtype in DTYPES {
            few(&layer, dtype, inputs(&layer, dtype, 3), Schedule::Fair, 3);
        }
    }
}

#[test]
fn single_token_is_right_for_any_first_stages() {
    // The first stages of down hold k-blocks of several strips or of one strip, whole and partial.
    for (hidden, intermediate) in [(16, 48), (96, 176), (944, 720), (1024, 128), (2064, 96), (272, 1040)] {
        let layer = shape(hidden, intermediate, 6, 2);
        for dtype in DTYPES {
            one(&layer, dtype, inputs(&layer, dtype, 1), Schedule::Fair, 1);
        }
    }
    let layer = shape(144, 272, 6, 4);
    for ids in [&[5, 1, 5, 3][..], &[-1, 2, 7, 2], &[-1], &[0]] {
        one(&layer, TokenDtype::Bf16, naming(&layer, TokenDtype::Bf16, 1, ids), Schedule::Fair, 3);
    }
}

#[test]
fn maximum_repeated_and_missing_choices_are_right() {
    let dtype = TokenDtype::Bf16;
    let every: Vec<i32> = (0..64).collect();
    for (top_k, tokens, experts, ids) in [
        (8, 8, 64, &every[..]),
        (8, 8, 64, &[1]),
        (32, 2, 64, &[0, 32, 0, 7, -1, 64, 32]),
        (1, 8, 8, &[2, 0, 2]),
        (3, 7, 21, &[4, 4, -7, i32::MAX, 1, 4]),
        (2, 5, 10, &[-1]),
    ] {
        let layer = shape(48, 32, experts, top_k);
        few(&layer, dtype, naming(&layer, dtype, tokens, ids), Schedule::Fair, 3);
    }
}

#[test]
fn expert_maps_with_missing_and_shared_targets_are_right() {
    let layer = shape(80, 48, 3, 2);
    for dtype in DTYPES {
        let weights = weights(&layer, dtype).with_expert_map(vec![2, -1, 0, 1, -1, 1]).unwrap();
        for ids in [&[0, 1, 2, 2, -1, 5, 1, 0][..], &[3, 5], &[1, 4]] {
            check("sm_90a", &weights, &step(&weights, naming(&layer, dtype, 3, ids)));
        }
    }
}

#[test]
fn every_activation_is_right_with_and_without_biases() {
    let gpt_oss = Activation::GptOss { alpha: 1.702, limit: 1.5 };
    let activations = [Activation::Silu, Activation::SiluLimit { limit: 0.75 }, Activation::GeluTanh, gpt_oss];
    for (dtype, activation) in DTYPES.into_iter().cycle().zip(activations) {
        for biases in [false, true] {
            let layer = shape(80, 48, 8, 2).with_activation(activation, biases);
            few(&layer, dtype, inputs(&layer, dtype, 4), Schedule::Fair, 3);
        }
    }
}

#[test]
fn bits_match_other_kernels_and_larger_batches() {
    let layer = shape(272, 208, 24, 3);
    for dtype in DTYPES {
        let weights = weights(&layer, dtype);
        let all = inputs(&layer, dtype, 20);
        let part = |tokens: usize| MoeInputs {
            tokens,
            hidden: all.hidden[..tokens * layer.hidden].to_vec().into(),
            ids: all.ids[..tokens * layer.top_k].to_vec().into(),
            weights: all.weights[..tokens * layer.top_k].to_vec().into(),
            ..all.clone()
        };
        let of = |arch, tokens, sums| {
            let gpu = emulated(arch, Schedule::Fair).with_sums(sums);
            run(gpu.prepare_moe(&weights).unwrap().as_mut(), &step(&weights, part(tokens))).unwrap()
        };
        // Compares every stage with the portable kernels, whose GPUs add in other steps, and the output with Hopper's
        // kernels for many tokens.
        for tokens in [1, 8] {
            assert!(
                of("sm_90a", tokens, Sums::Exact) == of("sm_80", tokens, Sums::Exact),
                "{dtype:?}: sm_80 gives different bits for {tokens} tokens"
            );
            let many = of("sm_90a", 20, Sums::Card).hidden;
            assert!(
                of("sm_90a", tokens, Sums::Card).hidden == many[..tokens * layer.hidden],
                "{dtype:?}: a batch of 20 tokens gives different bits"
            );
        }
    }
}

#[test]
fn schedules_and_sms_do_not_change_the_bits() {
    let layer = shape(272, 144, 15, 3);
    for dtype in DTYPES {
        let schedules = (0..6).map(Schedule::Seed).chain([Schedule::Fair, Schedule::Worst]);
        let on = schedules.map(|schedule| (schedule, 3)).chain([1, 132].map(|sms| (Schedule::Fair, sms)));
        let outputs: Vec<_> =
            on.map(|(schedule, sms)| few(&layer, dtype, inputs(&layer, dtype, 5), schedule, sms)).collect();
        assert!(outputs.windows(2).all(|pair| pair[0] == pair[1]), "schedules gave different bits");
    }
}

#[test]
fn single_token_has_the_same_bits_on_every_schedule() {
    let layer = shape(1168, 144, 15, 3);
    for dtype in DTYPES {
        let schedules = (0..6).map(Schedule::Seed).chain([Schedule::Fair, Schedule::Worst]);
        let on = schedules.map(|schedule| (schedule, 3)).chain([1, 5].map(|sms| (Schedule::Fair, sms)));
        let few = few(&layer, dtype, inputs(&layer, dtype, 1), Schedule::Fair, 132);
        for (schedule, sms) in on {
            let one = one(&layer, dtype, inputs(&layer, dtype, 1), schedule, sms);
            assert!(one == few, "different bits with {schedule:?} on {sms} SMs");
        }
    }
}

/// Hidden and intermediate sizes. Over both layers, each loop over whole k-blocks of gate and up has pairs of k-blocks
/// and a single one. The first hidden size ends with a partial k-block of the largest size.
const LONG: [[usize; 2]; 2] = [[992, 736], [1024, 736]];

/// Same as [`LONG`], for the entries for a single token: they have one more stage, and down has such loops too.
const ONE_LONG: [[usize; 2]; 2] = [[1120, 1120], [1152, 1152]];

/// Makes a layer with these hidden and intermediate sizes, and its inputs. The strips wrap around a warp's stages.
fn long(
    dtype: TokenDtype,
    [hidden, intermediate]: [usize; 2],
    tokens: usize,
) -> (MoeWeights<'static>, MoeInputs<'static>) {
    let layer = shape(hidden, intermediate, 6, 2);
    (weights(&layer, dtype), naming(&layer, dtype, tokens, &[1, 0]))
}

/// Returns the fault that stops the layer with a PTX text of the kernel on one SM.
fn fault(ptx: &str, tokens: usize) -> Option<Fault> {
    let (weights, inputs) = long(TokenDtype::F16, LONG[0], tokens);
    let gpu = hopper_of(Schedule::Worst, 1).with_ptx(ptx).unwrap();
    fault_of(run(gpu.prepare_moe(&weights).unwrap().as_mut(), &step(&weights, inputs)))
}

#[test]
fn removing_any_wait_or_barrier_is_found() {
    // The grid that gate and up wait for is not part of the layer, so `griddepcontrol.wait` is only removed from down.
    let sabotages = [Sabotage::leave_out("griddepcontrol.wait", 1), Sabotage::leave_out("bar.sync", 1)];
    for (names, tokens) in [(NAMES, 3), (ONE_NAMES, 1)] {
        let is_found = |ptx: &str| fault(ptx, tokens).is_some();
        check_sampled_sabotages(&ptx(names), names[0], &sabotages[1..], is_found);
        check_sampled_sabotages(&ptx(names), names[2], &sabotages, is_found);
    }
}

#[test]
fn removing_any_mma_or_wait_is_found() {
    for (names, tokens, columns) in [(NAMES, 3, LONG), (ONE_NAMES, 1, ONE_LONG)] {
        let layers = columns.map(|columns| long(TokenDtype::F16, columns, tokens));
        let steps = layers.each_ref().map(|(weights, inputs)| step(weights, inputs.clone()));
        let gpu = hopper_of(Schedule::Worst, 1);
        let outputs = |gpu: &Emulated| {
            [0, 1].map(|index| {
                let output = run(gpu.prepare_moe(&layers[index].0).unwrap().as_mut(), &steps[index]);
                output.ok().map(|output| output.hidden)
            })
        };
        let right = outputs(&gpu);
        assert!(right.iter().all(Option::is_some));
        for entry in [names[0], names[2]] {
            // Two MMAs are spare: a partial k-block has no fourth word, so they add zeros.
            // With a single token, down waits for all first stages at once: each warp has one strip here.
            let waits = (names == NAMES).then_some(("cp.async.wait_group", 3, 0));
            for (instruction, least, spare) in [("mma.sync", 24, 2)].into_iter().chain(waits) {
                let sabotage = Sabotage::leave_out(instruction, least).spare(spare);
                let is_found = |ptx: &str| outputs(&gpu.clone().with_ptx(ptx).unwrap()) != right;
                check_sampled_sabotages(&ptx(names), entry, &[sabotage], is_found);
            }
        }
    }
}
