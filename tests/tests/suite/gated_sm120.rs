//! The kernel for sm_120 in the emulator: no fault under any schedule, outputs equal to the exact reference's, the
//! same bits every time, for every instance.

use nvfp4::Error;
use nvfp4::backend::Backend;
use nvfp4::backend::emulated::{Emulated, Options, Schedule};
use nvfp4::compare::Tolerance;
use nvfp4::generate::Generator;
use nvfp4::kernels::GroupedKernel;
use nvfp4::problem::{Op, TokenDtype};
use nvfp4::shape;
use nvfp4_tests::instances::{
    OPS, check, check_built_in_shapes, check_shapes, corners, device, sampled_schedules, verified, with_instance,
};
use nvfp4_tests::sabotage::{Sabotage, changed, check_sabotages, fault_of, lines_of, only_entries};
use nvfp4_tests::{Case, groups, inputs, is_full, sampled};
use ptx_emulator::{Card, Key};

fn consumer(schedule: Schedule) -> Emulated {
    device("sm_120f", schedule)
}

#[test]
fn ragged_groups_with_k_tails_are_right_on_every_schedule() {
    let schedules = [Schedule::Fair, Schedule::Worst, Schedule::Seed(1), Schedule::Seed(2)];
    let sizes = [(0, 8, 64), (1, 72, 320), (7, 8, 192), (127, 136, 64), (129, 72, 256), (0, 128, 256), (33, 8, 32)];
    for op in OPS {
        for out_dtype in [TokenDtype::F16, TokenDtype::Bf16] {
            let inputs = inputs(Generator::Gaussian, op, &groups(&sizes), 1);
            let entry = format!("{}_sm120_t128", op.name());
            check(&Case::new(&inputs, out_dtype), schedules.into_iter().map(consumer), out_dtype, &entry);
        }
    }
}

#[test]
fn instances_are_right_on_random_and_worst_schedules() {
    let gpu = consumer(Schedule::Fair);
    for op in OPS {
        for variant in gpu.instances(op) {
            // Consecutive tiles, a last tile of few tokens, and every possible number of MMA steps in the last
            // k-block.
            let sizes = groups(&[(7, 136, 64), (0, 8, 32), (141, 72, 352), (1, 8, 448), (17, 64, 480)]);
            let inputs = inputs(Generator::Gaussian, op, &sizes, 2);
            let entry = format!("{}_sm120_{variant}", op.name());
            let gpus = sampled_schedules().into_iter();
            let gpus = gpus.map(|schedule| with_instance(gpu.clone().with_schedule(schedule), variant));
            check(&Case::new(&inputs, TokenDtype::F16), gpus, TokenDtype::F16, &entry);
        }
    }
}

#[test]
fn all_codes_of_values_and_scales_multiply_exactly() {
    for op in OPS {
        let inputs = inputs(Generator::AllCodes, op, &groups(&[(40, 136, 512), (9, 8, 96)]), 3);
        let case = Case::new(&inputs, TokenDtype::F16);
        verified(&case, &consumer(Schedule::Fair), TokenDtype::F16, &format!("{}_sm120_t64", op.name()));
    }
}

/// sm_121, the family's other GPU, runs the same code.
#[test]
fn sm_121_runs_the_kernel() {
    let inputs = inputs(Generator::Gaussian, Op::Gated, &groups(&[(5, 72, 320)]), 4);
    verified(
        &Case::new(&inputs, TokenDtype::F16),
        &device("sm_121a", Schedule::Worst),
        TokenDtype::F16,
        "gated_sm120_t8",
    );
}

#[test]
fn corners_of_every_built_in_shape_are_right() {
    let corners = sampled(shape::builtin().iter().map(corners).collect(), 6);
    check_shapes(GroupedKernel::named("gated_sm120").unwrap(), "sm_120f", &corners);
}

#[test]
fn every_built_in_shape_is_right() {
    check_built_in_shapes("gated_sm120", "sm_120f");
}

/// Returns a device with one SM, on the worst schedule, for an instance with small tiles.
fn worst() -> Emulated {
    let options = Options { schedule: Schedule::Worst, sms: Some(1), ..Options::default() };
    with_instance(Emulated::new("sm_120f", options).unwrap(), "t16")
}

