//! `nvfp4 run --op linear`: generates or reads one matrix, runs it on a backend, compares the outputs, and prints a
//! report.

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use nvfp4::backend::{Backend, LinearLayer, cpu::Cpu};
use nvfp4::checkpoint::{Checkpoint, LayerTensors};
use nvfp4::linear::compare::{compare_sample, compare_with_progress};
use nvfp4::linear::{LinearInputs, LinearOutput, LinearSizes, LinearStep, LinearWeights, generate};
use nvfp4::moe::compare::StageComparison;
use nvfp4::plan::variant::Variant;
use nvfp4::problem::TokenFormat;
use nvfp4::{Error, printable};
use serde_json::json;

use super::args::{Args, Choice, Verify};
use super::prediction::{self, Sensitivity};
use super::tokens::{self, Tokens};
use super::{job, report, tensors};
use crate::cli::progress::Progress;
use crate::cli::{exit, table};

/// Default M, N and K: the output projection of Qwen3-30B-A3B's attention.
const SHAPE: &str = "16,2048,4096";

/// Default number of tokens for a weight of a checkpoint.
const TOKENS: usize = 16;

/// Number of elements in a sample.
const SAMPLE: usize = 4096;

/// Runs the layer on the chosen backend, and prints the report.
pub fn run(args: &Args, backend: Box<dyn Backend>, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    if args.routing.is_some() || args.layer.is_some() {
        bail!("--routing and --layer cannot be used with --op linear; remove them");
    }
    if args.variant != (Variant { graph: args.variant.graph, ..Default::default() }) {
        bail!("with --op linear, --variant accepts only `graph`; remove the other words");
    }
    let token_format = args.token_format.unwrap_or_default();
    if let Some(checkpoint) = args.checkpoint()? {
        let module = args.tensor.as_deref().context("--op linear with --weights needs --tensor NAME")?;
        let tokens = Tokens::of(args, TOKENS)?;
        let mut layer = checkpoint.scaled_linear(module, tokens.dtype)?;
        layer.weights = layer.weights.with_token_format(token_format);
        let sizes = layer.weights.sizes();
        check_memory(tokens.count, sizes.n, sizes.k)?;
        let tensors = Some(checkpoint.linear_tensors(module));
        let mut x = tokens.bits(args, sizes.k)?;
        layer.scale(&mut x)?;
        let name = format!("{} {module}", checkpoint.path().display());
        let job = Job { name, tensors, weights: layer.weights, tokens, x };
        return compute(args, job, backend, Some(&checkpoint), out);
    }
    let generator = args.input.unwrap_or_default();
    let shape = args.shape.as_deref().unwrap_or(SHAPE);
    let [m, n, k] = parse_shape(shape)?;
    let tokens = Tokens::of(args, m)?;
    let dtype = tokens.dtype;
    LinearSizes { n, k, dtype, bias: false, token_format }.check()?;
    check_memory(tokens.count, n, k)?;
    let weights = generate::weights(generator, n, k, dtype, args.seed)?.with_token_format(token_format);
    let x = tokens.bits(args, k)?;
    compute(args, Job { name: shape.into(), tensors: None, weights, tokens, x }, backend, None, out)
}

/// The layer and its inputs.
struct Job<'a> {
    name: String,
    /// Tensors of the module that are used and left, from a checkpoint.
    tensors: Option<LayerTensors>,
    weights: LinearWeights<'a>,
    tokens: Tokens,
    /// Bits of the tokens as they are multiplied.
    x: Vec<u16>,
}

/// Parses M, N and K of a shape.
fn parse_shape(shape: &str) -> anyhow::Result<[usize; 3]> {
    let numbers: Result<Vec<usize>, _> = shape.split(',').map(|number| number.trim().parse()).collect();
    let numbers = numbers.ok().and_then(|numbers| <[usize; 3]>::try_from(numbers).ok());
    numbers
        .with_context(|| format!("invalid shape {shape:?} of --op linear; expected M,N,K, for example --shape {SHAPE}"))
}

/// Refuses a layer that does not fit this machine's memory, before anything is allocated.
fn check_memory(tokens: usize, n: usize, k: usize) -> anyhow::Result<()> {
    let (m, n, k) = (tokens as f64, n as f64, k as f64);
    // The sum of: the weights and their prepared copy, each at 9/16 byte per element; f32 numbers while they are
    // quantized; 16-bit tokens and outputs, their copies on a device, and the f64 tokens of the reference.
    job::check_present(
        2.0 * n * k * 9.0 / 16.0 + 4.0 * n * k + 12.0 * m * (n + k),
        "use fewer tokens or a smaller shape",
    )
}

