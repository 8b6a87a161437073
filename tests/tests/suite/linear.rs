//! Checks linear layers on every backend: every element is right, and a token's bits depend only on the token. Broken
//! PTX must cause faults or wrong outputs.

use nvfp4::Error;
use nvfp4::backend::Backend;
use nvfp4::backend::emulated::{Schedule, Sums};
use nvfp4::linear::compare::compare;
use nvfp4::linear::{LinearInputs, LinearOutput, LinearStep, LinearWeights};
use nvfp4::problem::{TokenDtype, TokenFormat};
use nvfp4_tests::instances::sampled_schedules;
use nvfp4_tests::linear::{check, inputs, verified, weights, with_bias};
use nvfp4_tests::moe::{DTYPES, backends, bits, emulated, emulated_of};
use nvfp4_tests::sabotage::{Sabotage, changed, check_sampled_sabotages, is_found, lines_of, only_entries};
use nvfp4_tests::{is_full, on_architectures, sampled};
use rayon::prelude::*;

on_architectures! {
    sm_80 sm_90a sm_100f sm_120f;
    {
        ragged_panels_tiles_and_k_blocks_are_right
        bias_in_f32_and_token_type_is_right
        tokens_may_have_gaps_between_them
        infinities_nan_and_overflow_stay_within_their_token
        bits_of_a_token_do_not_depend_on_the_batch
        every_instance_gives_the_same_bits
        schedules_and_sms_do_not_change_the_bits
        step_has_the_expected_number_of_launches
    }
}

/// Returns the layer in each token format that is tested on an architecture: 16-bit tokens on all but sm_100f, NVFP4
/// tokens on sm_100f and sm_120f. NVFP4 tokens have an input scale in f16, and one global scale per token in bf16.
fn multiplied(arch: &str, weights: LinearWeights<'static>) -> Vec<LinearWeights<'static>> {
    let nvfp4 = || {
        let nvfp4 = weights.clone().with_token_format(TokenFormat::Nvfp4);
        match weights.sizes().dtype {
            TokenDtype::F16 => nvfp4.with_input_scale(1.0 / 700.0).expect("the scale is in range"),
            TokenDtype::Bf16 => nvfp4,
        }
    };
    match arch {
        "sm_100f" => vec![nvfp4()],
        "sm_120f" => vec![nvfp4(), weights],
        _ => vec![weights],
    }
}

fn ragged_panels_tiles_and_k_blocks_are_right(arch: &str) {
    // N: less than a panel, and more than a tile of two or four panels. K: less than a k-block, a k-block and a half,
    // several.
    for (tokens, n, k) in
        [(1, 16, 16), (3, 80, 144), (16, 144, 128), (17, 272, 272), (64, 48, 2 * 128 + 64), (0, 32, 32)]
    {
        for dtype in DTYPES {
            for weights in multiplied(arch, weights(n, k, dtype)) {
                check(arch, &weights, inputs(&weights, tokens));
            }
        }
    }
}

fn bias_in_f32_and_token_type_is_right(arch: &str) {
    for (dtype, of_tokens) in [(TokenDtype::F16, true), (TokenDtype::Bf16, true), (TokenDtype::Bf16, false)] {
        // Three panels: tiles of 128 and 256 columns extend beyond N.
        for tokens in [2, 70, 300] {
            for weights in multiplied(arch, with_bias(weights(176, 80, dtype), of_tokens)) {
                check(arch, &weights, inputs(&weights, tokens));
            }
        }
    }
}

fn tokens_may_have_gaps_between_them(arch: &str) {
    for (dtype, stride) in DTYPES.into_iter().zip([88, 99]) {
        for weights in multiplied(arch, weights(48, 80, dtype)) {
            let near = inputs(&weights, 5);
            let nan = bits(dtype, f32::NAN);
            let far = near.x.chunks(80).flat_map(|token| [token, &vec![nan; stride - 80]].concat());
            check(arch, &weights, LinearInputs { x: far.collect::<Vec<_>>().into(), stride, ..near });
        }
    }
}

fn infinities_nan_and_overflow_stay_within_their_token(arch: &str) {
    for weights in DTYPES.into_iter().flat_map(|dtype| multiplied(arch, weights(80, 112, dtype))) {
        let dtype = weights.sizes().dtype;
        let clean = inputs(&weights, 9);
        let mut dirty = clean.clone();
        let largest = if dtype == TokenDtype::F16 { 65504.0 } else { f32::INFINITY };
        for (token, number) in [(1, f32::NAN), (4, f32::INFINITY), (8, largest)] {
            dirty.x.to_mut()[token * 112..][..112].fill(bits(dtype, number));
        }
        let [clean, dirty] = [clean, dirty].map(|inputs| LinearStep::new(&weights, inputs).unwrap());
        for backend in backends(arch) {
            let mut layer = backend.prepare_linear(&weights).unwrap();
            let clean = verified(layer.as_mut(), &weights, &clean).out;
            let dirty = verified(layer.as_mut(), &weights, &dirty).out;
            for (token, (clean, dirty)) in clean.chunks(80).zip(dirty.chunks(80)).enumerate() {
                assert_eq!(clean == dirty, ![1, 4, 8].contains(&token), "{}: token {token}", backend.name());
            }
        }
    }
}

/// Returns the tokens at these indices, in this order.
fn pick(inputs: &LinearInputs<'_>, places: &[usize]) -> LinearInputs<'static> {
    let rows = places.iter().flat_map(|&place| inputs.x[place * inputs.stride..][..inputs.stride].to_vec());
    LinearInputs { tokens: places.len(), x: rows.collect::<Vec<_>>().into(), stride: inputs.stride }
}

fn bits_of_a_token_do_not_depend_on_the_batch(arch: &str) {
    for weights in DTYPES.into_iter().flat_map(|dtype| multiplied(arch, with_bias(weights(144, 208, dtype), true))) {
        let all = inputs(&weights, 130);
        for backend in backends(arch) {
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
                    assert!(bits == expected, "{}: token {place} has different bits in another batch", backend.name());
                }
            }
        }
    }
}

