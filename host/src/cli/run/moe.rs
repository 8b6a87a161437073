//! `nvfp4 run --op moe`: generates or reads a whole layer, runs it on a backend, compares its stages, and prints a
//! report.

use std::io::Write;
use std::process::ExitCode;

use anyhow::bail;
use nvfp4::backend::{Backend, Moe};
use nvfp4::checkpoint::{Checkpoint, LayerTensors, OutputFile};
use nvfp4::kernels::explain::PlannedLaunch;
use nvfp4::moe::compare::MoeComparison;
use nvfp4::moe::generate;
use nvfp4::moe::{MoeOutput, MoeSizes, MoeStep, MoeWeights, shape};
use nvfp4::plan::variant::Variant;
use nvfp4::problem::{TokenDtype, TokenFormat};
use nvfp4::{Error, printable};
use serde_json::json;

use super::args::Args;
use super::around::AroundPart;
use super::job::{self, About, Compared, Findings, Job};
use super::runs::compute;
use super::tokens::{self, Tokens};
use super::verification::{compare_layer, layer_output};
use super::{report, tensors};
use crate::cli::explain::On;
use crate::cli::progress::Progress;
use crate::cli::table;

/// Default layer.
const SHAPE: &str = "qwen3-30b-a3b";

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
        return run_checkpoint(args, &checkpoint, backend, out);
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
    check_memory(&shape.sizes(dtype), tokens, Some(name))?;
    let inputs = generate::inputs(&shape, generator, routing, dtype, tokens, args.seed)?;
    let weights = {
        let progress = Progress::new("generating", shape.experts + usize::from(shape.shared_intermediate.is_some()));
        generate::weights(&shape, generator, dtype, args.seed, &|| progress.add(1))?
    };
    let (name, input, tensors) = (name.into(), generator.name().into(), None);
    let step = MoeStep::new(&weights, inputs)?;
    let (routing, mxfp4_blocks, around) = (routing.name(), 0, None);
    let job = MoeJob { name, input, routing, tensors, mxfp4_blocks, weights, step, around };
    let file = job.output_file(args, None)?;
    compute(args, &job, backend, None, file, out)
}

/// Runs a layer of a checkpoint.
fn run_checkpoint(
    args: &Args,
    checkpoint: &Checkpoint,
    mut backend: Box<dyn Backend>,
    out: &mut impl Write,
) -> anyhow::Result<ExitCode> {
    let number = args.layer.expect("clap requires --layer or --tensor with --weights");
    if args.routing.is_some() {
        bail!("a layer of a checkpoint has its own router; remove --routing");
    }
    let tokens = Tokens::of(args, TOKENS)?;
    let layer = checkpoint.moe_layer(number, tokens.dtype)?;
    check_memory(&layer.weights.sizes(), tokens.count, None)?;
    let ids = layer.router.vocabulary().map(|vocabulary| tokens.ids(vocabulary)).transpose()?.unwrap_or_default();
    let mut inputs = layer.inputs(tokens.bits(args, layer.hidden())?, &ids)?;
    let token_format = args.token_format.unwrap_or(backend.moe_token_format());
    let mut around = None;
    if let Some(surroundings) = layer.around {
        let routed = surroundings.routed(tokens.dtype, &inputs)?;
        let of_router = std::mem::replace(&mut inputs, routed);
        around = Some(AroundPart::new(args, &mut backend, surroundings, of_router, tokens.dtype, token_format)?);
    }
    let name = format!("{} layer {number}", checkpoint.path().display());
    let weights = layer.weights.with_token_format(token_format);
    let (tensors, mxfp4_blocks) = (Some(layer.tensors), layer.mxfp4_blocks);
    let step = MoeStep::new(&weights, inputs)?;
    let routing = "its router's";
    let job = MoeJob { name, input: tokens.source, routing, tensors, mxfp4_blocks, weights, step, around };
    let file = job.output_file(args, Some(checkpoint))?;
    compute(args, &job, backend, Some(checkpoint), file, out)
}

/// A layer and its inputs.
struct MoeJob<'a> {
    name: String,
    /// Generator or file of the tokens.
    input: String,
    /// Name of the routing of the tokens.
    routing: &'static str,
    /// Tensors of the layer that are used and left, from a checkpoint.
    tensors: Option<LayerTensors>,
    /// Number of blocks that were converted from MXFP4.
    mxfp4_blocks: usize,
    weights: MoeWeights<'a>,
    step: MoeStep<'static>,
    /// What surrounds the routed experts.
    around: Option<AroundPart<'a>>,
}

