//! The Hopper kernel's PTX in the emulator: no fault under any schedule, outputs equal to the exact reference's, the
//! same bits every time, for every instance. Broken PTX must cause faults.

use nvfp4::Output;
use nvfp4::backend::emulated::{Emulated, Fault, FaultKind, Options, Schedule};
use nvfp4::backend::{self, Backend};
use nvfp4::compare::Tolerance;
use nvfp4::generate::Generator;
use nvfp4::problem::{Op, Step, TokenDtype};
use nvfp4_tests::instances::{OPS, check, check_built_in_shapes, device, sampled_schedules, verified, with_instance};
use nvfp4_tests::sabotage::{Sabotage, changed, check_sabotages, fault_of, lines_of, only_entries};
use nvfp4_tests::{Case, groups, inputs};

fn hopper(schedule: Schedule) -> Emulated {
    device("sm_90a", schedule)
}

#[test]
fn ragged_groups_with_k_tails_are_right_on_every_schedule() {
    let schedules = [Schedule::Fair, Schedule::Worst, Schedule::Seed(1), Schedule::Seed(2)];
    let sizes = [(0, 8, 64), (1, 72, 320), (7, 8, 192), (127, 136, 64), (129, 72, 256), (0, 128, 256), (33, 8, 32)];
    for op in OPS {
        for out_dtype in [TokenDtype::F16, TokenDtype::Bf16] {
            let inputs = inputs(Generator::Gaussian, op, &groups(&sizes), 1);
            let entry = format!("{}_sm90_t128", op.name());
            let gpus = schedules.into_iter().map(|schedule| with_instance(hopper(schedule), "t128"));
            check(&Case::new(&inputs, out_dtype), gpus, out_dtype, &entry);
        }
    }
}

#[test]
fn instances_are_right_on_random_and_worst_schedules() {
    let gpu = hopper(Schedule::Fair);
    for op in OPS {
        for instance in gpu.instances(op) {
            // More k-blocks than stages, more columns than a tile, and a tile that starts inside a tile of the scale
            // layout.
            let sizes = groups(&[(7, 136, 64), (0, 8, 32), (137, 72, 1440), (1, 8, 320)]);
            let inputs = inputs(Generator::Gaussian, op, &sizes, 2);
            let entry = format!("{}_sm90_{instance}", op.name());
            let gpus = sampled_schedules().into_iter();
            let gpus = gpus.map(|schedule| with_instance(gpu.clone().with_schedule(schedule), instance));
            check(&Case::new(&inputs, TokenDtype::F16), gpus, TokenDtype::F16, &entry);
        }
    }
}

#[test]
fn tile_of_any_number_of_tokens_is_right() {
    // Columns of C: more than one tile if gated; some in the second panel of a tile if plain.
    for (op, n) in OPS.into_iter().zip([136, 264]) {
        for instance in hopper(Schedule::Fair).instances(op) {
            let (tokens, _) = instance[1..].split_once('_').unwrap_or((&instance[1..], ""));
            let most: usize = tokens.parse().expect("`t` and the number of tokens");
            let sizes: Vec<_> = (1..=most).step_by(5).chain([most]).map(|tokens| (tokens, n, 96)).collect();
            let inputs = inputs(Generator::Gaussian, op, &groups(&sizes), 3);
            let entry = format!("{}_sm90_{instance}", op.name());
            let gpu = with_instance(hopper(Schedule::Fair), instance);
            verified(&Case::new(&inputs, TokenDtype::F16), &gpu, TokenDtype::F16, &entry);
        }
    }
}

#[test]
fn every_built_in_shape_is_right() {
    check_built_in_shapes("gated_sm90", "sm_90a");
}

