//! `nvfp4 explain` and `nvfp4 run --explain`: the launches of a layer on a GPU, and the instances that the plan chose among.

use std::io::Write;
use std::process::ExitCode;

use anyhow::{Context, ensure};
use nvfp4::Error;
use nvfp4::kernels::explain::{Candidate, PlannedLaunch};
use nvfp4::kernels::linear::{self, LinearKernels};
use nvfp4::kernels::moe::{self, MoeKernels};
use nvfp4::linear::LinearSizes;
use nvfp4::moe::{MoeSizes, shape};
use nvfp4::plan::roofline::Gpu;
use nvfp4::problem::{TokenDtype, TokenFormat};
use serde_json::{Value, json};

use super::{parse, table};

/// Version of the document that --json prints.
const SCHEMA: u32 = 1;

/// Launches of an MoE or linear layer on a GPU: which instances compute it, and what the plan expects of the others. Needs
/// no GPU.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  nvfp4 explain --shape qwen3-30b-a3b --tokens 1,64,4096 --gpu h100
  nvfp4 explain --shape deepseek-v3@ep8 --tokens 32 --gpu b200
  nvfp4 explain --shape 4096,14336 --tokens 1,128           a matrix with N,K
  nvfp4 explain --shape layers.json#mine --tokens 16 --json")]
pub struct Args {
    /// A built-in layer (see `nvfp4 shapes`), FILE.json or FILE.json#NAME; or N,K of a matrix.
    #[arg(long, default_value = "qwen3-30b-a3b")]
    shape: String,
    /// Numbers of tokens.
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1,16,512")]
    tokens: Vec<usize>,
    /// The GPU.
    #[arg(long, default_value = "h200", value_parser = parse::gpu())]
    gpu: Gpu,
    /// Format in which tokens are multiplied [default: the GPU's].
    #[arg(long, value_parser = parse::token_format())]
    token_format: Option<TokenFormat>,
    /// Type of the tokens.
    #[arg(long, default_value = "bf16", value_parser = parse::out_dtype())]
    dtype: TokenDtype,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Prints the plan for each number of tokens.
pub fn run(args: &Args, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    ensure!(!args.tokens.contains(&0), "--tokens 0: a call without tokens has no launches; use 1 or more");
    let plans: Result<Vec<_>, anyhow::Error> =
        args.tokens.iter().map(|&tokens| Ok((tokens, plan(args, tokens)?))).collect();
    let plans = plans?;
    if args.json {
        let plans = plans.iter().map(|(tokens, launches)| json!({"tokens": tokens, "launches": values(launches)}));
        let document = json!({
            "schema_version": SCHEMA,
            "shape": args.shape,
            "gpu": args.gpu.name,
            "sms": args.gpu.sms,
            "plans": plans.collect::<Vec<_>>(),
        });
        writeln!(out, "{document}")?;
        return Ok(ExitCode::SUCCESS);
    }
    for (tokens, launches) in &plans {
        let count = launches.len();
        let noun = if count == 1 { "launch" } else { "launches" };
        writeln!(out, "{} on {} ({} SMs), tokens: {tokens}; {count} {noun}", args.shape, args.gpu.name, args.gpu.sms)?;
        writeln!(out, "{}\n", rows(launches))?;
    }
    writeln!(out, "{LEGEND}")?;
    Ok(ExitCode::SUCCESS)
}

/// Explanation of the columns of [`rows`].
pub const LEGEND: &str = "\
A product has a line for each instance that can compute it; the plan takes the first. tiles: the expected number, if
tokens name all experts equally often. rounds: tiles of the SM with the most. cost: expected time relative to the
instance that is taken, by the constants of the plan; –: the tile size alone decides, and of two instances with the
same tile the one that loads weights early is taken. tile: tokens × columns.";

/// Returns the launches of a call.
fn plan(args: &Args, tokens: usize) -> anyhow::Result<Vec<PlannedLaunch>> {
    let gpu = args.gpu;
    let on = On { name: gpu.name, capability: gpu.capability, sms: gpu.sms as u32 };
    if let Some((n, k)) = matrix(&args.shape)? {
        let token_format = args.token_format.unwrap_or_default();
        let sizes = LinearSizes { n, k, dtype: args.dtype, bias: false, token_format };
        sizes.check()?;
        return Ok(on.linear(&sizes, tokens)?);
    }
    let shape = shape::find(&args.shape)?;
    let token_format = args.token_format.unwrap_or(match shape.token_format {
        TokenFormat::Bits16 => on.moe_kernels()?.default_format(),
        of_layer => of_layer,
    });
    let sizes = shape.with_token_format(token_format).sizes(args.dtype);
    Ok(on.moe(&sizes, tokens)?)
}

/// A GPU for which calls are planned.
#[derive(Clone, Copy)]
pub struct On<'a> {
    /// Name in errors.
    pub name: &'a str,
    /// Compute capability.
    pub capability: (u32, u32),
    /// Number of SMs.
    pub sms: u32,
}