fn every_instance_gives_the_same_bits(arch: &str) {
    // The plan chooses each instance for one of these pairs of tokens and SMs. A test of the plan checks this.
    for weights in DTYPES.into_iter().flat_map(|dtype| multiplied(arch, with_bias(weights(592, 208, dtype), false))) {
        let (all, format) = (inputs(&weights, 200), weights.sizes().token_format.name());
        let mut whole = Vec::new();
        for (tokens, sms) in [
            (200, 1),
            (128, 3),
            (128, 1),
            (128, 14),
            (128, 7),
            (64, 10),
            (32, 10),
            (32, 5),
            (32, 19),
            (16, 5),
            (16, 19),
            (1, 132),
        ] {
            let step = LinearStep::new(&weights, pick(&all, &(0..tokens).collect::<Vec<_>>())).unwrap();
            let mut layer = emulated_of(arch, Schedule::Fair, sms).prepare_linear(&weights).unwrap();
            let out = verified(layer.as_mut(), &weights, &step).out;
            if whole.is_empty() {
                whole = out;
            } else {
                assert!(whole.starts_with(&out), "{format}: different bits with {tokens} tokens on {sms} SMs");
            }
        }
    }
}

fn schedules_and_sms_do_not_change_the_bits(arch: &str) {
    let layers = [(TokenDtype::Bf16, 4), (TokenDtype::F16, 40), (TokenDtype::Bf16, 150)].map(|(dtype, tokens)| {
        let layers = multiplied(arch, weights(336, 272, dtype));
        layers.into_iter().map(move |weights| (weights, tokens))
    });
    for (weights, tokens) in layers.into_iter().flatten() {
        let step = LinearStep::new(&weights, inputs(&weights, tokens)).unwrap();
        let schedules = [Schedule::Fair, Schedule::Worst, Schedule::Seed(1), Schedule::Seed(2)];
        let gpus = schedules
            .map(|schedule| emulated(arch, schedule))
            .into_iter()
            .chain([1, 132].map(|sms| emulated_of(arch, Schedule::Fair, sms)));
        let outputs: Vec<_> =
            gpus.map(|gpu| verified(gpu.prepare_linear(&weights).unwrap().as_mut(), &weights, &step)).collect();
        assert!(outputs.windows(2).all(|pair| pair[0] == pair[1]), "{tokens} tokens: schedules gave different bits");
    }
}

