//! `nvfp4 run --op moe`: generates or reads a whole layer, runs it on a backend, compares its stages, and prints a
//! report.

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use nvfp4::backend::{Backend, MoeLayer, cpu::Cpu};
use nvfp4::checkpoint::{Checkpoint, LayerTensors};
use nvfp4::moe::compare::{MoeComparison, compare_sample, compare_with_progress, elements};
use nvfp4::moe::generate;
use nvfp4::moe::{MoeInputs, MoeOutput, MoeSizes, MoeStep, MoeWeights, shape};
use nvfp4::plan::variant::Variant;
use nvfp4::problem::{TokenDtype, TokenFormat};
use nvfp4::{Error, printable};
use serde_json::json;

use super::args::{Args, Choice, Verify};
use super::prediction::{self, Sensitivity};
use super::tokens::{self, Tokens};
use super::{job, report, tensors};
use crate::cli::progress::Progress;
use crate::cli::{exit, table};

/// Default layer.
const SHAPE: &str = "qwen3-30b-a3b";

/// Number of elements of each stage in a sample.
const SAMPLE: usize = 4096;

/// Default number of tokens for a layer of a checkpoint.
const TOKENS: usize = 16;

/// Runs the layer on the chosen backend, and prints the report.
pub fn run(args: &Args, backend: Box<dyn Backend>, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    if args.tensor.is_some() {
        bail!("--tensor cannot be used with --op moe; use --layer");
    }
    if args.variant != (Variant { graph: args.variant.graph, ..Default::default() }) {
        bail!("with --op moe, --variant accepts only `graph`; remove the other words");
    }
    if let Some(checkpoint) = args.checkpoint()? {
        let number = args.layer.expect("clap requires --layer or --tensor with --weights");
        if args.routing.is_some() {
            bail!("a layer of a checkpoint has its own router; remove --routing");
        }
        let tokens = Tokens::of(args, TOKENS)?;
        let layer = checkpoint.moe_layer(number, tokens.dtype)?;
        let sizes = layer.weights.sizes();
        check_memory(&sizes, tokens.count)?;
        let inputs = layer.router.inputs(sizes, tokens.bits(args, sizes.hidden)?)?;
        let name = format!("{} layer {number}", checkpoint.path().display());
        let weights = layer.weights.with_token_format(args.token_format.unwrap_or(backend.moe_token_format()));
        let tensors = Some(layer.tensors);
        let job = Job { name, input: tokens.source, routing: "its router's", tensors, weights, inputs };
        return compute(args, job, backend, Some(&checkpoint), out);
    }
    let dtype = args.out_dtype.unwrap_or(TokenDtype::Bf16);
    let name = args.shape.as_deref().unwrap_or(SHAPE);
    let shape = shape::find(name)?;
    let token_format = args.token_format.unwrap_or(match shape.token_format {
        TokenFormat::Bits16 => backend.moe_token_format(),
        of_layer => of_layer,
    });
    let shape = shape.with_token_format(token_format);
    let (generator, routing) = (args.input.unwrap_or(shape.input), args.routing.unwrap_or(shape.routing));
    let tokens = args.tokens.unwrap_or(shape.tokens);
    check_memory(&shape.sizes(dtype), tokens)?;
    let inputs = generate::inputs(&shape, generator, routing, dtype, tokens, args.seed)?;
    let weights = {
        let progress = Progress::new("generating", shape.experts + usize::from(shape.shared_intermediate.is_some()));
        generate::weights(&shape, generator, dtype, args.seed, &|| progress.add(1))?
    };
    let (name, input, tensors) = (name.into(), generator.name().into(), None);
    let job = Job { name, input, routing: routing.name(), tensors, weights, inputs };
    compute(args, job, backend, None, out)
}

/// The layer and its inputs.
struct Job<'a> {
    name: String,
    /// Generator or file of the tokens.
    input: String,
    /// Name of the routing of the tokens.
    routing: &'static str,
    /// Tensors of the layer that are used and left, from a checkpoint.
    tensors: Option<LayerTensors>,
    weights: MoeWeights<'a>,
    inputs: MoeInputs<'static>,
}