impl On<'_> {
    fn moe_kernels(&self) -> Result<MoeKernels, Error> {
        MoeKernels::of(self.capability).ok_or_else(|| self.missing())
    }

    fn missing(&self) -> Error {
        Error::NotComputed(format!("no kernel runs on {}", self.name))
    }

    /// Returns the launches of a call of an MoE layer.
    ///
    /// # Errors
    /// If no kernel computes the layer on the GPU, or the sizes are too large.
    pub fn moe(&self, sizes: &MoeSizes, tokens: usize) -> Result<Vec<PlannedLaunch>, Error> {
        let kernels = self.moe_kernels()?;
        kernels.check(sizes.token_format, self.name)?;
        moe::explain(sizes, tokens, &kernels, self.sms)
    }

    /// Returns the launches of a call of a linear layer.
    ///
    /// # Errors
    /// If no kernel computes the layer on the GPU, or the sizes are too large.
    pub fn linear(&self, sizes: &LinearSizes, tokens: usize) -> Result<Vec<PlannedLaunch>, Error> {
        let kernels = LinearKernels::of(self.capability).ok_or_else(|| self.missing())?;
        kernels.check(sizes.token_format, self.name)?;
        linear::explain(sizes, tokens, &kernels, self.sms)
    }
}

/// Returns N and K, if a shape is a matrix.
fn matrix(shape: &str) -> anyhow::Result<Option<(usize, usize)>> {
    let Some((n, k)) = shape.split_once(',') else { return Ok(None) };
    let size = |text: &str| {
        let invalid =
            || format!("--shape {shape}: expected N,K of a matrix, such as 4096,7168, or the name of a layer");
        text.trim().parse().with_context(invalid)
    };
    Ok(Some((size(n)?, size(k)?)))
}

/// Returns the table of the launches.
pub fn rows(launches: &[PlannedLaunch]) -> comfy_table::Table {
    let heads = ["launch", "CTAs", "threads", "shared memory", "tile", "tiles", "rounds", "cost"];
    let mut rows = table::table(&heads, 1);
    for PlannedLaunch { grid, choice, .. } in launches {
        let cluster = if grid.cluster > 1 { format!(" in clusters of {}", grid.cluster) } else { String::new() };
        let shared = if grid.shared_bytes == 0 { String::new() } else { table::bytes(grid.shared_bytes.into()) };
        let ctas = format!("{}{cluster}", grid.blocks);
        let [mut tile, mut tiles, mut rounds, mut cost] = [(); 4].map(|()| String::new());
        let candidates = choice.as_ref().map_or(&[][..], |choice| &choice.candidates);
        let numbers = |of: &Candidate| {
            let least = candidates[0].cost;
            let cost = if least == 0 { "–".to_owned() } else { format!("{:.2}", of.cost as f64 / least as f64) };
            [format!("{} × {}", of.tile_tokens, of.columns), of.tiles.to_string(), of.rounds.to_string(), cost]
        };
        if let Some(taken) = candidates.first() {
            [tile, tiles, rounds, cost] = numbers(taken);
        }
        rows.add_row([grid.entry.to_owned(), ctas, grid.threads.to_string(), shared, tile, tiles, rounds, cost]);
        for other in candidates.iter().skip(1) {
            let [tile, tiles, rounds, cost] = numbers(other);
            let none = String::new;
            rows.add_row([format!("  or {}", other.entry), none(), none(), none(), tile, tiles, rounds, cost]);
        }
    }
    rows
}

/// Returns the launches as JSON.
pub fn values(launches: &[PlannedLaunch]) -> Vec<Value> {
    let candidate = |of: &Candidate| {
        json!({
            "entry": of.entry,
            "tile_tokens": of.tile_tokens,
            "columns": of.columns,
            "tiles": of.tiles,
            "rounds": of.rounds,
            "cost": of.cost,
        })
    };
    let launch = |PlannedLaunch { kernel, grid, choice }: &PlannedLaunch| {
        json!({
            "kernel": kernel,
            "entry": grid.entry,
            "ctas": grid.blocks,
            "cluster": grid.cluster,
            "threads": grid.threads,
            "shared_bytes": grid.shared_bytes,
            "rows": choice.as_ref().map(|choice| choice.rows),
            "experts": choice.as_ref().map(|choice| choice.experts),
            "candidates": choice.as_ref().map(|choice| choice.candidates.iter().map(candidate).collect::<Vec<_>>()),
        })
    };
    launches.iter().map(launch).collect()
}
