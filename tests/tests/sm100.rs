//! The Blackwell kernel's PTX in the emulator: no fault under any schedule, the exact reference's numbers, the same bits
//! every time, whatever its variant.

use nvfp4::Output;
use nvfp4::backend::emulated::{Emulated, Fault, Options, Schedule};
use nvfp4::backend::{self, Backend};
use nvfp4::compare::Tolerance;
use nvfp4::generate::Generator;
use nvfp4::problem::{Op, OutDtype, Step};
use nvfp4_tests::{Case, groups, inputs};

const OPS: [Op; 2] = [Op::Gated, Op::Plain];

/// Multiprocessors: few, so that a block computes many tiles.
const SMS: u32 = 3;

fn blackwell(schedule: Schedule) -> Emulated {
    Emulated::new("sm_100f", Options { schedule, sms: SMS, ..Options::default() }).expect("the Blackwell kernel")
}

/// The device with this instance of its kernel for all steps.
fn with_instance(gpu: Emulated, name: &str) -> Emulated {
    gpu.with_variant(name.parse().expect("an instance")).expect("of this device's kernel")
}

/// The output of a device, which is right, and of this entry of the kernel.
fn verified(case: &Case<'_>, gpu: &Emulated, out_dtype: OutDtype, entry: &str) -> Output {
    let mut layer = case.prepare(gpu);
    let output = case.verified(gpu, layer.as_mut(), |_| Tolerance::of(out_dtype));
    assert_eq!(layer.counters().expect("a kernel ran").kernel, entry);
    output
}

/// All outputs are right and the same.
fn check(case: &Case<'_>, gpus: impl Iterator<Item = Emulated>, out_dtype: OutDtype, entry: &str) {
    let outputs: Vec<_> = gpus.map(|gpu| verified(case, &gpu, out_dtype, entry)).collect();
    assert!(outputs.windows(2).all(|pair| pair[0] == pair[1]), "{entry}: schedules gave different bits");
}

#[test]
fn ragged_groups_with_tails_of_k_are_right_on_every_schedule() {
    let schedules = [Schedule::Fair, Schedule::Worst, Schedule::Seed(1), Schedule::Seed(2)];
    let sizes = [(0, 8, 64), (1, 72, 320), (7, 8, 192), (127, 136, 64), (129, 72, 256), (0, 128, 256), (33, 8, 32)];
    for (op, entry) in OPS.into_iter().zip(["gated_sm100_t128", "plain_sm100_t128"]) {
        for out_dtype in [OutDtype::F16, OutDtype::Bf16] {
            let inputs = inputs(Generator::Gaussian, op, &groups(&sizes), 1);
            check(&Case::new(&inputs, out_dtype), schedules.into_iter().map(blackwell), out_dtype, entry);
        }
    }
}

#[test]
fn every_variant_is_right_on_twenty_random_schedules_and_the_worst() {
    let gpu = blackwell(Schedule::Fair);
    for op in OPS {
        let variants = gpu.instances(op);
        assert!(variants.len() >= 7);
        for variant in variants {
            // Where tiles of tokens cannot follow each other, one of them.
            let (few, many) = if ["t8", "t16"].contains(&variant) { (7, 8) } else { (7, 201) };
            let sizes = groups(&[(few, 136, 64), (0, 8, 32), (many, 72, 1120), (1, 8, 320)]);
            let inputs = inputs(Generator::Gaussian, op, &sizes, 2);
            let schedules = (0..20).map(Schedule::Seed).chain([Schedule::Worst]);
            let entry = format!("{}_sm100_{variant}", op.name());
            let gpus = schedules.map(|schedule| with_instance(gpu.clone().with_schedule(schedule), variant));
            check(&Case::new(&inputs, OutDtype::F16), gpus, OutDtype::F16, &entry);
        }
    }
}

#[test]
fn all_values_and_scales_are_multiplied_as_they_are() {
    for op in OPS {
        let inputs = inputs(Generator::AllCodes, op, &groups(&[(40, 136, 512), (9, 8, 96)]), 3);
        let case = Case::new(&inputs, OutDtype::F16);
        verified(&case, &blackwell(Schedule::Fair), OutDtype::F16, &format!("{}_sm100_t64", op.name()));
    }
}