const ENTRY: &str = "gated_sm120_t16";

/// PTX of the entry alone.
fn text() -> String {
    only_entries(worst().ptx(), |name| name == ENTRY)
}

/// Runs a PTX text of the kernel on ragged tiles, which one CTA computes in turn. Returns the mismatch, if there is
/// one.
fn run(ptx: &str) -> Result<Option<String>, Error> {
    let inputs = inputs(Generator::Gaussian, Op::Gated, &groups(&[(49, 136, 1600), (7, 72, 320)]), 2);
    let case = Case::new(&inputs, TokenDtype::F16);
    let output = case.try_run(case.prepare(&worst().with_ptx(ptx).unwrap()).as_mut())?;
    Ok(case.mismatch(&output, |_| Tolerance::of(TokenDtype::F16)))
}

#[test]
fn removing_any_copy_wait_or_arrival_is_found() {
    const SABOTAGES: [Sabotage; 5] = [
        Sabotage::leave_out("mbarrier.init", 2),
        Sabotage::do_not_wait(2),
        Sabotage::leave_out("mbarrier.arrive", 2),
        Sabotage::leave_out("cp.async.bulk.tensor", 1),
        Sabotage::leave_out("cp.async.bulk.shared", 3),
    ];
    // The fence before a stage's release is not in the list: the emulator completes a load at once, a GPU does not.
    check_sabotages(&text(), ENTRY, &SABOTAGES, |ptx| fault_of(run(ptx)).is_some());
}

#[test]
fn removing_any_mma_or_changing_a_selector_is_found() {
    let text = text();
    let products = lines_of(&text, ENTRY, "mma.sync");
    assert!(products.len() >= 8, "2 slabs, 2 groups of 8 tokens and 2 steps need 8 MMAs, found {}", products.len());
    for (line, product) in products {
        let others = [("{0, 0}", "{0, 1}"), ("{0, 1}", "{0, 0}")].map(|(from, to)| product.replacen(from, to, 1));
        for other in ["".to_owned()].into_iter().chain(others.into_iter().filter(|other| other != product)) {
            let found = run(&changed(&text, &[(line, &other)]));
            assert!(!matches!(found, Ok(None)), "line {line} may be changed to `{other}` unnoticed: {product}");
        }
    }
}

/// Returns the predicted time on a GPU in microseconds, without computing outputs.
fn predicted(card: &Card, op: Op, sizes: &[(usize, usize, usize)]) -> f64 {
    let gpu = Emulated::new(card.arch, Options::default()).unwrap().with_clock(card.clone(), false, false);
    let inputs = inputs(Generator::Gaussian, op, &groups(sizes), 1);
    let case = Case::new(&inputs, TokenDtype::F16);
    case.try_run(case.prepare(&gpu).as_mut()).unwrap();
    gpu.prediction().expect("a prediction, as the device has a clock").microseconds
}

#[test]
fn predicted_times_near_peak_bandwidth_and_beat_a_public_kernel() {
    let pro = Card::named("rtx-pro-6000").unwrap();
    let (m, n, k) = (4096, 512, 7168);
    let tflops = (2 * m * n * k) as f64 / predicted(&pro, Op::Plain, &[(m, n, k)]) / 1e6;
    println!("N = {n}, K = {k}, M = {m}: {tflops:.0} TFLOP/s");
    assert!(tflops > 561.0, "FlashInfer PR 3560 measured 561 TFLOP/s on 188 SMs; predicted {tflops:.0}");
    let names = ["rtx-5090", "gb10", "rtx-pro-6000", "rtx-5070-ti"];
    for name in if is_full() { &names[..] } else { &names[..1] } {
        let card = Card::named(name).unwrap();
        let (experts, n, k) = (8, 4096, 7168);
        let gigabytes = (experts * 2 * n * k * 9 / 16) as f64 / 1e9;
        let rate = gigabytes / predicted(&card, Op::Gated, &vec![(1, n, k); experts]) * 1e6;
        let delivers = card.get(Key::DramBytes);
        println!("{name}: {rate:.0} GB/s of the modeled memory bandwidth of {delivers:.0} GB/s");
        assert!(rate > 0.9 * delivers, "{name}: {rate:.0} of {delivers:.0} GB/s");
    }
}