/// Runs the job and prints the report. The files of `checkpoint` must not have changed before results are reported.
fn compute(
    args: &Args,
    job: Job<'_>,
    mut backend: Box<dyn Backend>,
    checkpoint: Option<&Checkpoint>,
    out: &mut impl Write,
) -> anyhow::Result<ExitCode> {
    let Job { name, input, routing, tensors, weights, inputs } = job;
    let step = MoeStep::new(&weights, inputs)?;
    let sizes = step.sizes();
    let output_file = tokens::output_file(args, checkpoint, sizes.dtype, [step.tokens(), sizes.hidden])?;
    let mut layer = match backend.prepare_moe(&weights) {
        Err(Error::NotComputed(_)) if args.backend == Choice::Auto => {
            backend = Box::new(Cpu::new());
            backend.prepare_moe(&weights)?
        }
        prepared => prepared?,
    };
    let Runs { times, host_times, output, comparison, same_bits } = runs(args, &weights, &step, layer.as_mut())?;
    checkpoint.map_or(Ok(()), Checkpoint::check_unchanged)?;
    if let Some(prediction) = backend.prediction() {
        prediction::write(args, &prediction)?;
    }
    let median = |times: &[Duration]| times.get(times.len() / 2).copied();
    let report = Report {
        args,
        shape: &name,
        input: &input,
        routing,
        tensors: tensors.as_ref(),
        weights: &weights,
        step: &step,
        backend: backend.as_ref(),
        layer: layer.as_ref(),
        min: times[0],
        median: times[times.len() / 2],
        host: median(&host_times),
        comparison: comparison.as_ref(),
        same_bits,
    };
    let sensitivity = Sensitivity::new(args, |gpu| {
        gpu.prepare_moe(&weights)?.execute(&step, &mut MoeOutput::new(&step))?;
        Ok(())
    })?;
    let is_wrong = comparison.as_ref().is_some_and(|comparison| !comparison.passed()) || !same_bits;
    // Written before the report: if the reader of the report is gone, printing ends the command.
    let written = output_file.filter(|_| !is_wrong).map_or(Ok(()), |file| file.write_bits(&output.hidden));
    prediction::print(args, report.json(), |out| report.print(out), sensitivity.as_ref(), out)?;
    written?;
    Ok(if is_wrong { ExitCode::from(exit::WRONG) } else { ExitCode::SUCCESS })
}

/// Refuses a layer that does not fit this machine's memory, before anything is allocated.
fn check_memory(sizes: &MoeSizes, tokens: usize) -> anyhow::Result<()> {
    let widths = sizes.intermediate.saturating_mul(3).saturating_add(sizes.shared_intermediate.unwrap_or(0));
    let matrix = sizes.hidden as f64 * sizes.intermediate.max(sizes.shared_intermediate.unwrap_or(0)) as f64;
    // The sum of: the weights and their prepared copy, each at 9/16 byte per element; f32 numbers while one matrix is
    // quantized; 16-bit rows of the inputs and of two outputs, and the f32 sums of one expert.
    let weights = 3.0 * matrix * (sizes.experts + 1) as f64 * 2.0 * 9.0 / 16.0;
    let rows = tokens as f64 * (sizes.top_k + 1) as f64 * (widths + sizes.hidden) as f64;
    job::check_present(weights + 4.0 * matrix + 8.0 * rows, "use fewer tokens or a smaller layer")
}

/// Results of all runs.
struct Runs {
    /// Sorted times of the timed runs.
    times: Vec<Duration>,
    host_times: Vec<Duration>,
    /// Output of the first run.
    output: MoeOutput,
    comparison: Option<MoeComparison>,
    /// Whether the outputs of all runs equal the first run's bit for bit.
    same_bits: bool,
}

/// Runs the layer. The first run returns its stages, which are compared. The other runs must reproduce its bits.
fn runs(args: &Args, weights: &MoeWeights<'_>, step: &MoeStep<'_>, layer: &mut dyn MoeLayer) -> anyhow::Result<Runs> {
    let (timed, warm_up) = args.runs();
    let (mut times, mut host_times, mut same_bits) = (Vec::new(), Vec::new(), true);
    let progress = Progress::new("running", warm_up + timed);
    let mut run = |output: &mut MoeOutput| {
        output.poison();
        times.push(layer.execute(step, output)?);
        host_times.extend(layer.host_time());
        progress.add(1);
        anyhow::Ok(())
    };
    let mut first = if args.verify == Verify::Off { MoeOutput::new(step) } else { MoeOutput::with_stages(step) };
    run(&mut first)?;
    let mut again = MoeOutput::new(step);
    for _ in 1..warm_up + timed {
        run(&mut again)?;
        same_bits &= again.hidden == first.hidden;
    }
    drop(progress);
    for times in [&mut times, &mut host_times] {
        times.drain(..warm_up.min(times.len()));
        times.sort();
    }
    let comparison = match args.verify {
        _ if args.no_values => None,
        Verify::Off => None,
        Verify::Sample => Some(compare_sample(weights, step, &first, SAMPLE, args.seed)),
        Verify::Full => {
            let progress = Progress::new("verifying", elements(step));
            Some(compare_with_progress(weights, step, &first, &|done| progress.add(done)))
        }
    };
    Ok(Runs { times, host_times, output: first, comparison, same_bits })
}