fn step_has_the_expected_number_of_launches(arch: &str) {
    for weights in multiplied(arch, weights(64, 64, TokenDtype::F16)) {
        let gpu = emulated(arch, Schedule::Fair);
        let mut layer = gpu.prepare_linear(&weights).unwrap();
        for tokens in [5, 0] {
            let step = LinearStep::new(&weights, inputs(&weights, tokens)).unwrap();
            verified(layer.as_mut(), &weights, &step);
            // A launch before the product quantizes NVFP4 tokens. Without tokens there is no launch.
            let launches = if weights.sizes().token_format == TokenFormat::Nvfp4 { 2 } else { 1 };
            assert_eq!(layer.launches(), (tokens > 0).then_some(launches));
        }
    }
}

#[test]
fn every_architecture_gives_the_same_bits_with_exact_sums() {
    for dtype in DTYPES {
        let weights = with_bias(weights(144, 208, dtype), false);
        let step = LinearStep::new(&weights, inputs(&weights, 21)).unwrap();
        let [portable, hopper, consumer] = ["sm_80", "sm_90a", "sm_120f"].map(|arch| {
            let mut layer = emulated(arch, Schedule::Fair).with_sums(Sums::Exact).prepare_linear(&weights).unwrap();
            verified(layer.as_mut(), &weights, &step)
        });
        assert!(portable == consumer, "{dtype:?}: bits of sm_80 and sm_120f differ");
        assert!(portable == hopper, "{dtype:?}: bits of sm_80 and sm_90a differ");
    }
}

/// Runs a layer with a PTX text of the Hopper kernel on the worst schedule and returns the number of wrong elements. K
/// wraps around all stages. The instance decodes weights to shared memory.
fn broken_decoded(ptx: &str) -> Result<usize, Error> {
    let weights = weights(592, LONG_K, TokenDtype::F16);
    let step = LinearStep::new(&weights, inputs(&weights, 64)).unwrap();
    let gpu = emulated_of("sm_90a", Schedule::Worst, 10).with_ptx(ptx).unwrap();
    let mut output = LinearOutput::new(&step);
    let mut layer = gpu.prepare_linear(&weights).unwrap();
    layer.execute(&step, &mut output)?;
    assert_eq!(layer.counters().expect("a kernel ran").kernel, DECODED);
    Ok(compare(&weights, &step, &output).mismatches)
}

/// Entry of the instance that decodes weights to shared memory.
const DECODED: &str = "linear_f16_t64_decoded";

#[test]
fn removing_any_sync_copy_or_mma_of_decoded_weights_is_found() {
    // Spare instructions: four more mainloops are for fewer tokens and do not run here, and a CTA's only tile does not
    // need to release its last buffer.
    const SABOTAGES: [Sabotage; 6] = [
        Sabotage::leave_out("mbarrier.init", 4),
        Sabotage::do_not_wait(9).spare(4),
        Sabotage::leave_out("mbarrier.arrive", 14).spare(4 * 2 + 1),
        Sabotage::leave_out("cp.async.bulk", 3),
        Sabotage::leave_out("fence.proxy.async", 1),
        Sabotage::leave_out("wgmma.wait_group", 10).spare(4 * 2),
    ];
    // Only the mainloop for 64 tokens has these MMAs.
    const PRODUCTS: [Sabotage; 2] =
        [Sabotage::leave_out("stmatrix", 8), Sabotage::leave_out("wgmma.mma_async.sync.aligned.m64n64k16", 8)];
    let ptx = nvfp4::kernels::ptx("linear_sm90").expect("a kernel of this name");
    let ptx = only_entries(ptx, |name| name == DECODED);
    check_sampled_sabotages(&ptx, DECODED, &SABOTAGES, |ptx| is_found(broken_decoded(ptx), |wrong| wrong > 0));
    check_sampled_sabotages(&ptx, DECODED, &PRODUCTS, |ptx| is_found(broken_decoded(ptx), |wrong| wrong > 0));
}

