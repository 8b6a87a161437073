//! Checks layers with FP8 tokens on every backend that computes them and with every instance of the kernel. Linear
//! layers are exact to the bit, MoE layers in every stage up to the activation. A token's bits depend only on the
//! token. Broken PTX must cause faults.

use std::collections::BTreeSet;

use nvfp4::backend::Backend;
use nvfp4::backend::emulated::{Emulated, Fault, FaultKind, Schedule};
use nvfp4::linear::{LinearInputs, LinearOutput, LinearStep, LinearWeights};
use nvfp4::moe::{Activation, LayerShape, MoeInputs, MoeWeights};
use nvfp4::problem::{TokenDtype, TokenFormat};
use nvfp4_tests::instances::sampled_schedules;
use nvfp4_tests::linear;
use nvfp4_tests::moe::{DTYPES, backends, bits, check, hopper, hopper_of, inputs, run, shape, step, verified, weights};
use nvfp4_tests::sabotage::{Sabotage, changed, check_sampled_sabotages, fault_of, lines_of, only_entries};
use rayon::prelude::*;

const ENTRY: &str = "moe_fp8_gated_t16";

/// Makes the weights of a layer with FP8 tokens.
fn fp8_weights(layer: &LayerShape, dtype: TokenDtype) -> MoeWeights<'static> {
    weights(layer, dtype).with_token_format(TokenFormat::Fp8)
}

/// Adds a shared expert with this intermediate size to a layer.
fn with_shared(mut layer: LayerShape, intermediate: Option<usize>) -> LayerShape {
    layer.shared_intermediate = intermediate;
    layer
}

#[test]
fn every_stage_is_right_for_all_tiles_and_k_blocks() {
    // Tiles of 16, 32, 64, 128 and 256 tokens, most of them ragged. The last layer has only whole lines, more than are
    // rounded at once.
    for (index, (tokens, hidden, intermediate, experts, top_k, shared)) in [
        (5, 48, 80, 2, 2, Some(32)),
        (30, 96, 176, 2, 1, None),
        (40, 176, 112, 1, 1, None),
        (90, 80, 272, 1, 1, None),
        (200, 272, 48, 1, 1, None),
        (300, 64, 144, 1, 1, Some(16)),
        (20, 640, 192, 3, 2, None),
    ]
    .into_iter()
    .enumerate()
    {
        let layer = with_shared(shape(hidden, intermediate, experts, top_k), shared);
        let dtype = DTYPES[index % 2];
        println!("{tokens} tokens, {hidden} × {intermediate}, {dtype:?}");
        let weights = fp8_weights(&layer, dtype);
        check("sm_90a", &weights, &step(&weights, inputs(&layer, dtype, tokens)));
    }
}

#[test]
fn every_activation_is_right_with_and_without_biases() {
    let words =
        ["silu-limit=0.75", "gpt-oss=1.702,1.5", "swiglu-step=0.75", "gelu", "situ=1.5,2.5", "relu2-gated", "relu2"];
    let activations = words.map(|word| word.parse::<Activation>().unwrap());
    for (activation, tokens) in activations.into_iter().flat_map(|activation| [(activation, 7), (activation, 140)]) {
        let layer = shape(48, 80, 1, 1).with_activation(activation, tokens == 140);
        println!("{tokens} {activation}");
        let weights = fp8_weights(&layer, TokenDtype::Bf16);
        check("sm_90a", &weights, &step(&weights, inputs(&layer, TokenDtype::Bf16, tokens)));
    }
}

#[test]
fn weights_on_the_input_do_not_change_the_shared_expert() {
    let layer = with_shared(shape(80, 48, 2, 1), Some(32));
    for dtype in DTYPES {
        let weights = fp8_weights(&layer, dtype);
        check("sm_90a", &weights, &step(&weights, MoeInputs { weights_on_input: true, ..inputs(&layer, dtype, 5) }));
    }
}

