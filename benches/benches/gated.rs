//! Compares the CPU backend with dequantizing to f32 and the `gemm` crate, and its memory rate with a plain read of the
//! same size.

mod common;

use common::rival::Rival;
use common::{criterion, measure};
use criterion::{Criterion, SamplingMode};
use nvfp4::Output;
use nvfp4::backend::cpu::Cpu;
use nvfp4::backend::{self, Backend};
use nvfp4::generate::{self, Generator};
use nvfp4::problem::{Step, TokenDtype, Weights};
use nvfp4::shape;
use nvfp4_benches::{check_sample, in_turns, median};
use rayon::prelude::*;

const SHAPES: [&str; 5] = ["dual-1", "dual-2", "dual-3", "dual-4", DECODE];

/// A shape with a single token per expert, so that memory is the limit.
const DECODE: &str = "decode-1";

/// Median seconds of a shape.
struct Times {
    shape: &'static str,
    backend: f64,
    /// Dequantizing in every run, then `gemm`.
    dequantize: f64,
    /// `gemm` alone, on numbers dequantized before.
    dequantized: f64,
}

fn bench_shape(criterion: &mut Criterion, name: &'static str) -> Option<Times> {
    let shape = shape::find(name).expect("a built-in shape");
    let generator = Generator::Gaussian;
    let weights = generate::weights(generator, shape.op, &shape.groups, 1).expect("a valid shape");
    let tokens = generate::activations(generator, &shape.groups, 1).expect("a valid shape");
    let step = Step::new(&weights, tokens, TokenDtype::F16).expect("tokens of the same shape");
    let mut output = Output::new(step.problem());

    let mut group = criterion.benchmark_group(name);
    group.sampling_mode(SamplingMode::Flat);

    let mut layer = Cpu::new().prepare(&weights).expect("memory for the weights");
    let mut run = |output: &mut Output| backend::run(&mut *layer, &step, output).expect("a step of these weights");
    run(&mut output);
    check_sample("CPU backend", &weights, &step, &output);
    let backend = measure(&mut group, "cpu backend", || _ = run(&mut output));
    drop(layer);

    let mut rival = Rival::new(&weights, &step);
    rival.dequantize();
    output.poison();
    rival.multiply(&mut output);
    check_sample("gemm", &weights, &step, &output);
    let dequantize = measure(&mut group, "dequantize + gemm", || {
        rival.dequantize();
        rival.multiply(&mut output);
    });
    let dequantized = measure(&mut group, "gemm, dequantized before", || rival.multiply(&mut output));
    group.finish();
    Some(Times { shape: name, backend: backend?, dequantize: dequantize?, dequantized: dequantized? })
}

/// Returns the bytes of weights that a step reads.
fn weight_bytes(weights: &Weights<'_>) -> usize {
    let matrices = weights.experts().iter().flat_map(|expert| expert.projections());
    matrices.map(|matrix| matrix.values().len() + matrix.scales().len()).sum()
}

/// Alternates a memory-bound step and a plain read of the same number of bytes. Returns the step's bytes per second,
/// and the median of its rate relative to the read's.
fn bench_plain_read() -> (f64, f64) {
    /// Words per task: a power of two, and more than a page per stream.
    const CHUNK: usize = 1 << 15;
    const TURNS: usize = 25;
    let shape = shape::find(DECODE).expect("a built-in shape");
    let weights = generate::weights(Generator::Gaussian, shape.op, &shape.groups, 1).expect("a valid shape");
    let tokens = generate::activations(Generator::Gaussian, &shape.groups, 1).expect("a valid shape");
    let step = Step::new(&weights, tokens, TokenDtype::F16).expect("tokens of the same shape");
    let mut output = Output::new(step.problem());
    let mut layer = Cpu::new().prepare(&weights).expect("memory for the weights");
    let bytes = weight_bytes(&weights);
    let memory = vec![1u64; bytes / size_of::<u64>()];
    let [backend, read] = in_turns(
        TURNS,
        [&mut || _ = layer.execute(&step, &mut output).expect("a step of these weights"), &mut || {
            let sum: u64 = memory.par_chunks(CHUNK).map(sum_in_four_streams).sum();
            assert_eq!(sum, memory.len() as u64);
        }],
    );
    let shares = backend.iter().zip(&read).map(|(backend, read)| read / backend).collect();
    (bytes as f64 / median(backend), median(shares))
}

/// Sums four streams at once. A single stream waits at the end of every page, and reads a fifth less.
fn sum_in_four_streams(memory: &[u64]) -> u64 {
    let quarter = memory.len() / 4;
    let (front, back) = memory.split_at(2 * quarter);
    let ((a, b), (c, d)) = (front.split_at(quarter), back.split_at(quarter));
    let sum: u64 = a.iter().zip(b).zip(c).zip(d).map(|(((a, b), c), d)| a + b + c + d).sum();
    sum + d[quarter..].iter().sum::<u64>()
}

fn main() {
    let mut criterion = criterion();
    let times: Vec<_> = SHAPES.into_iter().filter_map(|name| bench_shape(&mut criterion, name)).collect();
    let decode = times.iter().any(|times| times.shape == DECODE).then(bench_plain_read);
    criterion.final_summary();

    println!("\nmedian ms     cpu backend   dequantize + gemm   gemm, dequantized before");
    for Times { shape, backend, dequantize, dequantized, .. } in &times {
        let [a, b, c] = [backend, dequantize, dequantized].map(|seconds| seconds * 1e3);
        println!("{shape:10} {a:14.2} {b:11.1} {:5.1} x {c:17.1} {:5.1} x", b / a, c / a);
    }
    if times.len() == SHAPES.len() {
        let logarithms =
            times.iter().map(|times| [times.dequantize, times.dequantized].map(|x| (x / times.backend).ln()));
        let sums = logarithms.fold([0.0, 0.0], |sums, ratio| [sums[0] + ratio[0], sums[1] + ratio[1]]);
        let [a, b] = sums.map(|sum| (sum / SHAPES.len() as f64).exp());
        println!("{:10} {:30} {a:5.1} x {:17} {b:5.1} x", "geom. mean", "", "");
    }
    if let Some((rate, share)) = decode {
        println!(
            "{DECODE}: {:.1} GB/s of weights, {:.0} % of a plain read of the same size (median of turns)",
            rate / 1e9,
            100.0 * share
        );
    }
}
