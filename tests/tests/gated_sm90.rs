//! The Hopper kernel's PTX in the emulator: no fault under any schedule, the exact reference's numbers, the same bits every
//! time. And faults where the PTX is broken.

use nvfp4::Output;
use nvfp4::backend::emulated::{Emulated, Fault, FaultKind, Options, Schedule};
use nvfp4::backend::{self, Backend};
use nvfp4::compare::Tolerance;
use nvfp4::generate::Generator;
use nvfp4::problem::{Op, OutDtype, Step};
use nvfp4_tests::{Case, Inputs, groups, inputs};

const OPS: [(Op, &str); 2] = [(Op::Gated, "gated"), (Op::Plain, "plain")];

const SCHEDULES: [Schedule; 4] = [Schedule::Fair, Schedule::Seed(1), Schedule::Seed(2), Schedule::Worst];

/// A Hopper GPU of one multiprocessor, on which one block computes all tiles, and the largest tiles that tokens fill are
/// best.
fn hopper(schedule: Schedule) -> Emulated {
    Emulated::new("sm_90a", Options { schedule, sms: 1, ..Options::default() }).expect("the Hopper kernel")
}

/// No schedule makes a fault or other bits, and all are right; `kernel` is the entry that runs.
fn check_schedules(kernel: &str, inputs: &Inputs, out_dtype: OutDtype) {
    let case = Case::new(inputs, out_dtype);
    let outputs = SCHEDULES.map(|schedule| {
        let gpu = hopper(schedule);
        let mut layer = case.prepare(&gpu);
        let output = case.verified(&gpu, layer.as_mut(), |_| Tolerance::of(out_dtype));
        assert_eq!(layer.counters().expect("a kernel ran").kernel, kernel);
        output
    });
    assert!(outputs.iter().all(|output| *output == outputs[0]), "schedules gave different bits");
}

/// Both operations, of groups of (M, N, K), with the tile of so many tokens.
fn check(tokens: u32, sizes: &[(usize, usize, usize)]) {
    let groups = groups(sizes);
    for ((op, name), out_dtype) in OPS.into_iter().zip([OutDtype::F16, OutDtype::Bf16]) {
        let inputs = inputs(Generator::Gaussian, op, &groups, 1);
        check_schedules(&format!("{name}_sm90_{tokens}"), &inputs, out_dtype);
    }
}

#[test]
fn the_smallest_problem_is_right() {
    check(8, &[(1, 8, 32)]);
}

#[test]
fn few_tokens_with_ragged_columns_and_tails_of_k_are_right() {
    check(8, &[(1, 72, 320), (0, 136, 64), (7, 136, 192), (8, 264, 32), (3, 8, 64)]);
    check(16, &[(9, 136, 192), (16, 8, 320), (0, 8, 32)]);
    check(32, &[(17, 72, 320), (32, 136, 64), (0, 8, 32), (31, 8, 192)]);
}

#[test]
fn many_tokens_with_ragged_columns_and_tails_of_k_are_right() {
    check(64, &[(33, 72, 192), (0, 8, 64), (64, 136, 320), (63, 200, 32)]);
    check(96, &[(96, 136, 192), (65, 8, 320), (90, 72, 64)]);
    check(128, &[(128, 136, 64), (127, 72, 320), (0, 8, 64), (119, 8, 192)]);
}

#[test]
fn a_group_of_several_tiles_along_every_side_is_right() {
    check(128, &[(250, 264, 192), (256, 520, 160)]);
}

#[test]
fn more_steps_than_stages_are_right() {
    check(8, &[(5, 16, 2432), (4, 16, 1184)]);
    check(128, &[(100, 16, 1312), (120, 8, 1568), (110, 8, 544)]);
}

/// What a kernel with this text is stopped for, if it is.
fn fault(ptx: &str, schedule: Schedule) -> Option<Fault> {
    let inputs = inputs(Generator::Gaussian, Op::Gated, &groups(&[(8, 72, 1696)]), 2);
    let step = Step::new(&inputs.weights, inputs.tokens.clone(), OutDtype::F16).unwrap();
    let gpu = hopper(schedule).with_ptx(ptx).unwrap();
    let result = backend::run(gpu.prepare(&inputs.weights).unwrap().as_mut(), &step, &mut Output::new(step.problem()));
    result.err().map(|error| error.fault().unwrap_or_else(|| panic!("{error}")).clone())
}

#[test]
fn any_number_of_blocks_gives_the_same_bits() {
    let inputs = inputs(Generator::Gaussian, Op::Gated, &groups(&[(8, 520, 192), (0, 8, 32), (5, 264, 352)]), 3);
    let case = Case::new(&inputs, OutDtype::F16);
    let outputs = [1, 2, 5, 148].map(|sms| {
        let gpu = Emulated::new("sm_90a", Options { sms, ..Options::default() }).unwrap();
        let mut layer = case.prepare(&gpu);
        let output = case.verified(&gpu, layer.as_mut(), |_| Tolerance::of(OutDtype::F16));
        assert_eq!(layer.counters().unwrap().ctas, u64::from(sms).min(8));
        output
    });
    assert!(outputs.iter().all(|output| *output == outputs[0]));
}

#[test]
fn k_that_is_no_multiple_of_32_goes_to_the_portable_kernel() {
    let inputs = inputs(Generator::Gaussian, Op::Gated, &groups(&[(8, 16, 64), (5, 8, 48)]), 3);
    let case = Case::new(&inputs, OutDtype::F16);
    let gpu = hopper(Schedule::Fair);
    let mut layer = case.prepare(&gpu);
    case.verified(&gpu, layer.as_mut(), |_| Tolerance::of(OutDtype::F16));
    assert_eq!(layer.counters().unwrap().kernel, "gated_simt_small");
}

#[test]
fn a_synchronisation_that_is_missing_is_found() {
    let gpu = hopper(Schedule::Fair);
    let ptx = gpu.ptx();
    assert_eq!(fault(ptx, Schedule::Worst), None);
    for (instruction, kinds) in [
        ("fence.proxy.async.shared::cta;", [FaultKind::DataRace, FaultKind::MissingProxyFence]),
        ("wgmma.fence.sync.aligned;", [FaultKind::MissingWgmmaFence; 2]),
        ("wgmma.wait_group.sync.aligned 0;", [FaultKind::ReadInFlight, FaultKind::OverwriteInFlight]),
        ("cp.async.mbarrier.arrive.noinc", [FaultKind::Deadlock; 2]),
    ] {
        assert!(ptx.contains(instruction), "{instruction}");
        let broken = ptx.replace(instruction, &format!("// {instruction}"));
        let fault = fault(&broken, Schedule::Worst).unwrap_or_else(|| panic!("no fault without {instruction}"));
        assert!(kinds.contains(&fault.kind), "without {instruction}: {fault}");
    }
}