#[test]
fn bits_of_a_token_do_not_depend_on_other_tokens() {
    let (layer, dtype) = (shape(144, 80, 1, 1), TokenDtype::Bf16);
    let weights = fp8_weights(&layer, dtype);
    let all = inputs(&layer, dtype, 290);
    for backend in backends("sm_90a") {
        let mut prepared = backend.prepare_moe(&weights).unwrap();
        let whole = verified(prepared.as_mut(), &weights, &step(&weights, all.clone())).hidden;
        for tokens in [1, 9, 30, 60, 120, 200] {
            let few = MoeInputs {
                tokens,
                hidden: all.hidden[..tokens * 144].to_vec().into(),
                ids: all.ids[..tokens].to_vec().into(),
                weights: all.weights[..tokens].to_vec().into(),
                ..all.clone()
            };
            let few = run(prepared.as_mut(), &step(&weights, few)).unwrap().hidden;
            assert!(few == whole[..tokens * 144], "{}: {tokens} tokens", backend.name());
        }
        let mut dirty = all.clone();
        for (token, number) in [(1, f32::NAN), (100, f32::INFINITY), (289, f32::NEG_INFINITY)] {
            dirty.hidden.to_mut()[token * 144 + 17] = bits(dtype, number);
        }
        let dirty = verified(prepared.as_mut(), &weights, &step(&weights, dirty)).hidden;
        for (token, (clean, dirty)) in whole.chunks(144).zip(dirty.chunks(144)).enumerate() {
            assert_eq!(clean == dirty, ![1, 100, 289].contains(&token), "{}: token {token}", backend.name());
        }
    }
}

#[test]
fn schedules_do_not_change_the_bits() {
    let (layer, dtype) = (shape(208, 96, 3, 2), TokenDtype::F16);
    let weights = fp8_weights(&layer, dtype);
    let step = step(&weights, inputs(&layer, dtype, 33));
    let of = |schedule| verified(hopper(schedule).prepare_moe(&weights).unwrap().as_mut(), &weights, &step);
    let expected = of(Schedule::Fair);
    for schedule in [Schedule::Worst, Schedule::Seed(1)] {
        assert!(of(schedule) == expected, "{schedule}");
    }
}

/// Runs a step on every schedule and checks that all bits agree. `run` returns the output and the names of the used
/// entries. Returns the used entries of `moe_fp8_sm90`.
fn on_every_schedule<T: PartialEq + Send>(run: impl Fn(Schedule) -> (T, String) + Sync + Send) -> BTreeSet<String> {
    let ran: Vec<_> = sampled_schedules().into_iter().par_bridge().map(run).collect();
    assert!(ran.windows(2).all(|pair| pair[0] == pair[1]), "schedules gave different bits");
    ran[0].1.split(", ").filter(|entry| entry.starts_with("moe_fp8_")).map(str::to_owned).collect()
}

#[test]
fn instances_are_right_on_random_and_worst_schedules() {
    let mut used = BTreeSet::new();
    // Layers with a few tiles of each size. K has whole k-blocks and a partial k-block.
    let layers = [(9, 3), (40, 2), (50, 1), (150, 2), (190, 1), (300, 1)].into_iter().enumerate();
    let activations = [Activation::Silu, Activation::Situ { beta: 1.5, linear: Some(2.5) }];
    for ((index, (tokens, experts)), activation) in layers.flat_map(|of| activations.map(|activation| (of, activation)))
    {
        let layer = with_shared(shape(208, 176, experts, 1), (index == 0).then_some(32));
        let (layer, dtype) = (layer.with_activation(activation, false), DTYPES[index % 2]);
        let weights = fp8_weights(&layer, dtype);
        let step = step(&weights, inputs(&layer, dtype, tokens));
        used.extend(on_every_schedule(|schedule| {
            let mut layer = hopper(schedule).prepare_moe(&weights).unwrap();
            let output = verified(layer.as_mut(), &weights, &step);
            (output, layer.counters().expect("a kernel ran").kernel.clone())
        }));
    }
    // Linear layers with narrow tiles: as many tiles as SMs, or two tiles per SM.
    let weights = linear::with_bias(linear_weights(336, 208, TokenDtype::Bf16), false);
    for (tokens, sms) in [(125, 3), (60, 3), (13, 3), (13, 132)] {
        let step = LinearStep::new(&weights, linear::inputs(&weights, tokens)).unwrap();
        used.extend(on_every_schedule(|schedule| {
            let mut layer = hopper_of(schedule, sms).prepare_linear(&weights).unwrap();
            let output = linear::verified(layer.as_mut(), &weights, &step);
            (output, layer.counters().expect("a kernel ran").kernel.clone())
        }));
    }
    let of_kernel = nvfp4::kernels::ptx("moe_fp8_sm90").expect("a kernel of this name").split(".entry ").skip(1);
    let entries: BTreeSet<_> = of_kernel.map(|text| text[..text.find('(').unwrap()].to_owned()).collect();
    assert_eq!(used, entries);
}

/// Makes the weights of a linear layer `[n, k]` with FP8 tokens.
fn linear_weights(n: usize, k: usize, dtype: TokenDtype) -> LinearWeights<'static> {
    linear::weights(n, k, dtype).with_token_format(TokenFormat::Fp8)
}