impl MoeJob<'_> {
    /// Creates the file of --output.
    fn output_file(&self, args: &Args, checkpoint: Option<&Checkpoint>) -> anyhow::Result<Option<OutputFile>> {
        let MoeSizes { hidden, dtype, .. } = self.step.sizes();
        let hidden = self.around.as_ref().map_or(hidden, AroundPart::hidden);
        tokens::output_file(args, checkpoint, dtype, [self.step.tokens(), hidden])
    }

    /// Returns what a comparison did not cover, as the end of a sentence.
    fn unchecked(&self) -> &'static str {
        let is_idle = self.step.rows().hit_experts() == 0 && self.step.tokens() > 0;
        if is_idle { "; no token names an expert of this layer, so no routed expert was checked" } else { "" }
    }

    /// Returns the lines of text about sizes and inputs. `bytes`: bytes of a step.
    fn lines(&self, bytes: usize) -> Vec<String> {
        let (sizes, rows) = (self.step.sizes(), self.step.rows());
        let MoeSizes { hidden, intermediate, experts, named_experts, top_k, activation, token_format, .. } = sizes;
        let of = if named_experts > experts { format!(" of {named_experts}") } else { String::new() };
        let shared = sizes.shared_intermediate.map_or(String::new(), |size| format!(", a shared expert of I {size}"));
        let biases = if sizes.biases { " with biases" } else { "" };
        let has_scales = token_format == TokenFormat::Nvfp4 && self.weights.input_scales(0).is_some();
        let tokens = report::tokens_of(token_format, self.step.tokens());
        let by_scales = if has_scales { " by input scales" } else { "" };
        let (count, hit) = (table::thousands(rows.count()), rows.hit_experts());
        let most = rows.firsts().windows(2).map(|ends| ends[1] - ends[0]).max().unwrap_or(0);
        let (bytes, of_weights) = (table::bytes(bytes as f64), table::bytes(self.weights.bytes(hit) as f64));
        let mut lines = vec![format!(
            "layer     H {hidden}, I {intermediate}, {experts} experts{of}, top {top_k}{shared}, {activation}{biases}"
        )];
        lines.extend(self.around.as_ref().map(AroundPart::line));
        lines.extend(tensors::lines(self.tensors.as_ref()));
        if self.mxfp4_blocks > 0 {
            let blocks = table::thousands(self.mxfp4_blocks);
            lines.push(format!(
                "note      MXFP4 weights run as NVFP4 with the same numbers: all {blocks} blocks of 16 are exact"
            ));
        }
        if let Some(fault) = self.weights.input_scale_fault() {
            lines.push(format!("note      NVFP4 tokens are not possible: {}", printable(fault)));
        }
        lines.push(format!("step      {tokens}{by_scales}, {count} rows of {hit} experts, at most {most} per expert"));
        let whose = match (hit, sizes.shared_intermediate) {
            (0, Some(_)) => "the shared expert",
            (_, Some(_)) => "the experts in use and the shared expert",
            (_, None) => "the experts in use",
        };
        lines.push(format!("bytes     {bytes}, {of_weights} of them weights of {whose}"));
        lines
    }
}

