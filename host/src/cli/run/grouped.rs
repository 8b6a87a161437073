//! `nvfp4 run` of grouped products: gated and plain.

use std::io::Write;
use std::process::ExitCode;

use anyhow::bail;
use nvfp4::backend::{Backend, Grouped};
use nvfp4::checkpoint::{Activations, Checkpoint, LayerTensors, OutputFile, check_file, refuse_input};
use nvfp4::compare::Tolerance;
use nvfp4::generate;
use nvfp4::plan::roofline::Roofline;
use nvfp4::printable;
use nvfp4::problem::{Group, GroupedProblem, Op, Step, TokenDtype, Weights};
use nvfp4::shape;
use nvfp4::{Error, Output};
use serde_json::json;

use super::args::Args;
use super::job::{self, About, Compared, Findings, Job};
use super::runs::compute;
use super::tensors;
use super::verification::verify;
use crate::cli::leftovers::note_leftovers;
use crate::cli::progress::Progress;
use crate::cli::table;

/// Default shape.
const SHAPE: &str = "moe-1";

/// Default number of tokens per expert of a checkpoint.
const TOKENS: usize = 16;

/// Default type of the output.
const OUT_DTYPE: TokenDtype = TokenDtype::F16;

/// Runs the groups on the backend, and prints the report.
pub fn run(args: &Args, backend: Box<dyn Backend>, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    if args.tensor.is_some() {
        bail!("--tensor needs --op linear; use --layer instead, or add --op linear");
    }
    if args.routing.is_some() || args.tokens.is_some() && args.weights.is_none() {
        bail!("--routing needs --op moe, and --tokens needs --op moe or --weights; add the missing option");
    }
    if args.token_format.is_some() {
        bail!("--token-format needs --op moe or --op linear; add one of them");
    }
    let checkpoint = args.checkpoint()?;
    if let Some(path) = &args.output {
        let inputs = checkpoint.iter().flat_map(Checkpoint::paths).chain(args.activations.as_deref());
        refuse_input(path, inputs)?;
        check_file(path)?;
        note_leftovers(path);
    }
    let job = match &checkpoint {
        Some(checkpoint) => loaded(args, checkpoint)?,
        None => generated(args)?,
    };
    let file = args.output.as_deref().map(|path| OutputFile::create(path, job.step.problem())).transpose()?;
    compute(args, &job, backend, checkpoint.as_ref(), file, out)
}

/// Groups, and descriptions of their sources.
struct GroupedJob<'a> {
    shape: String,
    input: String,
    /// Modules of the weights. Empty: the weights do not come from a checkpoint.
    modules: Vec<String>,
    /// Tensors of the layer that are used and left, from a checkpoint.
    tensors: Option<LayerTensors>,
    weights: Weights<'a>,
    step: Step<'static>,
}

/// Reads the job of a layer of a checkpoint.
fn loaded<'a>(args: &Args, checkpoint: &'a Checkpoint) -> anyhow::Result<GroupedJob<'a>> {
    let number = args.layer.expect("clap requires --layer or --tensor with --weights");
    let layer = checkpoint.layer(number, args.grouped_op().unwrap_or(Op::Gated))?;
    let (tokens, input) = match &args.activations {
        Some(path) => (Activations::open(path)?.quantize(&layer.input_scales)?, path.display().to_string()),
        None => {
            let experts = layer.weights.experts().iter();
            let groups: Vec<_> = experts
                .map(|expert| Group { m: args.tokens.unwrap_or(TOKENS), n: expert.n(), k: expert.k() })
                .collect();
            check_memory(&GroupedProblem::new(layer.weights.op(), OUT_DTYPE, groups.clone())?)?;
            let generator = args.input.unwrap_or_default();
            (generate::activations(generator, &groups, args.seed)?, generator.name().into())
        }
    };
    let shape = format!("{} layer {number}", checkpoint.path().display());
    let step = Step::new(&layer.weights, tokens, args.out_dtype.unwrap_or(OUT_DTYPE))?;
    Ok(GroupedJob { shape, input, modules: layer.modules, tensors: Some(layer.tensors), weights: layer.weights, step })
}

