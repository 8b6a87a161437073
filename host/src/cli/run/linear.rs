//! `nvfp4 run --op linear`: generates or reads one matrix, runs it on a backend, compares the outputs, and prints a
//! report.

use std::io::Write;
use std::process::ExitCode;

use anyhow::{Context, bail};
use nvfp4::backend::{Backend, Linear};
use nvfp4::checkpoint::{Checkpoint, LayerTensors, OutputFile};
use nvfp4::kernels::explain::PlannedLaunch;
use nvfp4::linear::compare::{compare_sample, compare_with_progress};
use nvfp4::linear::{LinearInputs, LinearOutput, LinearSizes, LinearStep, LinearWeights, generate};
use nvfp4::plan::variant::Variant;
use nvfp4::problem::TokenFormat;
use nvfp4::{Error, printable};
use serde_json::json;

use super::args::{Args, Verify};
use super::job::{self, About, Compared, Findings, Job};
use super::runs::compute;
use super::tokens::{self, Tokens};
use super::{report, tensors};
use crate::cli::explain::On;
use crate::cli::progress::Progress;
use crate::cli::table;

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
        let job = LinearJob::new(name, tensors, layer.weights, tokens, x)?;
        let file = job.output_file(args, Some(&checkpoint))?;
        return compute(args, &job, backend, Some(&checkpoint), file, out);
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
    let job = LinearJob::new(shape.into(), None, weights, tokens, x)?;
    let file = job.output_file(args, None)?;
    compute(args, &job, backend, None, file, out)
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
    let needed = 2.0 * n * k * 9.0 / 16.0 + 4.0 * n * k + 12.0 * m * (n + k);
    job::check_present(needed, |_| "use fewer tokens or a smaller shape".into())
}

/// A layer and its inputs.
struct LinearJob<'a> {
    name: String,
    /// Generator or file of the tokens.
    input: String,
    /// Tensors of the module that are used and left, from a checkpoint.
    tensors: Option<LayerTensors>,
    weights: LinearWeights<'a>,
    step: LinearStep<'static>,
}

impl<'a> LinearJob<'a> {
    /// `x`: bits of the tokens as they are multiplied.
    fn new(
        name: String,
        tensors: Option<LayerTensors>,
        weights: LinearWeights<'a>,
        tokens: Tokens,
        x: Vec<u16>,
    ) -> anyhow::Result<Self> {
        let inputs = LinearInputs { tokens: tokens.count, x: x.into(), stride: weights.sizes().k };
        let step = LinearStep::new(&weights, inputs)?;
        Ok(Self { name, input: tokens.source, tensors, weights, step })
    }

    /// Creates the file of --output.
    fn output_file(&self, args: &Args, checkpoint: Option<&Checkpoint>) -> anyhow::Result<Option<OutputFile>> {
        let LinearSizes { n, dtype, .. } = self.step.sizes();
        tokens::output_file(args, checkpoint, dtype, [self.step.tokens(), n])
    }
}

impl Job for LinearJob<'_> {
    type Op = Linear;

    fn weights(&self) -> &LinearWeights<'_> {
        &self.weights
    }

    fn step(&self) -> &LinearStep<'_> {
        &self.step
    }

    fn explain(&self, on: On<'_>) -> Result<Vec<PlannedLaunch>, Error> {
        on.linear(&self.step.sizes(), self.step.tokens())
    }

    fn about(&self) -> About {
        let (LinearSizes { n, k, dtype, bias, token_format }, m) = (self.step.sizes(), self.step.tokens());
        let has_scale = self.weights.input_scale().is_some();
        // Weights, tokens and output.
        let bytes = n * k / 16 * 9 + 2 * m * (n + k);
        let with_bias = if bias { ", with a bias" } else { "" };
        let by_scale = if has_scale && token_format == TokenFormat::Nvfp4 { " by an input scale" } else { "" };
        let tokens = report::tokens_of(token_format, m) + by_scale;
        let mut lines = vec![format!("layer     N {n}, K {k}{with_bias}; {tokens}")];
        lines.extend(tensors::lines(self.tensors.as_ref()));
        lines.push(format!("bytes     {}", table::bytes(bytes as f64)));
        About {
            op: "linear",
            has_variants: false,
            shape: self.name.clone(),
            input: self.input.clone(),
            title: format!("linear · {}, {}", printable(&self.input), dtype.name()),
            lines,
            json: json!({
                "dtype": dtype.name(),
                "m": m,
                "n": n,
                "k": k,
                "bias": bias,
                "token_format": token_format.name(),
                "input_scale": has_scale,
                "tensors": tensors::json(self.tensors.as_ref()),
                "bytes": bytes,
            }),
            operations: 2.0 * m as f64 * n as f64 * k as f64,
            bytes,
            roofline: None,
        }
    }

    fn is_same(first: &LinearOutput, again: &LinearOutput) -> bool {
        first == again
    }

    fn compare(&self, args: &Args, output: &LinearOutput) -> Compared {
        let comparison = match args.verify {
            _ if args.no_values => None,
            Verify::Off => None,
            Verify::Sample => Some(compare_sample(&self.weights, &self.step, output, SAMPLE, args.seed)),
            Verify::Full => {
                let progress = Progress::new("verifying", output.out.len());
                Some(compare_with_progress(&self.weights, &self.step, output, &|done| progress.add(done)))
            }
        };
        let first = comparison.and_then(|found| found.first).map(|first| first.to_string());
        Compared {
            json: json!({
                "checked": comparison.map(|found| found.checked),
                "mismatches": comparison.map(|found| found.mismatches),
                "unbounded": comparison.map(|found| found.unbounded),
                "max_abs_err": comparison.map(|found| found.max_abs_err),
                "first_mismatch": first,
            }),
            findings: comparison.map(|found| Findings {
                checked: found.checked,
                mismatches: found.mismatches,
                unbounded: found.unbounded,
                first,
                text: format!("error     at most {:.2e} from the rounded reference", found.max_abs_err),
                bound: "within the bounds of f32 sums".into(),
            }),
        }
    }
    fn write(&self, file: OutputFile, output: &LinearOutput) -> Result<(), Error> {
        file.write_bits(&output.out)
    }
}
