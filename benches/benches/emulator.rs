//! Times the PTX emulator: instructions, tensor-core products, and the cost of the sanitizer.

mod common;

use std::process::ExitCode;

use common::{criterion, measure};
use criterion::{BenchmarkGroup, SamplingMode, measurement::WallTime};
use nvfp4::Output;
use nvfp4::backend::emulated::{Emulated, Options};
use nvfp4::backend::{self, Backend};
use nvfp4::generate::{self, Generator};
use nvfp4::problem::{Group, Op, Step, TokenDtype};
use nvfp4_benches::check_sample;
use ptx_emulator::{Arg, Device, DeviceConfig, LaunchConfig, Module, Report};

/// The emulator's goals on two cores.
const THREAD_INSTRUCTIONS_PER_SECOND: f64 = 500e6;
const MULTIPLY_ADDS_PER_SECOND: f64 = 10e9;
const SANITIZER_SLOWDOWN: f64 = 4.0;

/// Runs an entry without the sanitizer. The entry's parameters are a buffer with one word per thread, and a number.
fn launch(module: &Module, ctas: u32, threads: u32, number: u32) -> (Report, Vec<u32>) {
    let mut device = Device::new(DeviceConfig::default());
    let out = device.allocate(u64::from(ctas * threads) * size_of::<u32>() as u64);
    let config = LaunchConfig { sanitize: false, ..LaunchConfig::linear(ctas, threads) };
    let entry = &module.entries()[0].name;
    let report = device.launch(module, entry, &config, &[out.into(), Arg::value(number)]).expect("a sound kernel");
    (report, device.download(out))
}

/// Returns thread instructions per second.
fn bench_alu(group: &mut BenchmarkGroup<'_, WallTime>) -> Option<f64> {
    const STEPS: u32 = 1000;
    let module = Module::parse(include_str!("alu.ptx")).expect("PTX");
    let run = || launch(&module, 64, 256, STEPS);
    let (report, numbers) = run();
    for (thread, &number) in numbers.iter().enumerate() {
        let want = (0..STEPS).fold(thread as u32, |x, _| {
            let x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            x ^ x >> 13
        });
        assert_eq!(number, want, "thread {thread}");
    }
    let seconds = measure(group, "ALU loop", || _ = run())?;
    Some(report.total.thread_instructions as f64 / seconds)
}

/// Returns multiply-adds per second.
fn bench_mxf4nvf4(group: &mut BenchmarkGroup<'_, WallTime>) -> Option<f64> {
    const PRODUCTS: u32 = 64;
    const K: u32 = 64;
    let module = Module::parse(include_str!("mxf4nvf4.ptx")).expect("PTX");
    let run = || launch(&module, 8, 128, PRODUCTS);
    let (report, sums) = run();
    let want = (PRODUCTS * K) as f32;
    assert!(sums.iter().all(|&sum| f32::from_bits(sum) == want), "expected {want} in every sum");
    let seconds = measure(group, "mxf4nvf4", || _ = run())?;
    Some(report.total.matrix_multiply_adds as f64 / seconds)
}

/// Returns the time of `gated_simt` with the sanitizer relative to its time without.
fn bench_sanitizer(group: &mut BenchmarkGroup<'_, WallTime>) -> Option<f64> {
    let groups = [Group { m: 96, n: 128, k: 256 }];
    let weights = generate::weights(Generator::Gaussian, Op::Gated, &groups, 1).expect("valid sizes");
    let tokens = generate::activations(Generator::Gaussian, &groups, 1).expect("valid sizes");
    let step = Step::new(&weights, tokens, TokenDtype::F16).expect("tokens of the same sizes");
    let [without, with] = [false, true].map(|sanitize| {
        let gpu = Emulated::new("sm_80", Options { sanitize, ..Options::default() }).expect("the portable kernel");
        let mut layer = gpu.prepare(&weights).expect("memory for the weights");
        let mut output = Output::new(step.problem());
        backend::run(&mut *layer, &step, &mut output).expect("a sound kernel");
        check_sample("emulator", &weights, &step, &output);
        let name = if sanitize { "gated_simt, sanitized" } else { "gated_simt" };
        measure(group, name, || _ = backend::run(&mut *layer, &step, &mut output).expect("a sound kernel"))
    });
    Some(with? / without?)
}

/// Exits with status 1 if a goal is not met.
fn main() -> ExitCode {
    let mut criterion = criterion();
    let mut group = criterion.benchmark_group("emulator");
    group.sampling_mode(SamplingMode::Flat);
    let alu = bench_alu(&mut group);
    let mxf4nvf4 = bench_mxf4nvf4(&mut group);
    let slowdown = bench_sanitizer(&mut group);
    group.finish();
    criterion.final_summary();

    let mut all_met = true;
    let mut verdict = |met| {
        all_met &= met;
        if met { "met" } else { "NOT met" }
    };
    println!("\nin this run, on {} threads:", rayon::current_num_threads());
    if let Some(rate) = alu {
        let (goal, verdict) = (THREAD_INSTRUCTIONS_PER_SECOND, verdict(rate >= THREAD_INSTRUCTIONS_PER_SECOND));
        println!("ALU loop: {:.0} M thread-instructions/s, goal {:.0} M: {verdict}", rate / 1e6, goal / 1e6);
    }
    if let Some(rate) = mxf4nvf4 {
        let (goal, verdict) = (MULTIPLY_ADDS_PER_SECOND, verdict(rate >= MULTIPLY_ADDS_PER_SECOND));
        println!("mxf4nvf4: {:.1} G multiply-adds/s, goal {:.0} G: {verdict}", rate / 1e9, goal / 1e9);
    }
    if let Some(ratio) = slowdown {
        let verdict = verdict(ratio <= SANITIZER_SLOWDOWN);
        println!("sanitizer: {ratio:.2} x slower on gated_simt, goal at most {SANITIZER_SLOWDOWN:.0} x: {verdict}");
    }
    if all_met { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