/// A kernel whose MMAs are warp-wide, with the tested instances.
struct ByWarp {
    kernel: &'static str,
    arch: &'static str,
    /// K with more k-blocks than an instance has stages. The last k-block and the last span are partial.
    k: usize,
    /// Name of each instance, and a number of tokens and of SMs for which the plan chooses it in a layer of [`COLUMNS`]
    /// columns.
    instances: &'static [(&'static str, usize, u32)],
}

const CONSUMER: ByWarp = ByWarp { kernel: "linear_sm120", arch: "sm_120f", k: LONG_K, instances: &INSTANCES };
const PORTABLE: ByWarp = ByWarp { kernel: "linear_sm80", arch: "sm_80", k: LONG_K, instances: &INSTANCES };
/// The Hopper kernel with its warp-wide instances.
const HOPPER: ByWarp = ByWarp {
    kernel: "linear_sm90",
    arch: "sm_90a",
    k: 2 * LONG_K - 16,
    instances: &[("mma8", 1, 4), ("mma16", 16, 4), ("mma32", 32, 4), ("mma32_s8", 32, 2)],
};

/// Instances of the kernels for sm_80 and sm_120.
const INSTANCES: [(&str, usize, u32); 4] = [("t8", 1, 3), ("t16", 16, 3), ("t32", 32, 1), ("t64", 64, 1)];

/// N: four panels, the last one partial.
const COLUMNS: usize = 240;

/// K with more k-blocks than an instance has stages. The last k-block is partial.
const LONG_K: usize = 1616;

#[test]
fn sm_120_instances_are_right_on_random_and_worst_schedules() {
    check_schedules(&CONSUMER);
}

#[test]
fn sm_80_instances_are_right_on_random_and_worst_schedules() {
    check_schedules(&PORTABLE);
}

#[test]
fn sm_90_mma_instances_are_right_on_random_and_worst_schedules() {
    check_schedules(&HOPPER);
}

fn check_schedules(of: &ByWarp) {
    for (dtype, &(name, tokens, sms)) in
        DTYPES.into_iter().flat_map(|dtype| of.instances.iter().map(move |of| (dtype, of)))
    {
        let weights = with_bias(weights(COLUMNS, of.k, dtype), false);
        let step = LinearStep::new(&weights, inputs(&weights, tokens)).unwrap();
        let outputs: Vec<_> = sampled_schedules()
            .into_par_iter()
            .map(|schedule| {
                let mut layer = emulated_of(of.arch, schedule, sms).prepare_linear(&weights).unwrap();
                let output = verified(layer.as_mut(), &weights, &step);
                let entry = &layer.counters().expect("a kernel ran").kernel;
                assert_eq!(*entry, of.entry(name, dtype));
                output
            })
            .collect();
        assert!(outputs.windows(2).all(|pair| pair[0] == pair[1]), "{name}: schedules gave different bits");
    }
}

impl ByWarp {
    fn entry(&self, instance: &str, dtype: TokenDtype) -> String {
        match self.kernel {
            "linear_sm90" => match instance.split_once('_') {
                Some((tokens, stages)) => format!("linear_{tokens}_{}_{stages}", dtype.name()),
                None => format!("linear_{instance}_{}", dtype.name()),
            },
            kernel => format!("{kernel}_{}_{instance}", dtype.name()),
        }
    }

