//! The Hopper kernel's PTX in the emulator: no fault under any schedule, the exact reference's numbers, the same bits.

use nvfp4::backend::Backend;
use nvfp4::backend::emulated::{Emulated, Options, Schedule};
use nvfp4::compare::Tolerance;
use nvfp4::generate::Generator;
use nvfp4::problem::{Group, Op, OutDtype};
use nvfp4_tests::{Case, Inputs, groups, inputs};

const OPS: [Op; 2] = [Op::Gated, Op::Plain];

const SCHEDULES: [Schedule; 4] = [Schedule::Fair, Schedule::Seed(1), Schedule::Seed(2), Schedule::Worst];

/// No schedule makes a fault or other bits, and all are right; `kernel` is the entry that runs.
fn check_schedules(kernel: &str, inputs: &Inputs, out_dtype: OutDtype) {
    let case = Case::new(inputs, out_dtype);
    let outputs = SCHEDULES.map(|schedule| {
        let gpu = Emulated::new("sm_90a", Options { schedule, ..Options::default() }).expect("the Hopper kernel");
        let mut layer = case.prepare(&gpu);
        let output = case.verified(&gpu, layer.as_mut(), |_| Tolerance::of(out_dtype));
        assert_eq!(layer.counters().expect("a kernel ran").kernel, kernel);
        output
    });
    assert!(outputs.iter().all(|output| *output == outputs[0]), "schedules gave different bits");
}

fn check(tokens: u32, sizes: &[(usize, usize, usize)]) {
    let groups: Vec<Group> = groups(sizes);
    for (op, name) in OPS.into_iter().zip(["gated", "plain"]) {
        for out_dtype in [OutDtype::F16, OutDtype::Bf16] {
            let kernel = format!("{name}_sm90_{tokens}");
            check_schedules(&kernel, &inputs(Generator::Gaussian, op, &groups, 1), out_dtype);
        }
    }
}

#[test]
fn one_token_is_right() {
    check(8, &[(1, 8, 32)]);
}