/// Runs the job and prints the report. The files of `checkpoint` must not have changed before results are reported.
fn compute(
    args: &Args,
    job: Job<'_>,
    mut backend: Box<dyn Backend>,
    checkpoint: Option<&Checkpoint>,
    out: &mut impl Write,
) -> anyhow::Result<ExitCode> {
    let Job { name, tensors, weights, tokens, x } = &job;
    let sizes = weights.sizes();
    let x = x.into();
    let step = LinearStep::new(weights, LinearInputs { tokens: tokens.count, x, stride: sizes.k })?;
    let output_file = tokens::output_file(args, checkpoint, sizes.dtype, [tokens.count, sizes.n])?;
    let mut layer = match backend.prepare_linear(weights) {
        Err(Error::NotComputed(_)) if args.backend == Choice::Auto => {
            backend = Box::new(Cpu::new());
            backend.prepare_linear(weights)?
        }
        prepared => prepared?,
    };
    let (timed, warm_up) = args.runs();
    let (mut times, mut host_times, mut same_bits) = (Vec::new(), Vec::new(), true);
    let mut outputs = [LinearOutput::new(&step), LinearOutput::new(&step)];
    {
        let progress = Progress::new("running", warm_up + timed);
        for run in 0..warm_up + timed {
            let output = &mut outputs[usize::from(run > 0)];
            output.poison();
            times.push(layer.execute(&step, output)?);
            host_times.extend(layer.host_time());
            same_bits &= run == 0 || outputs[0] == outputs[1];
            progress.add(1);
        }
    }
    for times in [&mut times, &mut host_times] {
        times.drain(..warm_up.min(times.len()));
        times.sort();
    }
    let comparison = match args.verify {
        _ if args.no_values => None,
        Verify::Off => None,
        Verify::Sample => Some(compare_sample(weights, &step, &outputs[0], SAMPLE, args.seed)),
        Verify::Full => {
            let progress = Progress::new("verifying", outputs[0].out.len());
            Some(compare_with_progress(weights, &step, &outputs[0], &|done| progress.add(done)))
        }
    };
    checkpoint.map_or(Ok(()), Checkpoint::check_unchanged)?;
    if let Some(prediction) = backend.prediction() {
        prediction::write(args, &prediction)?;
    }
    let report = Report {
        args,
        name,
        input: &tokens.source,
        tensors: tensors.as_ref(),
        sizes,
        has_input_scale: weights.input_scale().is_some(),
        tokens: tokens.count,
        backend: backend.as_ref(),
        layer: layer.as_ref(),
        min: times[0],
        median: times[times.len() / 2],
        host: host_times.get(host_times.len() / 2).copied(),
        comparison,
        same_bits,
    };
    let sensitivity = Sensitivity::new(args, |gpu| {
        gpu.prepare_linear(weights)?.execute(&step, &mut LinearOutput::new(&step))?;
        Ok(())
    })?;
    let is_wrong = comparison.is_some_and(|comparison| comparison.mismatches > 0) || !same_bits;
    // Written before the report: if the reader of the report is gone, printing ends the command.
    let written = output_file.filter(|_| !is_wrong).map_or(Ok(()), |file| file.write_bits(&outputs[0].out));
    prediction::print(args, report.json(), |out| report.print(out), sensitivity.as_ref(), out)?;
    written?;
    Ok(if is_wrong { ExitCode::from(exit::WRONG) } else { ExitCode::SUCCESS })
}

/// A run: its inputs, times and comparison.
struct Report<'a> {
    args: &'a Args,
    name: &'a str,
    input: &'a str,
    tensors: Option<&'a LayerTensors>,
    sizes: LinearSizes,
    has_input_scale: bool,
    tokens: usize,
    backend: &'a dyn Backend,
    layer: &'a dyn LinearLayer,
    min: Duration,
    median: Duration,
    host: Option<Duration>,
    comparison: Option<StageComparison>,
    same_bits: bool,
}