/// Generates the job of a shape from the seed.
fn generated(args: &Args) -> anyhow::Result<GroupedJob<'static>> {
    let name = args.shape.as_deref().unwrap_or(SHAPE);
    let mut shape = shape::find(name)?;
    shape.op = args.grouped_op().unwrap_or(shape.op);
    let problem = shape.problem(OUT_DTYPE)?;
    check_memory(&problem)?;
    let generator = args.input.unwrap_or(shape.input);
    let progress = Progress::new("generating", shape.groups.len());
    let mut experts = Vec::new();
    for (group, sizes) in shape.groups.iter().enumerate() {
        experts.push(generate::expert(generator, shape.op, group, sizes, args.seed)?);
        progress.add(1);
    }
    let tokens = generate::activations(generator, &shape.groups, args.seed)?;
    let weights = Weights::new(shape.op, experts)?;
    let step = Step::new(&weights, tokens, args.out_dtype.unwrap_or(OUT_DTYPE))?;
    let (shape, input) = (name.into(), generator.name().into());
    Ok(GroupedJob { shape, input, modules: Vec::new(), tensors: None, weights, step })
}

/// Refuses a problem that does not fit this machine's memory, before anything is allocated.
fn check_memory(problem: &GroupedProblem) -> anyhow::Result<()> {
    let work = Roofline::new(problem);
    let weights: f64 = problem.groups().iter().map(|group| group.n as f64 * group.k as f64).sum();
    // The sum of: weights and their prepared copy, each at 9/16 byte per element; f32 numbers while one matrix is
    // quantized; the f64 reference.
    let largest = problem.groups().iter().map(|group| group.n.max(group.m) as f64 * group.k as f64).fold(0.0, f64::max);
    let projections = problem.op().projections() as f64;
    let outputs = work.output_bytes as f64 * (1.0 + 8.0 * projections);
    let needed = 2.0 * projections * weights * 9.0 / 16.0 + 4.0 * largest + 8.0 * work.token_bytes as f64 + outputs;
    job::check_present(needed, |_| "use fewer or smaller groups".into())
}

impl Job for GroupedJob<'_> {
    type Op = Grouped;

    fn weights(&self) -> &Weights<'_> {
        &self.weights
    }

    fn step(&self) -> &Step<'_> {
        &self.step
    }

    fn about(&self) -> About {
        let (op, problem) = (self.weights.op().name(), self.step.problem());
        let groups: Vec<_> =
            problem.groups().iter().map(|group| json!({"m": group.m, "n": group.n, "k": group.k})).collect();
        let mut lines = Vec::new();
        if !self.modules.is_empty() {
            lines.push(format!("weights   {}", printable(&self.modules.join(", "))));
        }
        lines.extend(tensors::lines(self.tensors.as_ref()));
        lines.push(group_table(problem.groups()).to_string());
        let roofline = Roofline::new(problem);
        About {
            op,
            has_variants: true,
            shape: self.shape.clone(),
            input: self.input.clone(),
            title: format!("{op} · {} → {}", printable(&self.input), problem.out_dtype().name()),
            lines,
            json: json!({
                "modules": self.modules,
                "tensors": tensors::json(self.tensors.as_ref()),
                "groups": groups,
            }),
            operations: roofline.operations,
            bytes: roofline.bytes(),
            roofline: Some(roofline),
        }
    }

    fn output_again(&self) -> Option<Output> {
        None
    }

    fn is_same(first: &Output, again: &Output) -> bool {
        first == again
    }

    fn compare(&self, args: &Args, output: &Output) -> Compared {
        let comparison = verify(args, &self.weights, &self.step, output);
        let Tolerance { absolute, relative } = Tolerance::of(output.dtype());
        let rounds = args.variant.schedule.rounds_gate_and_up();
        let more = if rounds { " + the effect of rounding gate and up" } else { "" };
        Compared {
            json: json!({
                "max_abs_err": comparison.map(|found| found.max_abs_err),
                "max_rel_err": comparison.map(|found| found.max_rel_err),
                "mismatches": comparison.map(|found| found.mismatches),
            }),
            findings: comparison.map(|found| Findings {
                checked: found.checked,
                mismatches: found.mismatches,
                unbounded: 0,
                first: found.first.map(|first| first.to_string()),
                text: format!(
                    "error     at most {:.2e} absolute, {:.2e} relative",
                    found.max_abs_err, found.max_rel_err
                ),
                bound: format!("within {absolute} + {relative}·|x|{more} of the exact reference"),
            }),
        }
    }
    fn write(&self, file: OutputFile, output: &Output) -> Result<(), Error> {
        file.write(output)
    }
}

/// Returns the table of groups. Consecutive groups of equal size share a row.
fn group_table(groups: &[Group]) -> comfy_table::Table {
    let mut rows = table::table(&["group", "M", "N", "K"], 1);
    let mut first = 0;
    for equal in groups.chunk_by(|a, b| a == b) {
        let last = first + equal.len() - 1;
        let name = if first == last { first.to_string() } else { format!("{first}–{last}") };
        rows.add_row([name, equal[0].m.to_string(), equal[0].n.to_string(), equal[0].k.to_string()]);
        first = last + 1;
    }
    rows
}