/// Checks a linear layer on every backend: the output is right, a rerun gives the same bits, and a GPU needs two
/// launches, or none without tokens.
fn check_linear(weights: &LinearWeights<'_>, inputs: LinearInputs<'_>) {
    let step = LinearStep::new(weights, inputs).expect("inputs of the layer");
    for backend in backends("sm_90a") {
        let mut layer = backend.prepare_linear(weights).unwrap_or_else(|error| panic!("{}: {error}", backend.name()));
        let output = linear::verified(layer.as_mut(), weights, &step);
        assert!(
            linear::verified(layer.as_mut(), weights, &step) == output,
            "{}: a rerun gave different bits",
            backend.name()
        );
        if backend.name() != "cpu" {
            assert_eq!(layer.launches(), (step.tokens() > 0).then_some(2), "{}", backend.name());
        }
    }
}

#[test]
fn linear_layer_of_any_size_is_right() {
    // N: less than a slab, and more than a tile. K: all kinds of k-blocks. Tokens: not always a multiple of 8. With and
    // without a bias.
    for (index, (tokens, n, k)) in
        [(1, 16, 16), (3, 80, 144), (16, 144, 128), (17, 272, 272), (60, 48, 176), (0, 32, 32), (130, 400, 112)]
            .into_iter()
            .enumerate()
    {
        let dtype = DTYPES[index % 2];
        let weights = linear_weights(n, k, dtype);
        check_linear(&weights, linear::inputs(&weights, tokens));
        let biased = linear::with_bias(weights, index % 3 == 0);
        check_linear(&biased, linear::inputs(&biased, tokens));
    }
}

#[test]
fn linear_layer_handles_token_gaps_and_nan() {
    for (dtype, stride) in DTYPES.into_iter().zip([88, 99]) {
        let weights = linear_weights(48, 80, dtype);
        let near = linear::inputs(&weights, 21);
        let nan = bits(dtype, f32::NAN);
        let far = near.x.chunks(80).flat_map(|token| [token, &vec![nan; stride - 80]].concat());
        check_linear(&weights, LinearInputs { x: far.collect::<Vec<_>>().into(), stride, ..near.clone() });
        let mut dirty = near.clone();
        for (token, number) in [(1, f32::NAN), (9, f32::INFINITY), (20, f32::NEG_INFINITY)] {
            dirty.x.to_mut()[token * 80 + 17] = bits(dtype, number);
        }
        let steps = [near, dirty].map(|inputs| LinearStep::new(&weights, inputs).expect("inputs of the layer"));
        for backend in backends("sm_90a") {
            let mut layer = backend.prepare_linear(&weights).unwrap();
            let [clean, dirty] = steps.each_ref().map(|step| linear::verified(layer.as_mut(), &weights, step).out);
            for (token, (clean, dirty)) in clean.chunks(48).zip(dirty.chunks(48)).enumerate() {
                assert_eq!(clean == dirty, ![1, 9, 20].contains(&token), "{}: token {token}", backend.name());
                assert!(clean == dirty || dirty.iter().all(|&bits| dtype.decode(bits).is_nan()), "token {token}");
            }
        }
    }
}

#[test]
fn bits_of_a_linear_layer_do_not_depend_on_tiles() {
    let weights = linear::with_bias(linear_weights(336, 208, TokenDtype::Bf16), false);
    let all = linear::inputs(&weights, 300);
    let first = |tokens: usize| LinearInputs { tokens, x: all.x[..tokens * 208].to_vec().into(), stride: 208 };
    let mut whole = Vec::new();
    // Tiles of 256, 128, 64, 32 and 16 tokens. Tiles of 128, 64 and 16 tokens are wide and narrow.
    for (tokens, schedule, sms) in [
        (300, Schedule::Fair, 6),
        (300, Schedule::Worst, 1),
        (125, Schedule::Worst, 2),
        (125, Schedule::Worst, 3),
        (60, Schedule::Seed(1), 2),
        (60, Schedule::Seed(1), 3),
        (30, Schedule::Worst, 2),
        (13, Schedule::Seed(2), 2),
        (13, Schedule::Seed(2), 132),
    ] {
        let step = LinearStep::new(&weights, first(tokens)).unwrap();
        let mut layer = hopper_of(schedule, sms).prepare_linear(&weights).unwrap();
        let out = linear::verified(layer.as_mut(), &weights, &step).out;
        if whole.is_empty() {
            whole = out;
        } else {
            assert!(whole.starts_with(&out), "different bits with {tokens} tokens, schedule {schedule}, {sms} SMs");
        }
    }
}

/// Returns the kernel's text with only the entries whose names end with `ending`.
fn ptx(ending: &str) -> String {
    only_entries(nvfp4::kernels::ptx("moe_fp8_sm90").expect("a kernel of this name"), |name| name.ends_with(ending))
}