#[test]
fn any_number_of_ctas_gives_the_same_bits() {
    let inputs = inputs(Generator::Gaussian, Op::Gated, &groups(&[(8, 520, 192), (0, 8, 32), (5, 264, 352)]), 3);
    let case = Case::new(&inputs, TokenDtype::F16);
    let outputs = [1, 2, 5, 148].map(|sms| {
        let gpu = Emulated::new("sm_90a", Options { sms: Some(sms), ..Options::default() }).unwrap();
        let mut layer = case.prepare(&gpu);
        let output = case.verified(&gpu, layer.as_mut(), |_| Tolerance::of(TokenDtype::F16));
        assert_eq!(layer.counters().unwrap().ctas, u64::from(sms).min(5));
        output
    });
    assert!(outputs.iter().all(|output| *output == outputs[0]));
}

#[test]
fn k_not_divisible_by_32_goes_to_the_portable_kernel() {
    let inputs = inputs(Generator::Gaussian, Op::Gated, &groups(&[(8, 16, 64), (5, 8, 48)]), 3);
    verified(&Case::new(&inputs, TokenDtype::F16), &hopper(Schedule::Fair), TokenDtype::F16, "gated_simt_small");
}

/// Returns a device with one SM, on the worst schedule, for one instance.
fn worst(instance: &str) -> Emulated {
    let options = Options { schedule: Schedule::Worst, sms: Some(1), ..Options::default() };
    with_instance(Emulated::new("sm_90a", options).unwrap(), instance)
}

/// Returns the fault that stops a PTX text of the kernel. One CTA computes many tiles, all of them ragged.
fn fault(gpu: &Emulated, ptx: &str) -> Option<Fault> {
    let gpu = gpu.clone().with_ptx(ptx).unwrap();
    let inputs = inputs(Generator::Gaussian, Op::Gated, &groups(&[(16, 136, 1696), (7, 72, 1696)]), 2);
    let step = Step::new(&inputs.weights, inputs.tokens.clone(), TokenDtype::F16).unwrap();
    let mut output = Output::new(step.problem());
    fault_of(backend::run(gpu.prepare(&inputs.weights).unwrap().as_mut(), &step, &mut output))
}

#[test]
fn removing_any_sync_copy_or_mma_is_found() {
    const SABOTAGES: [Sabotage; 8] = [
        Sabotage::leave_out("mbarrier.init", 4),
        Sabotage::do_not_wait(7),
        Sabotage::leave_out("mbarrier.arrive", 7),
        Sabotage::leave_out("cp.async.bulk.shared", 4),
        Sabotage::leave_out("fence.proxy.async", 5),
        Sabotage::leave_out("wgmma.fence", 2),
        Sabotage::leave_out("wgmma.wait_group.sync.aligned 1", 2),
        Sabotage::leave_out("wgmma.wait_group.sync.aligned 0", 2),
    ];
    let gpu = worst("t16");
    let text = only_entries(gpu.ptx(), |name| name == "gated_sm90_t16");
    check_sabotages(&text, "gated_sm90_t16", &SABOTAGES, |ptx| fault(&gpu, ptx).is_some());
}

#[test]
fn missing_wait_for_the_token_grid_is_found() {
    let gpu = worst("t64");
    let fault = |changes: &[(usize, &str)]| fault(&gpu, &changed(gpu.ptx(), changes));
    assert_eq!(fault(&[]), None, "the unchanged text must run without a fault");
    let waits = lines_of(gpu.ptx(), "gated_sm90_t64", "griddepcontrol.wait");
    let waits: Vec<_> = waits.into_iter().map(|(line, _)| (line, "")).collect();
    // The warp that loads weights waits only to avoid delaying the tokens. The warps that load tokens have their own
    // wait.
    let alone: Vec<_> = waits.iter().filter_map(|&wait| fault(&[wait])).collect();
    assert_eq!((waits.len(), alone.len()), (2, 1));
    for fault in alone.into_iter().chain([fault(&waits).expect("a fault, as no warp waits")]) {
        assert_eq!(fault.kind, FaultKind::GridNotAwaited, "{fault}");
        assert!(fault.to_string().contains("`tokens_sm90`"), "{fault}");
    }
}