    /// Returns the kernel's PTX with one entry.
    fn ptx_of(&self, entry: &str) -> String {
        only_entries(nvfp4::kernels::ptx(self.kernel).expect("a kernel of this name"), |name| name == entry)
    }

    /// Runs a layer with a PTX text of the kernel on the worst schedule and returns the number of wrong elements. K
    /// wraps around all stages.
    fn broken(&self, ptx: &str, (_, tokens, sms): (&str, usize, u32)) -> Result<usize, Error> {
        let weights = weights(COLUMNS, self.k, TokenDtype::F16);
        let step = LinearStep::new(&weights, inputs(&weights, tokens)).unwrap();
        let gpu = emulated_of(self.arch, Schedule::Worst, sms).with_ptx(ptx).unwrap();
        let mut output = LinearOutput::new(&step);
        gpu.prepare_linear(&weights).unwrap().execute(&step, &mut output)?;
        Ok(compare(&weights, &step, &output).mismatches)
    }

    /// Checks that an instance with any instruction of a kind removed gives wrong values or a fault. For `mma.sync`
    /// only wrong values count.
    fn check_left_out(&self, instance: (&str, usize, u32), instruction: &str, least: usize) {
        let entry = self.entry(instance.0, TokenDtype::F16);
        let ptx = self.ptx_of(&entry);
        let lines = lines_of(&ptx, &entry, instruction);
        assert!(lines.len() >= least, "found {} of `{instruction}`, expected at least {least}", lines.len());
        for (line, text) in sampled(lines, 4) {
            let is_found = match self.broken(&changed(&ptx, &[(line, "")]), instance) {
                Ok(wrong) => wrong > 0,
                Err(_) => instruction != "mma.sync",
            };
            assert!(is_found, "{entry}: removing line {line} went unnoticed: {text}");
        }
    }
}

/// Sabotages of a kernel that fills its stages with bulk copies.
const SABOTAGES_OF_BULK_COPIES: [Sabotage; 5] = [
    Sabotage::leave_out("mbarrier.init", 2),
    Sabotage::do_not_wait(3),
    Sabotage::leave_out("mbarrier.arrive", 3),
    Sabotage::leave_out("cp.async.bulk.tensor", 4),
    Sabotage::leave_out("cp.async.bulk.shared", 4),
];

fn check_bulk_copies(of: &ByWarp, instance: (&str, usize, u32)) {
    let entry = of.entry(instance.0, TokenDtype::F16);
    // The fence before a stage's release is not in the list: the emulator completes a load at once, a GPU does not.
    let is_found = |ptx: &str| is_found(of.broken(ptx, instance), |wrong| wrong > 0);
    check_sampled_sabotages(&of.ptx_of(&entry), &entry, &SABOTAGES_OF_BULK_COPIES, is_found);
    // At least eight MMAs of sixteen columns.
    of.check_left_out(instance, "mma.sync", 8);
}

#[test]
fn removing_any_sync_copy_or_mma_is_found_on_sm_120() {
    for instance in [INSTANCES[0], INSTANCES[3]] {
        check_bulk_copies(&CONSUMER, instance);
    }
}

#[test]
fn removing_any_sync_copy_or_mma_is_found_on_sm_90() {
    for instance in [HOPPER.instances[0], HOPPER.instances[3]] {
        check_bulk_copies(&HOPPER, instance);
    }
}

#[test]
fn removing_any_sync_copy_or_mma_is_found_on_sm_80() {
    for instance in [INSTANCES[0], INSTANCES[3]] {
        let entry = format!("linear_sm80_f16_{}", instance.0);
        const SABOTAGES: [Sabotage; 2] =
            [Sabotage::leave_out("cp.async.wait_group", 1), Sabotage::leave_out("bar.sync", 1)];
        let is_found = |ptx: &str| is_found(PORTABLE.broken(ptx, instance), |wrong| wrong > 0);
        check_sampled_sabotages(&PORTABLE.ptx_of(&entry), &entry, &SABOTAGES, is_found);
        PORTABLE.check_left_out(instance, "mma.sync", 8);
        // Without a copy a stage keeps older bytes: wrong values, or a fault.
        PORTABLE.check_left_out(instance, "cp.async.cg", 8);
    }
}

