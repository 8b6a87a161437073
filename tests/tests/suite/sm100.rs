//! Runs the Blackwell kernel's PTX in the emulator: no fault under any schedule, outputs equal to the exact
//! reference's, the same bits every time, for every instance. Broken PTX must cause faults.

use nvfp4::Output;
use nvfp4::backend::emulated::{Emulated, Options, Schedule};
use nvfp4::backend::{self, Backend};
use nvfp4::compare::Tolerance;
use nvfp4::generate::Generator;
use nvfp4::problem::{Op, Step, TokenDtype};
use nvfp4_tests::instances::{OPS, check, check_built_in_shapes, device, sampled_schedules, verified, with_instance};
use nvfp4_tests::sabotage::{Sabotage, check_sampled_sabotages, is_found, only_entries};
use nvfp4_tests::{Case, groups, inputs};

fn blackwell(schedule: Schedule) -> Emulated {
    device("sm_100f", schedule)
}

#[test]
fn ragged_groups_with_k_tails_are_right_on_every_schedule() {
    let schedules = [Schedule::Fair, Schedule::Worst, Schedule::Seed(1), Schedule::Seed(2)];
    let sizes = [(0, 8, 64), (1, 72, 320), (7, 8, 192), (127, 136, 64), (129, 72, 256), (0, 128, 256), (33, 8, 32)];
    for (op, entry) in OPS.into_iter().zip(["gated_sm100_t64", "plain_sm100_t64"]) {
        for out_dtype in [TokenDtype::F16, TokenDtype::Bf16] {
            let inputs = inputs(Generator::Gaussian, op, &groups(&sizes), 1);
            check(&Case::new(&inputs, out_dtype), schedules.into_iter().map(blackwell), out_dtype, entry);
        }
    }
}

#[test]
fn instances_are_right_on_random_and_worst_schedules() {
    let gpu = blackwell(Schedule::Fair);
    for op in OPS {
        let variants = gpu.instances(op);
        assert!(variants.len() >= 7);
        for variant in variants {
            // t8 and t16 take at most one tile of tokens per group.
            let (few, many) = if ["t8", "t16"].contains(&variant) { (7, 8) } else { (7, 201) };
            let sizes = groups(&[(few, 136, 64), (0, 8, 32), (many, 72, 1120), (1, 8, 320)]);
            let inputs = inputs(Generator::Gaussian, op, &sizes, 2);
            let entry = format!("{}_sm100_{variant}", op.name());
            let gpus = sampled_schedules().into_iter();
            let gpus = gpus.map(|schedule| with_instance(gpu.clone().with_schedule(schedule), variant));
            check(&Case::new(&inputs, TokenDtype::F16), gpus, TokenDtype::F16, &entry);
        }
    }
}

#[test]
fn one_group_and_64_groups_with_k_tails_are_right() {
    let sizes: Vec<_> =
        (0..64).map(|group| (group % 11, 8 * (1 + group % 17), [32, 64, 192, 320][group % 4])).collect();
    for op in OPS {
        let pair = if op == Op::Gated { "t64_apart" } else { "t64_pair" };
        for (sizes, tile) in [(&sizes[..], "t16"), (&[(33, 72, 2880)], pair)] {
            let inputs = inputs(Generator::Gaussian, op, &groups(sizes), 6);
            let gpus = [Schedule::Fair, Schedule::Worst].into_iter().map(blackwell);
            check(&Case::new(&inputs, TokenDtype::F16), gpus, TokenDtype::F16, &format!("{}_sm100_{tile}", op.name()));
        }
    }
}

#[test]
fn every_built_in_shape_is_right() {
    check_built_in_shapes("gated_sm100", "sm_100f");
}

#[test]
fn plain_kernel_in_place_of_the_gated_one_is_found() {
    let [gated, plain] = OPS.map(|op| format!("{}_sm100_t64_serial", op.name()));
    let inputs = inputs(Generator::Gaussian, Op::Gated, &groups(&[(40, 136, 320)]), 7);
    let case = Case::new(&inputs, TokenDtype::F16);
    let gpu = with_instance(blackwell(Schedule::Fair), "t64_serial");
    verified(&case, &gpu, TokenDtype::F16, &gated);

    let swapped = gpu.ptx().replace(&gated, "gated").replace(&plain, &gated).replace("gated(", &format!("{plain}("));
    let gpu = gpu.with_ptx(&swapped).unwrap();
    let output = case.try_run(case.prepare(&gpu).as_mut()).unwrap();
    let mismatch = case.mismatch(&output, |_| Tolerance::of(TokenDtype::F16)).expect("a wrong output");
    assert!(mismatch.contains("elements are wrong"), "{mismatch}");
}

#[test]
fn all_codes_of_values_and_scales_multiply_exactly() {
    for op in OPS {
        let inputs = inputs(Generator::AllCodes, op, &groups(&[(40, 136, 512), (9, 8, 96)]), 3);
        let case = Case::new(&inputs, TokenDtype::F16);
        verified(&case, &blackwell(Schedule::Fair), TokenDtype::F16, &format!("{}_sm100_t64", op.name()));
    }
}

#[test]
fn k_without_a_tensor_map_goes_to_the_portable_kernel() {
    let inputs = inputs(Generator::Gaussian, Op::Gated, &groups(&[(5, 8, 64), (5, 8, 48)]), 4);
    verified(&Case::new(&inputs, TokenDtype::F16), &blackwell(Schedule::Fair), TokenDtype::F16, "gated_simt_small");
}