/// Rows of three experts: they need MMAs for 8 tokens and for 16.
const ROWS: [usize; 3] = [3, 11, 1];

/// Returns the fault that stops a layer with a PTX text of the kernel. One CTA computes many tiles, all of them ragged.
fn fault(layer: &LayerShape, rows: [usize; 3], schedule: Schedule, ptx: &str) -> Option<Fault> {
    let gpu: Emulated = hopper_of(schedule, 1).with_ptx(ptx).unwrap();
    let weights = fp8_weights(layer, TokenDtype::F16);
    let ids: Vec<i32> = (0..).zip(rows).flat_map(|(expert, rows)| vec![expert; rows]).collect();
    let inputs = MoeInputs { ids: ids.into(), ..inputs(layer, TokenDtype::F16, 15) };
    fault_of(run(gpu.prepare_moe(&weights).unwrap().as_mut(), &step(&weights, inputs)))
}

#[test]
fn missing_wait_for_the_token_grid_is_found() {
    let ptx = ptx("_t16");
    let waits: Vec<_> = lines_of(&ptx, ENTRY, "griddepcontrol.wait").into_iter().map(|(line, _)| (line, "")).collect();
    let fault = fault(&shape(336, 208, 3, 1), ROWS, Schedule::Worst, &changed(&ptx, &waits))
        .expect("a fault, as no warp waits");
    assert_eq!(fault.kind, FaultKind::GridNotAwaited, "{fault}");
    assert!(fault.to_string().contains("`moe_quantize_f16`"), "{fault}");
}

#[test]
fn removing_any_sync_copy_or_mma_is_found() {
    const SABOTAGES: [Sabotage; 9] = [
        Sabotage::leave_out("mbarrier.init", 54),
        // The spare wait is for a free tile slot: at the start all slots are free.
        Sabotage::do_not_wait(14).spare(1),
        Sabotage::leave_out("mbarrier.arrive", 14),
        Sabotage::leave_out("cp.async.bulk.shared", 4),
        Sabotage::leave_out("fence.proxy.async", 4),
        Sabotage::leave_out("wgmma.fence", 2),
        Sabotage::leave_out("wgmma.wait_group.sync.aligned 1", 2),
        Sabotage::leave_out("wgmma.wait_group.sync.aligned 0", 2),
        Sabotage::leave_out("bar.sync", 1),
    ];
    // Each mainloop has a wait that only the CTA's first tile needs. If K is one k-block, tiles and their scales could
    // run ahead of the free slots; that takes many tiles or a schedule that delays the other warps.
    let (long, short, wide) = (shape(848, 496, 3, 1), shape(80, 496, 3, 1), shape(80, 2000, 3, 1));
    let (worst, fair) = (Schedule::Worst, Schedule::Fair);
    let inputs = [
        (&long, ROWS, worst),
        (&long, [11, 3, 1], worst),
        (&short, ROWS, worst),
        (&short, ROWS, fair),
        (&short, ROWS, Schedule::Seed(1)),
        (&wide, ROWS, fair),
    ];
    let is_found =
        |ptx: &str| inputs.iter().any(|&(layer, rows, schedule)| fault(layer, rows, schedule, ptx).is_some());
    check_sampled_sabotages(&ptx("_t16"), ENTRY, &SABOTAGES, is_found);
}

#[test]
fn removing_any_sync_of_alternating_warpgroups_is_found() {
    const SABOTAGES: [Sabotage; 5] = [
        Sabotage::do_not_wait(16).spare(6),
        Sabotage::leave_out("mbarrier.arrive", 16).spare(5),
        Sabotage::leave_out("wgmma.fence", 2),
        Sabotage::leave_out("wgmma.wait_group.sync.aligned 1", 2),
        Sabotage::leave_out("wgmma.wait_group.sync.aligned 0", 2),
    ];
    // A CTA has one narrow tile with more k-blocks than stages. Spare instructions: those that only a second tile
    // needs, and the wait for a turn in each of two mainloops, because no data depend on it.
    let is_found = |ptx: &str| {
        [13, 5].into_iter().any(|tokens| {
            let weights = linear_weights(1008, 2640, TokenDtype::F16);
            let step = LinearStep::new(&weights, linear::inputs(&weights, tokens)).unwrap();
            let gpu = hopper_of(Schedule::Worst, 8).with_ptx(ptx).unwrap();
            let mut layer = gpu.prepare_linear(&weights).unwrap();
            fault_of(layer.execute(&step, &mut LinearOutput::new(&step))).is_some()
        })
    };
    check_sampled_sabotages(&ptx("_t16_narrow"), "moe_fp8_plain_t16_narrow", &SABOTAGES, is_found);
}