/// K of a layer that Hopper's kernel sums in two parts, of 48 k-blocks and 49, the last one partial.
const SPLIT_K: usize = 96 * 128 + 16;

/// N of the layer: four panels, the last one partial.
const SPLIT_COLUMNS: usize = 208;

/// Numbers of tokens and SMs for which the plan chooses each instance with two parts of K in a layer of these sizes, with
/// a part of the instance's name. A test of the plan checks this.
const SPLIT: [(&str, usize, u32); 7] = [
    ("mma8", 1, 132),
    ("mma16", 16, 12),
    ("mma32", 32, 12),
    ("t64_decoded", 64, 12),
    ("t128_decoded", 96, 12),
    ("t128_c128", 128, 1),
    ("t256_c128", 200, 1),
];

/// Returns the name of an entry with two parts of K.
fn split_entry(instance: &str, dtype: TokenDtype) -> String {
    match instance.strip_prefix("mma") {
        Some(tokens) => format!("linear_mma{tokens}_{}_k2", dtype.name()),
        None => format!("linear_{}_{instance}_k2", dtype.name()),
    }
}

#[test]
fn two_parts_of_k_are_right_and_have_the_same_bits_for_every_number_of_tokens() {
    for dtype in DTYPES {
        let weights = with_bias(weights(SPLIT_COLUMNS, SPLIT_K, dtype), false);
        let all = inputs(&weights, 200);
        let run = |tokens: usize, sms: u32| {
            let step = LinearStep::new(&weights, pick(&all, &(0..tokens).collect::<Vec<_>>())).unwrap();
            let mut layer = emulated_of("sm_90a", Schedule::Fair, sms).prepare_linear(&weights).unwrap();
            let out = verified(layer.as_mut(), &weights, &step).out;
            (layer.counters().expect("a kernel ran").kernel.clone(), out)
        };
        // Besides each instance: tiles of one token, of an odd number of tokens, and tiles with tokens in one half only.
        let further = [(3, 132), (9, 1), (33, 132), (40, 132), (64, 132), (65, 132), (130, 4), (150, 2)];
        let further = sampled(further.into(), 4);
        let whole = run(200, 1).1;
        let calls = SPLIT.iter().map(|&(name, tokens, sms)| (Some(name), tokens, sms));
        let calls: Vec<_> = calls.chain(further.into_iter().map(|(tokens, sms)| (None, tokens, sms))).collect();
        calls.into_par_iter().for_each(|(name, tokens, sms)| {
            let (entry, out) = run(tokens, sms);
            assert!(entry.ends_with("_k2"), "{entry} sums K in one part");
            if let Some(name) = name {
                assert_eq!(entry, split_entry(name, dtype));
            }
            assert!(whole.starts_with(&out), "{entry}: different bits with {tokens} tokens on {sms} SMs");
        });
    }
}

#[test]
fn two_parts_of_k_are_right_for_every_remainder() {
    // An even and an odd number of k-blocks, whole and partial ones; less than a panel, and more than two panels.
    for (n, k) in [(16, 96 * 128), (48, 97 * 128), (144, 98 * 128 - 112), (80, 101 * 128 + 64)] {
        for (dtype, tokens) in DTYPES.into_iter().zip([2, 70]) {
            let weights = weights(n, k, dtype);
            check("sm_90a", &weights, inputs(&weights, tokens));
        }
    }
}