#[test]
fn unsuitable_instance_is_refused() {
    let inputs = inputs(Generator::Gaussian, Op::Plain, &groups(&[(5, 8, 64), (9, 8, 64)]), 5);
    let step = Step::new(&inputs.weights, inputs.tokens.clone(), TokenDtype::F16).unwrap();
    let refusal = |instance| {
        let gpu = with_instance(blackwell(Schedule::Fair), instance);
        let mut layer = gpu.prepare(&inputs.weights).map_err(|error| error.to_string())?;
        backend::run(layer.as_mut(), &step, &mut Output::new(step.problem())).map_err(|error| error.to_string())
    };
    let (of_gated, small) = (refusal("t64_s2").unwrap_err(), refusal("t8").unwrap_err());
    assert!(of_gated.starts_with("`t64_s2` is not an instance of plain_sm100; expected one of t8, t16"), "{of_gated}");
    assert!(small.starts_with("group 1: 9 tokens; instance t8 supports at most 8"), "{small}");
}

/// Sabotages of the instance t64.
const SABOTAGES: [Sabotage; 15] = [
    Sabotage::leave_out("mbarrier.init", 12),
    Sabotage::do_not_wait(4),
    Sabotage::leave_out("mbarrier.arrive", 2),
    // The spare arrival is in the path of a warp without tiles. This kernel has no such warp.
    Sabotage::leave_out("bar.arrive", 3).spare(1),
    Sabotage::leave_out("bar.sync", 2),
    Sabotage::leave_out("cp.async.bulk.tensor", 3),
    Sabotage::leave_out("cp.async.bulk.shared", 3),
    Sabotage::leave_out("tcgen05.alloc", 1),
    Sabotage::leave_out("tcgen05.dealloc", 1),
    Sabotage::leave_out("tcgen05.cp", 3),
    Sabotage::leave_out("tcgen05.mma", 2),
    Sabotage::leave_out("tcgen05.commit", 2),
    Sabotage::leave_out("tcgen05.wait", 1),
    Sabotage::leave_out("st.shared", 1),
    Sabotage::leave_out("ldmatrix", 1),
];

/// Sabotages of instances with additional instructions or other uses of the same instructions.
const SABOTAGES_OF_INSTANCES: [(&str, &[Sabotage]); 6] = [
    (
        "t64_tma",
        &[
            Sabotage::leave_out("cp.async.bulk.tensor.2d.global", 1),
            Sabotage::leave_out("cp.async.bulk.commit_group", 1),
            Sabotage::leave_out("cp.async.bulk.wait_group", 2),
            Sabotage::leave_out("fence.proxy.async", 1),
        ],
    ),
    // t96 has fewer sets of scales than stages.
    ("t96", &[Sabotage::do_not_wait(5)]),
    ("t64_serial", &[Sabotage::do_not_wait(4), Sabotage::leave_out("tcgen05.commit", 2)]),
    (
        "t64_pair",
        &[
            Sabotage::do_not_wait(10),
            Sabotage::leave_out("mbarrier.arrive", 3),
            // The spare arrival is in the path of a warp without tiles.
            Sabotage::leave_out("barrier.cluster.arrive", 5).spare(1),
            // The spare wait is the last one of warps that then end. Nothing depends on it.
            Sabotage::leave_out("barrier.cluster.wait", 4).spare(1),
            Sabotage::leave_out("tcgen05.mma", 2),
            Sabotage::leave_out("tcgen05.commit", 2),
            // Copies of scales, also of token scales for both CTAs.
            Sabotage::leave_out("cp.async.bulk.shared", 7),
        ],
    ),
    (
        "t64_apart",
        &[
            Sabotage::leave_out("cp.async.bulk.shared", 5),
            Sabotage::leave_out("mbarrier.init", 20),
            // The spare waits are in `Ring::drain`. No emulated schedule delays what they wait for.
            Sabotage::do_not_wait(12).spare(6),
            Sabotage::leave_out("mbarrier.arrive", 5),
            Sabotage::leave_out("st.async", 4),
            Sabotage::leave_out("barrier.cluster.arrive", 5).spare(1),
        ],
    ),
    (
        "t256_split",
        &[
            // The spare waits are in `Ring::drain`. The cluster has one tile, and each CTA has at most one k-block per
            // stage.
            Sabotage::do_not_wait(13).spare(5),
            Sabotage::leave_out("mbarrier.arrive", 5),
            Sabotage::leave_out("st.async", 12),
            Sabotage::leave_out("barrier.cluster.arrive", 13).spare(1),
            Sabotage::leave_out("barrier.cluster.wait", 8).spare(1),
        ],
    ),
];

#[test]
fn removing_any_sync_copy_or_tensor_core_instruction_is_found() {
    let gpu =
        Emulated::new("sm_100f", Options { schedule: Schedule::Worst, sms: Some(1), ..Options::default() }).unwrap();
    // Enough tiles that both accumulators of a pair are awaited after a tile of few tokens.
    let sizes = [(65, 136, 1600), (7, 72, 320), (3, 8, 64), (1, 8, 64)];
    let inputs = inputs(Generator::Gaussian, Op::Gated, &groups(&sizes), 2);
    let case = Case::new(&inputs, TokenDtype::F16);
    for (instance, sabotages) in [("t64", &SABOTAGES[..])].into_iter().chain(SABOTAGES_OF_INSTANCES) {
        let gpu = with_instance(gpu.clone(), instance);
        let entry = format!("gated_sm100_{instance}");
        let ptx = only_entries(gpu.ptx(), |name| name == entry);
        let is_found = |ptx: &str| {
            let gpu = gpu.clone().with_ptx(ptx).unwrap();
            let is_wrong = |output: Output| case.mismatch(&output, |_| Tolerance::of(TokenDtype::F16)).is_some();
            is_found(case.try_run(case.prepare(&gpu).as_mut()), is_wrong)
        };
        check_sampled_sabotages(&ptx, &entry, sabotages, is_found);
    }
}