/// A run: its inputs, times and comparison.
struct Report<'a> {
    args: &'a Args,
    shape: &'a str,
    input: &'a str,
    routing: &'static str,
    tensors: Option<&'a LayerTensors>,
    weights: &'a MoeWeights<'a>,
    step: &'a MoeStep<'a>,
    backend: &'a dyn Backend,
    layer: &'a dyn MoeLayer,
    min: Duration,
    median: Duration,
    host: Option<Duration>,
    comparison: Option<&'a MoeComparison>,
    same_bits: bool,
}

impl Report<'_> {
    /// `true` if every element was compared, had a bound, and is right.
    fn verified(&self) -> bool {
        let is_right = |comparison: &MoeComparison| comparison.passed() && comparison.unbounded() == 0;
        self.args.verify == Verify::Full && self.same_bits && self.comparison.is_some_and(is_right)
    }

    /// Bytes that the step must read and write: weights of the experts in use, tokens and output.
    fn bytes(&self) -> usize {
        let tokens = 2 * self.step.tokens() * self.step.sizes().hidden;
        self.weights.bytes(self.step.rows().hit_experts()) + 2 * tokens
    }

    /// Number of operations. A multiply-add counts as two.
    fn operations(&self) -> f64 {
        let MoeSizes { hidden, intermediate, shared_intermediate, activation, .. } = self.step.sizes();
        let shared = self.step.tokens() as f64 * shared_intermediate.unwrap_or(0) as f64;
        let matrices = if activation.has_gate() { 3.0 } else { 2.0 };
        2.0 * matrices * hidden as f64 * (self.step.rows().count() as f64 * intermediate as f64 + shared)
    }

    /// Maximum number of rows of an expert.
    fn most_rows(&self) -> u32 {
        self.step.rows().firsts().windows(2).map(|ends| ends[1] - ends[0]).max().unwrap_or(0)
    }

    fn json(&self) -> serde_json::Value {
        let (sizes, seconds) = (self.step.sizes(), self.median.as_secs_f64());
        // No rates for the emulator: they would be mistaken for the device's.
        let rate = |amount: f64| self.layer.counters().is_none().then_some(amount / seconds);
        let stages = self.comparison.iter().flat_map(|comparison| &comparison.stages).map(|stage| {
            json!({
                "stage": stage.stage.name(),
                "checked": stage.checked,
                "mismatches": stage.mismatches,
                "unbounded": stage.unbounded,
                "max_abs_err": stage.max_abs_err,
            })
        });
        let mut report = json!({
            "op": "moe",
            "backend": self.backend.name(),
            "kernel": self.layer.kernel(),
            "device": self.backend.device(),
            "shape": self.shape,
            "input": self.input,
            "routing": self.routing,
            "dtype": sizes.dtype.name(),
            "hidden": sizes.hidden,
            "intermediate": sizes.intermediate,
            "experts": sizes.experts,
            "named_experts": sizes.named_experts,
            "top_k": sizes.top_k,
            "shared_intermediate": sizes.shared_intermediate,
            "activation": sizes.activation.to_string(),
            "biases": sizes.biases,
            "token_format": sizes.token_format.name(),
            "input_scales": self.weights.input_scales(0).is_some(),
            "input_scale_fault": self.weights.input_scale_fault(),
            "tensors": tensors::json(self.tensors),
            "tokens": self.step.tokens(),
            "rows": self.step.rows().count(),
            "hit_experts": self.step.rows().hit_experts(),
            "bytes": self.bytes(),
            "time_us": {"min": self.min.as_secs_f64() * 1e6, "median": seconds * 1e6},
            "launches": self.layer.launches(),
            "host_us": self.host.map(|host| host.as_secs_f64() * 1e6),
            "tflops": rate(self.operations() / 1e12),
            "gb_per_s": rate(self.bytes() as f64 / 1e9),
            "stages": stages.collect::<Vec<_>>(),
            "mismatches": self.comparison.map(MoeComparison::mismatches),
            "first_mismatch": self.comparison.and_then(|comparison| comparison.first()).map(|first| first.to_string()),
            "same_bits": self.same_bits,
            "verified": self.verified(),
        });
        if let Some(counters) = self.layer.counters() {
            report["counters"] = json!(counters);
        }
        if let Some(prediction) = self.backend.prediction() {
            report["predicted_us"] = json!(prediction.microseconds);
            report["prediction"] = prediction.json();
        }
        report
    }

    /// Formats the number of tokens, their format, and the source of their global scales.
    fn tokens(&self) -> String {
        let sizes = self.step.sizes();
        let scales = match (sizes.token_format, self.weights.input_scales(0)) {
            (TokenFormat::Nvfp4, Some(_)) => " by input scales",
            _ => "",
        };
        report::tokens_of(sizes.token_format, self.step.tokens()) + scales
    }

    fn print(&self, out: &mut impl Write) -> std::io::Result<()> {
        let (sizes, rows, seconds) = (self.step.sizes(), self.step.rows(), self.median.as_secs_f64());
        writeln!(
            out,
            "{} moe · {}, {} routing, {} · {} on {}, {}",
            printable(self.shape),
            printable(self.input),
            self.routing,
            sizes.dtype.name(),
            self.backend.name(),
            self.backend.device(),
            self.layer.kernel()
        )?;
        let of =
            if sizes.named_experts > sizes.experts { format!(" of {}", sizes.named_experts) } else { String::new() };
        let shared = sizes.shared_intermediate.map_or(String::new(), |size| format!(", a shared expert of I {size}"));
        let (hidden, intermediate, experts, top_k) = (sizes.hidden, sizes.intermediate, sizes.experts, sizes.top_k);
        let biases = if sizes.biases { " with biases" } else { "" };
        let activation = sizes.activation;
        writeln!(
            out,
            "layer     H {hidden}, I {intermediate}, {experts} experts{of}, top {top_k}{shared}, {activation}{biases}"
        )?;
        tensors::print(self.tensors, out)?;
        if let Some(fault) = self.weights.input_scale_fault() {
            writeln!(out, "note      NVFP4 tokens are not possible: {}", printable(fault))?;
        }
        writeln!(
            out,
            "step      {}, {} rows of {} experts, at most {} per expert",
            self.tokens(),
            table::thousands(rows.count()),
            rows.hit_experts(),
            self.most_rows()
        )?;
        writeln!(
            out,
            "bytes     {}, {} of them weights of the experts in use",
            table::bytes(self.bytes() as f64),
            table::bytes(self.weights.bytes(rows.hit_experts()) as f64)
        )?;
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
            let (tflops, gigabytes) = (self.operations() / seconds / 1e12, self.bytes() as f64 / seconds / 1e9);
            writeln!(out, "rate      {tflops:.3} TFLOP/s, {gigabytes:.2} GB/s")?;
        }
        self.print_comparison(out)
    }

    fn print_comparison(&self, out: &mut impl Write) -> std::io::Result<()> {
        let Some(comparison) = self.comparison else { return writeln!(out, "verified  no: not checked") };
        let mut stages = table::table(&["stage", "elements", "wrong", "may overflow f32", "largest error"], 1);
        for stage in &comparison.stages {
            stages.add_row([
                stage.stage.name().into(),
                table::thousands(stage.checked),
                table::thousands(stage.mismatches),
                table::thousands(stage.unbounded),
                format!("{:.2e}", stage.max_abs_err),
            ]);
        }
        writeln!(out, "{stages}")?;
        let (checked, wrong) = (table::thousands(comparison.checked()), table::thousands(comparison.mismatches()));
        match (comparison.first(), self.args.verify) {
            (Some(first), _) => {
                writeln!(out, "verified  NO: {wrong} of {checked} elements are wrong; the first: {first}")
            }
            _ if !self.same_bits => writeln!(out, "verified  NO: the output of a run differs from the first run's"),
            _ if comparison.unbounded() > 0 => {
                let unbounded = table::thousands(comparison.unbounded());
                writeln!(
                    out,
                    "verified  no: {unbounded} of {checked} elements may overflow f32 in between; the others are right"
                )
            }
            (None, Verify::Full) => {
                writeln!(
                    out,
                    "verified  yes: all {checked} elements within the bounds of f32 sums, the output bit for bit"
                )
            }
            (None, _) => writeln!(out, "verified  no: only a sample of {checked} elements was checked; none is wrong"),
        }
    }
}
