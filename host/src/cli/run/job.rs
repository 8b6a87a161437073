//! Inputs of `nvfp4 run`: a layer of a checkpoint, or a shape with inputs generated from a seed.

use anyhow::bail;
use nvfp4::checkpoint::{Activations, Checkpoint, LayerTensors};
use nvfp4::format::Matrix;
use nvfp4::generate;
use nvfp4::plan::roofline::Roofline;
use nvfp4::problem::{Group, GroupedProblem, Op, TokenDtype, Weights};
use nvfp4::shape;

use super::args::Args;
use crate::cli::progress::Progress;
use crate::cli::table;

/// Default shape.
const SHAPE: &str = "moe-1";

/// Default number of tokens per expert of a checkpoint.
const TOKENS: usize = 16;

/// Default type of the output.
pub const OUT_DTYPE: TokenDtype = TokenDtype::F16;

/// Inputs, and descriptions of their sources.
pub struct Job<'a> {
    pub shape: String,
    pub input: String,
    /// Modules of the weights. Empty: the weights do not come from a checkpoint.
    pub modules: Vec<String>,
    /// Tensors of the layer that are used and left, from a checkpoint.
    pub tensors: Option<LayerTensors>,
    pub weights: Weights<'a>,
    pub tokens: Vec<Matrix<'static>>,
}

/// Reads the job of a layer of a checkpoint.
pub fn loaded<'a>(args: &Args, checkpoint: &'a Checkpoint) -> anyhow::Result<Job<'a>> {
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
    Ok(Job { shape, input, modules: layer.modules, tensors: Some(layer.tensors), weights: layer.weights, tokens })
}

/// Generates the job of a shape from the seed.
pub fn generated(args: &Args) -> anyhow::Result<Job<'static>> {
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
    Ok(Job {
        shape: name.into(),
        input: generator.name().into(),
        modules: Vec::new(),
        tensors: None,
        weights: Weights::new(shape.op, experts)?,
        tokens: generate::activations(generator, &shape.groups, args.seed)?,
    })
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
    check_present(needed, "use fewer or smaller groups")
}

/// Refuses work that needs more memory than this machine has.
pub fn check_present(needed: f64, remedy: &str) -> anyhow::Result<()> {
    let ram = sysinfo::RefreshKind::nothing().with_memory(sysinfo::MemoryRefreshKind::nothing().with_ram());
    // If the system does not report its memory, the allocator fails instead.
    let Ok(system) = sysinfo::System::new_with_specifics(ram) else { return Ok(()) };
    let present = system.total_memory() as f64;
    if needed > present {
        bail!(
            "the shape needs about {} of memory, but this machine has {}; {remedy}",
            table::bytes(needed),
            table::bytes(present)
        );
    }
    Ok(())
}
