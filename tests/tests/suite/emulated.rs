//! Runs the kernels' PTX in the emulator: no fault under any schedule, outputs equal to the exact reference's, the
//! same bits every time. Broken PTX must cause faults, so that their absence proves something.

use nvfp4::Output;
use nvfp4::backend::emulated::{Emulated, Fault, FaultKind, Options, Schedule};
use nvfp4::backend::{self, Backend};
use nvfp4::compare::Tolerance;
use nvfp4::generate::Generator;
use nvfp4::problem::{Group, Op, Step, TokenDtype};
use nvfp4::shape::{self, Shape};
use nvfp4_tests::{Case, Inputs, groups, inputs};

const OPS: [Op; 2] = [Op::Gated, Op::Plain];

const SCHEDULES: [Schedule; 3] = [Schedule::Fair, Schedule::Seed(1), Schedule::Worst];

/// Returns an emulated GPU that runs `gated_simt`.
fn simt(schedule: Schedule) -> Emulated {
    Emulated::new("sm_80", Options { schedule, ..Options::default() }).expect("the portable kernel")
}

/// Checks that under every schedule there is no fault and the output is right, with the same bits.
fn check_schedules(kernel: &str, inputs: &Inputs, out_dtype: TokenDtype) {
    let case = Case::new(inputs, out_dtype);
    let outputs = SCHEDULES.map(|schedule| {
        let gpu = simt(schedule);
        let mut layer = case.prepare(&gpu);
        let output = case.verified(&gpu, layer.as_mut(), |_| Tolerance::of(out_dtype));
        assert_eq!(layer.counters().expect("a kernel ran").kernel, kernel);
        output
    });
    assert!(outputs.iter().all(|output| *output == outputs[0]), "schedules gave different bits");
}

/// Checks both operations on a shape, with the shape's own inputs.
fn check_shape(shape: &Shape, kernels: [&str; 2], tokens: impl Fn(usize) -> usize) {
    let groups: Vec<_> = shape.groups.iter().map(|group| Group { m: tokens(group.m), ..*group }).collect();
    for (op, kernel) in OPS.into_iter().zip(kernels) {
        check_schedules(kernel, &inputs(shape.input, op, &groups, 0), TokenDtype::F16);
    }
}

/// Returns the test shapes of grouped GEMM.
fn grouped() -> impl Iterator<Item = &'static Shape> {
    shape::builtin().iter().filter(|shape| shape.name.starts_with("group-test-"))
}

const LARGE: [&str; 2] = ["gated_simt", "plain_simt"];
const SMALL: [&str; 2] = ["gated_simt_small", "plain_simt_small"];

#[test]
fn large_tile_is_right_on_grouped_test_shapes() {
    assert!(grouped().count() > 0);
    grouped().for_each(|shape| check_shape(shape, LARGE, |m| m));
}

#[test]
fn small_tile_is_right_on_grouped_test_shapes() {
    assert!(grouped().count() > 0);
    grouped().for_each(|shape| check_shape(shape, SMALL, |m| m / 8 % 21));
}

#[test]
fn both_tiles_are_right_on_a_dual_test_shape() {
    let shape = shape::find("dual-test-2").expect("a built-in shape");
    check_shape(&shape, LARGE, |m| m);
    check_shape(&shape, SMALL, |m| m / 16);
}

#[test]
fn ragged_groups_with_k_tails_are_right() {
    let many = groups(&[(0, 8, 16), (1, 72, 320), (7, 8, 48), (127, 136, 64), (129, 72, 208), (0, 128, 256)]);
    let few = groups(&[(0, 8, 16), (1, 200, 336), (9, 8, 48), (3, 136, 80), (20, 72, 208), (0, 128, 256)]);
    for (sizes, kernels) in [(many, LARGE), (few, SMALL)] {
        for (op, kernel) in OPS.into_iter().zip(kernels) {
            for out_dtype in [TokenDtype::F16, TokenDtype::Bf16] {
                check_schedules(kernel, &inputs(Generator::Gaussian, op, &sizes, 1), out_dtype);
            }
        }
    }
}

/// Returns the fault that stops the large gated tile when one line of its text is changed. M, N and K end inside a
/// tile.
fn fault(gpu: &Emulated, line: usize, changed: &str) -> Option<Fault> {
    let mut lines: Vec<_> = gpu.ptx().lines().collect();
    lines[line] = changed;
    let gpu = gpu.clone().with_ptx(&lines.join("\n")).unwrap();
    let inputs = inputs(Generator::Gaussian, Op::Gated, &groups(&[(65, 72, 208)]), 2);
    let step = Step::new(&inputs.weights, inputs.tokens.clone(), TokenDtype::F16).unwrap();
    let result = backend::run(gpu.prepare(&inputs.weights).unwrap().as_mut(), &step, &mut Output::new(step.problem()));
    result.err().map(|error| error.fault::<Fault>().unwrap_or_else(|| panic!("{error}")).clone())
}

#[test]
fn breaking_any_load_store_or_barrier_is_found() {
    const SABOTAGES: [(&str, &str, FaultKind); 4] = [
        ("bar.sync", "// ", FaultKind::DataRace),
        ("st.shared", "// ", FaultKind::UninitializedShared),
        ("ld.shared", "// ", FaultKind::UninitializedRegister),
        ("@p ld.global", "ld.global", FaultKind::OutOfBounds),
    ];
    let gpu = simt(Schedule::Fair);
    assert_eq!(fault(&gpu, 0, ""), None, "the first line is a comment");
    for (instruction, changed, kind) in SABOTAGES {
        let lines = gpu.ptx().lines().take_while(|line| !line.contains("// -- End function")).enumerate();
        let lines: Vec<_> = lines.filter(|(_, line)| line.trim_start().starts_with(instruction)).collect();
        assert!(lines.len() >= 2, "found {} of `{instruction}`, expected at least 2", lines.len());
        for (number, line) in lines {
            let found = fault(&gpu, number, &line.replacen(instruction, changed, 1));
            let found = found.unwrap_or_else(|| panic!("breaking line {} caused no fault: {line}", number + 1));
            assert_eq!((found.kind, &*found.kernel), (kind, "gated_simt"), "{found}");
            assert!(found.to_string().contains(".rs:"), "the fault names no source line: {found}");
        }
    }
}