#[test]
fn two_parts_of_k_are_right_on_random_and_worst_schedules() {
    let of_each = SPLIT.iter().enumerate().flat_map(|(index, of)| {
        let dtypes = if is_full() { &DTYPES[..] } else { &DTYPES[index % 2..][..1] };
        dtypes.iter().map(move |&dtype| (dtype, of))
    });
    for (dtype, &(name, tokens, sms)) in of_each {
        let weights = weights(SPLIT_COLUMNS, SPLIT_K, dtype);
        let step = LinearStep::new(&weights, inputs(&weights, tokens)).unwrap();
        let outputs: Vec<_> = sampled_schedules()
            .into_par_iter()
            .map(|schedule| {
                let mut layer = emulated_of("sm_90a", schedule, sms).prepare_linear(&weights).unwrap();
                let output = verified(layer.as_mut(), &weights, &step);
                assert_eq!(layer.counters().expect("a kernel ran").kernel, split_entry(name, dtype));
                output
            })
            .collect();
        assert!(outputs.windows(2).all(|pair| pair[0] == pair[1]), "{name}: schedules gave different bits");
    }
}

/// Checks that every change to an instance with two parts of K is found on the worst schedule.
fn check_split(instance: &str, tokens: usize, sms: u32, sabotages: &[Sabotage]) {
    let entry = split_entry(instance, TokenDtype::F16);
    let ptx = only_entries(nvfp4::kernels::ptx("linear_sm90").expect("a kernel of this name"), |name| name == entry);
    let weights = weights(SPLIT_COLUMNS, SPLIT_K, TokenDtype::F16);
    let step = LinearStep::new(&weights, inputs(&weights, tokens)).unwrap();
    let broken = |ptx: &str| -> Result<usize, Error> {
        let gpu = emulated_of("sm_90a", Schedule::Worst, sms).with_ptx(ptx).unwrap();
        let mut output = LinearOutput::new(&step);
        let mut layer = gpu.prepare_linear(&weights).unwrap();
        layer.execute(&step, &mut output)?;
        assert_eq!(layer.counters().expect("a kernel ran").kernel, entry);
        Ok(compare(&weights, &step, &output).mismatches)
    };
    check_sampled_sabotages(&ptx, &entry, sabotages, |ptx| is_found(broken(ptx), |wrong| wrong > 0));
}

#[test]
fn removing_any_sync_or_exchange_of_a_cluster_is_found() {
    const OF_WARPS: [Sabotage; 6] = [
        Sabotage::leave_out("mbarrier.init", 3),
        Sabotage::do_not_wait(4),
        Sabotage::leave_out("mbarrier.arrive", 4),
        Sabotage::leave_out("barrier.cluster.arrive", 1),
        Sabotage::leave_out("barrier.cluster.wait", 1),
        Sabotage::leave_out("st.async", 1),
    ];
    check_split("mma8", 2, 132, &OF_WARPS);
    // Spare instructions, as in the instance with one part: mainloops for fewer tokens, and a last buffer's release.
    const OF_WARPGROUPS: [Sabotage; 6] = [
        Sabotage::leave_out("mbarrier.init", 5),
        Sabotage::do_not_wait(9).spare(4),
        Sabotage::leave_out("mbarrier.arrive", 14).spare(4 * 2 + 1),
        Sabotage::leave_out("barrier.cluster.arrive", 1),
        Sabotage::leave_out("barrier.cluster.wait", 1),
        Sabotage::leave_out("st.async", 4),
    ];
    check_split("t64_decoded", 64, 12, &OF_WARPGROUPS);
}

#[test]
fn removing_any_move_of_a_first_part_is_found() {
    let entry = split_entry("t128_c128", TokenDtype::F16);
    let ptx = only_entries(nvfp4::kernels::ptx("linear_sm90").expect("a kernel of this name"), |name| name == entry);
    // Generic loads and stores of local memory: nothing else of the kernel is generic.
    assert!(lines_of(&ptx, &entry, "st.v4").len() + lines_of(&ptx, &entry, "st.local.v4").len() >= 16);
    check_split("t128_c128", 128, 1, &[Sabotage::leave_out("st.v4", 16), Sabotage::leave_out("ld.v4", 16)]);
}