#[test]
fn k_that_has_no_tensor_map_goes_to_the_portable_kernel() {
    let inputs = inputs(Generator::Gaussian, Op::Gated, &groups(&[(5, 8, 64), (5, 8, 48)]), 4);
    verified(&Case::new(&inputs, OutDtype::F16), &blackwell(Schedule::Fair), OutDtype::F16, "gated_simt_small");
}

#[test]
fn an_instance_that_the_operation_has_not_or_that_does_not_take_the_step_is_refused() {
    let inputs = inputs(Generator::Gaussian, Op::Plain, &groups(&[(5, 8, 64), (9, 8, 64)]), 5);
    let step = Step::new(&inputs.weights, inputs.tokens.clone(), OutDtype::F16).unwrap();
    let refusal = |instance| {
        let gpu = with_instance(blackwell(Schedule::Fair), instance);
        let mut layer = gpu.prepare(&inputs.weights).map_err(|error| error.to_string())?;
        backend::run(layer.as_mut(), &step, &mut Output::new(step.problem())).map_err(|error| error.to_string())
    };
    let (of_gated, small) = (refusal("t64_s2").unwrap_err(), refusal("t8").unwrap_err());
    assert!(of_gated.starts_with("`t64_s2` is no instance of plain_sm100; it has t8, t16"), "{of_gated}");
    assert!(small.starts_with("group 1: 9 tokens; variant t8 takes 8 at most"), "{small}");
}

/// What the kernel is stopped for when a line of its text is changed; one block computes many tiles, all of them ragged.
fn fault(gpu: &Emulated, line: usize, changed: &str) -> Option<Fault> {
    let mut lines: Vec<_> = gpu.ptx().lines().collect();
    lines[line] = changed;
    let gpu = gpu.clone().with_ptx(&lines.join("\n")).unwrap();
    let inputs = inputs(Generator::Gaussian, Op::Gated, &groups(&[(65, 136, 1600), (7, 72, 320)]), 2);
    let step = Step::new(&inputs.weights, inputs.tokens.clone(), OutDtype::F16).unwrap();
    let mut output = Output::new(step.problem());
    let result = backend::run(gpu.prepare(&inputs.weights).unwrap().as_mut(), &step, &mut output);
    result.err().map(|error| error.fault().unwrap_or_else(|| panic!("{error}")).clone())
}

#[test]
fn every_copy_wait_arrival_and_operation_of_the_tensor_core_that_is_left_out_is_found() {
    const DO_NOT_WAIT: &str = "setp.eq.u32 p, 0, 0;";
    /// Beginning of the instruction, what stands in its place, how many there are at least, how many of them have another
    /// behind them that makes up for them: of the waits, that for the last accumulator but one to be empty at the end.
    const SABOTAGES: [(&str, &str, usize, usize); 12] = [
        ("mbarrier.init", "", 12, 0),
        ("mbarrier.try_wait", DO_NOT_WAIT, 5, 1),
        ("mbarrier.arrive", "", 2, 0),
        ("cp.async.bulk.tensor", "", 3, 0),
        ("cp.async.bulk.shared", "", 3, 0),
        ("tcgen05.alloc", "", 1, 0),
        ("tcgen05.dealloc", "", 1, 0),
        ("tcgen05.cp", "", 3, 0),
        ("tcgen05.mma", "", 2, 0),
        ("tcgen05.commit", "", 2, 0),
        ("tcgen05.wait", "", 1, 0),
        ("st.shared", "", 8, 0),
    ];
    let gpu = Emulated::new("sm_100f", Options { schedule: Schedule::Worst, sms: 1, ..Options::default() }).unwrap();
    let gpu = with_instance(gpu, "t64");
    assert_eq!(fault(&gpu, 0, ""), None, "the first line is a comment");
    let entry = |line: &&str| !line.contains(".entry gated_sm100_t64(");
    let start = gpu.ptx().lines().take_while(entry).count();
    let length = gpu.ptx().lines().skip(start).take_while(|line| !line.contains("// -- End function")).count();
    for (instruction, changed, least, spare) in SABOTAGES {
        let lines = gpu.ptx().lines().enumerate().skip(start).take(length);
        let lines: Vec<_> = lines.filter(|(_, line)| line.trim_start().starts_with(instruction)).collect();
        assert!(lines.len() >= least, "{} of {instruction}", lines.len());
        let unnoticed: Vec<_> = lines.iter().filter(|(number, _)| fault(&gpu, *number, changed).is_none()).collect();
        assert!(unnoticed.len() <= spare, "may be left out: {unnoticed:?}");
    }
}