impl Job for MoeJob<'_> {
    type Op = Moe;

    fn weights(&self) -> &MoeWeights<'_> {
        &self.weights
    }

    fn step(&self) -> &MoeStep<'_> {
        &self.step
    }

    fn explain(&self, on: On<'_>) -> Result<Vec<PlannedLaunch>, Error> {
        on.moe(&self.step.sizes(), self.step.tokens())
    }

    fn about(&self) -> About {
        let (sizes, rows, tokens) = (self.step.sizes(), self.step.rows(), self.step.tokens());
        let dtype = sizes.dtype.name();
        let shared = tokens as f64 * sizes.shared_intermediate.unwrap_or(0) as f64;
        let matrices = if sizes.activation.has_gate() { 3.0 } else { 2.0 };
        let products = rows.count() as f64 * sizes.intermediate as f64 + shared;
        // Weights of the experts in use, tokens and output.
        let bytes = self.weights.bytes(rows.hit_experts()) + 2 * 2 * tokens * sizes.hidden;
        About {
            op: "moe",
            has_variants: false,
            shape: self.name.clone(),
            input: self.input.clone(),
            title: format!("moe · {}, {} routing, {dtype}", printable(&self.input), self.routing),
            lines: self.lines(bytes),
            json: json!({
                "routing": self.routing,
                "dtype": dtype,
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
                "tensors": tensors::json(self.tensors.as_ref()),
                "mxfp4_blocks": self.mxfp4_blocks,
                "around": self.around.as_ref().map(AroundPart::json),
                "tokens": tokens,
                "rows": rows.count(),
                "hit_experts": rows.hit_experts(),
                "bytes": bytes,
            }),
            operations: 2.0 * matrices * sizes.hidden as f64 * products,
            bytes,
            roofline: None,
        }
    }

    fn output(&self, args: &Args) -> MoeOutput {
        layer_output(args, &self.step)
    }

    fn is_same(first: &MoeOutput, again: &MoeOutput) -> bool {
        first.hidden == again.hidden
    }

    fn compare(&self, args: &Args, output: &MoeOutput) -> Compared {
        let comparison = compare_layer(args, &self.weights, &self.step, output);
        let stages = comparison.iter().flat_map(|comparison| &comparison.stages).map(|stage| {
            json!({
                "stage": stage.stage.name(),
                "checked": stage.checked,
                "mismatches": stage.mismatches,
                "unbounded": stage.unbounded,
                "max_abs_err": stage.max_abs_err,
            })
        });
        let branch = self.around.as_ref().and_then(AroundPart::comparison).filter(|_| comparison.is_some());
        let of_branch = branch.and_then(|branch| Some(format!("beside the experts: {}", branch.first()?)));
        let first = comparison.as_ref().and_then(MoeComparison::first).map(|first| first.to_string()).or(of_branch);
        let and_branch =
            |count: fn(&MoeComparison) -> usize, found: &MoeComparison| count(found) + branch.map_or(0, count);
        Compared {
            json: json!({
                "stages": stages.collect::<Vec<_>>(),
                "mismatches": comparison.as_ref().map(|found| and_branch(MoeComparison::mismatches, found)),
                "first_mismatch": first,
            }),
            findings: comparison.map(|found| Findings {
                checked: and_branch(MoeComparison::checked, &found),
                mismatches: and_branch(MoeComparison::mismatches, &found),
                unbounded: and_branch(MoeComparison::unbounded, &found),
                first,
                text: stage_table(&found).to_string(),
                bound: format!("within the bounds of f32 sums, the output bit for bit{}", self.unchecked()),
            }),
        }
    }

    fn write(&self, file: OutputFile, output: &MoeOutput) -> Result<(), Error> {
        match &self.around {
            Some(around) => file.write_bits(&around.output(self.step.sizes().dtype, output)),
            None => file.write_bits(&output.hidden),
        }
    }
}

/// Returns the table of the compared stages.
fn stage_table(comparison: &MoeComparison) -> comfy_table::Table {
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
    stages
}

/// Refuses a layer that does not fit this machine's memory, before anything is allocated. `shape` is the word of --shape. The
/// error names the largest part of the shape that fits: one GPU's part, for the smallest number of GPUs.
fn check_memory(sizes: &MoeSizes, tokens: usize, shape: Option<&str>) -> anyhow::Result<()> {
    let part = |ranks: usize, present: f64| {
        let part = format!("{}@ep{ranks}", shape?);
        let fits = memory(&shape::find(&part).ok()?.sizes(sizes.dtype), tokens) <= present;
        fits.then_some(part)
    };
    job::check_present(memory(sizes, tokens), |present| {
        let ranks = (1..usize::BITS).map(|power| 1 << power).take_while(|&ranks| ranks <= sizes.experts);
        match ranks.into_iter().find_map(|ranks| part(ranks, present)) {
            Some(part) => format!("run the part of one GPU, --shape {part}, or use fewer tokens"),
            None => "use fewer tokens or a smaller layer".into(),
        }
    })
}

/// Returns the number of bytes that a run of a layer needs, about.
fn memory(sizes: &MoeSizes, tokens: usize) -> f64 {
    let widths = sizes.intermediate.saturating_mul(3).saturating_add(sizes.shared_intermediate.unwrap_or(0));
    let matrix = sizes.hidden as f64 * sizes.intermediate.max(sizes.shared_intermediate.unwrap_or(0)) as f64;
    // The sum of: the weights and their prepared copy, each at 9/16 byte per element; f32 numbers while one matrix is
    // quantized; 16-bit rows of the inputs and of two outputs, and the f32 sums of one expert.
    let weights = 3.0 * matrix * (sizes.experts + 1) as f64 * 2.0 * 9.0 / 16.0;
    let rows = tokens as f64 * (sizes.top_k + 1) as f64 * (widths + sizes.hidden) as f64;
    weights + 4.0 * matrix + 8.0 * rows
}