impl Report<'_> {
    /// `true` if every element was compared, had a bound, and is right.
    fn verified(&self) -> bool {
        let is_right = |comparison: StageComparison| comparison.mismatches == 0 && comparison.unbounded == 0;
        self.args.verify == Verify::Full && self.same_bits && self.comparison.is_some_and(is_right)
    }

    /// Bytes that the step must read and write: weights, tokens and output.
    fn bytes(&self) -> usize {
        self.sizes.n * self.sizes.k / 16 * 9 + 2 * self.tokens * (self.sizes.n + self.sizes.k)
    }

    /// Number of operations. A multiply-add counts as two.
    fn operations(&self) -> f64 {
        2.0 * self.tokens as f64 * self.sizes.n as f64 * self.sizes.k as f64
    }

    fn json(&self) -> serde_json::Value {
        let (LinearSizes { n, k, dtype, bias, token_format }, seconds) = (self.sizes, self.median.as_secs_f64());
        // No rates for the emulator: they would be mistaken for the device's.
        let rate = |amount: f64| self.layer.counters().is_none().then_some(amount / seconds);
        let comparison = self.comparison.as_ref();
        let mut report = json!({
            "op": "linear",
            "backend": self.backend.name(),
            "kernel": self.layer.kernel(),
            "device": self.backend.device(),
            "shape": self.name,
            "input": self.input,
            "dtype": dtype.name(),
            "m": self.tokens,
            "n": n,
            "k": k,
            "bias": bias,
            "token_format": token_format.name(),
            "input_scale": self.has_input_scale,
            "tensors": tensors::json(self.tensors),
            "bytes": self.bytes(),
            "time_us": {"min": self.min.as_secs_f64() * 1e6, "median": seconds * 1e6},
            "launches": self.layer.launches(),
            "host_us": self.host.map(|host| host.as_secs_f64() * 1e6),
            "tflops": rate(self.operations() / 1e12),
            "gb_per_s": rate(self.bytes() as f64 / 1e9),
            "checked": comparison.map(|found| found.checked),
            "mismatches": comparison.map(|found| found.mismatches),
            "unbounded": comparison.map(|found| found.unbounded),
            "max_abs_err": comparison.map(|found| found.max_abs_err),
            "first_mismatch": comparison.and_then(|found| found.first).map(|first| first.to_string()),
            "same_bits": self.same_bits,
            "verified": self.verified(),
        });
        if let Some(counters) = self.layer.counters() {
            report["counters"] = json!(counters);
        }
        if let Some(prediction) = self.backend.prediction() {
            report["predicted_us"] = json!(prediction.microseconds);
            report["prediction"] = json!({"gpu": prediction.card.name, "launches": prediction.launches});
        }
        report
    }

    fn print(&self, out: &mut impl Write) -> std::io::Result<()> {
        let (LinearSizes { n, k, dtype, bias, token_format }, seconds) = (self.sizes, self.median.as_secs_f64());
        writeln!(
            out,
            "{} linear · {}, {} · {} on {}, {}",
            printable(self.name),
            printable(self.input),
            dtype.name(),
            self.backend.name(),
            self.backend.device(),
            self.layer.kernel()
        )?;
        let bias = if bias { ", with a bias" } else { "" };
        let by_scale =
            if token_format == TokenFormat::Nvfp4 && self.has_input_scale { " by an input scale" } else { "" };
        let tokens = report::tokens_of(token_format, self.tokens) + by_scale;
        writeln!(out, "layer     N {n}, K {k}{bias}; {tokens}")?;
        tensors::print(self.tensors, out)?;
        writeln!(out, "bytes     {}", table::bytes(self.bytes() as f64))?;
        if let Some(counters) = self.layer.counters() {
            report::print_counters(counters, self.operations(), seconds, out)?;
            if let Some(prediction) = self.backend.prediction() {
                report::print_prediction(&prediction, out)?;
            }
        } else {
            let (median, min) = (table::time(seconds), table::time(self.min.as_secs_f64()));
            writeln!(out, "time      median {median}, min {min} of {}", self.args.runs().0)?;
            if let (Some(count), Some(host)) = (self.layer.launches(), self.host) {
                writeln!(out, "launches  {}, queued in {}", report::launches(count), table::time(host.as_secs_f64()))?;
            }
            if self.tokens > 0 {
                let (tflops, gigabytes) = (self.operations() / seconds / 1e12, self.bytes() as f64 / seconds / 1e9);
                writeln!(out, "rate      {tflops:.3} TFLOP/s, {gigabytes:.2} GB/s")?;
            }
        }
        let Some(found) = &self.comparison else { return writeln!(out, "verified  no: not checked") };
        writeln!(out, "error     at most {:.2e} from the rounded reference", found.max_abs_err)?;
        let (checked, wrong) = (table::thousands(found.checked), table::thousands(found.mismatches));
        match (found.first, self.args.verify) {
            (Some(first), _) => {
                writeln!(out, "verified  NO: {wrong} of {checked} elements are wrong; the first: {first}")
            }
            _ if !self.same_bits => writeln!(out, "verified  NO: the output of a run differs from the first run's"),
            _ if found.unbounded > 0 => {
                let unbounded = table::thousands(found.unbounded);
                writeln!(
                    out,
                    "verified  no: {unbounded} of {checked} elements may overflow f32 in between; the others are right"
                )
            }
            (None, Verify::Full) => {
                writeln!(out, "verified  yes: all {checked} elements within the bounds of f32 sums")
            }
            (None, _) => writeln!(out, "verified  no: only a sample of {checked} elements was checked; none is wrong"),
        }
    }
}
