//! `nvfp4 inspect`: lists the NVFP4 weights of a checkpoint and their faults.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use nvfp4::checkpoint::{Checkpoint, Inspection, OtherWeight, Problem, Range, TensorFile, Usage, Weight};
use nvfp4::printable;
use serde_json::json;

use super::progress::Progress;
use super::{plot, table};

/// Version of the output of `--json`. It grows when a key is removed or changes its meaning, not when a key is added.
const SCHEMA_VERSION: u32 = 3;

/// Width of the lists.
const COLUMNS: usize = 100;

/// List the quantized weights of a checkpoint, which of them run, and all their faults
///
/// Experts that differ only in their number share a row. Exits with 2 if there is an error; warnings do not change the
/// exit code.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  nvfp4 inspect model.safetensors
  nvfp4 inspect DeepSeek-R1-NVFP4/ --json")]
pub struct Args {
    /// A safetensors file, a directory of safetensors files, or the index of a sharded model.
    #[arg(value_name = "FILE", value_hint = clap::ValueHint::AnyPath)]
    path: PathBuf,
    /// Draw how the NVFP4 weights use their codes and scales, and their outlier columns by layer, as SVG or PNG. Reads all
    /// numbers.
    #[arg(long, value_name = "FILE.svg|png", value_parser = plot::parse)]
    plot: Option<PathBuf>,
    /// Print one JSON object: path, files, tensors, weights (NVFP4, with the operations of `nvfp4 run` that compute
    /// them), others (of other types, with the operations or the reason why none computes them), problems (each with code, severity, message) and schema_version.
    #[arg(long)]
    json: bool,
}

/// Prints a table and the problems, or both as JSON.
pub fn run(args: &Args, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let found = Inspection::of(&args.path);
    if let Some(path) = &args.plot {
        let checkpoint = Checkpoint::open(&args.path)?;
        let numbers = checkpoint.files().iter().flat_map(TensorFile::tensors).map(|(_, tensor)| 2 * tensor.data.len());
        let progress = Progress::new("drawing", numbers.sum());
        let usage = Usage::of(&checkpoint, &|_| true, &|done| progress.add(done))?;
        plot::write(path, &plot::usage(&usage))?;
    }
    if args.json {
        let object = json!({
            "schema_version": SCHEMA_VERSION,
            "path": args.path.display().to_string(),
            "plot": args.plot.as_ref().map(|path| path.display().to_string()),
            "files": found.files,
            "tensors": found.tensors,
            "weights": found.weights.iter().map(to_json).collect::<Vec<_>>(),
            "others": found.others.iter().map(other_to_json).collect::<Vec<_>>(),
            "problems": found.problems.iter().map(problem_to_json).collect::<Vec<_>>(),
        });
        writeln!(out, "{object}")?;
    } else {
        print(&found, args, out)?;
    }
    let is_sound = !found.problems.iter().any(|problem| problem.is_error);
    Ok(if is_sound { ExitCode::SUCCESS } else { ExitCode::from(super::exit::BAD_INPUT) })
}

fn print(found: &Inspection, args: &Args, out: &mut impl Write) -> anyhow::Result<()> {
    let count: usize = found.weights.iter().map(|weight| weight.count).sum();
    writeln!(
        out,
        "{}: files {}, tensors {}, NVFP4 weights {}\n",
        printable(&args.path.to_string_lossy()),
        found.files,
        table::thousands(found.tensors),
        table::thousands(count)
    )?;
    let format = |weight: &Weight| weight.format.name();
    for weight in &found.weights {
        writeln!(out, "{}", printable(&weight.module))?;
        let sizes = format!("{} × [{}, {}] {}", weight.count, weight.n, weight.k, format(weight));
        let runs = if weight.runs.is_empty() { "nothing".into() } else { weight.runs.join(", ") };
        writeln!(out, "  {sizes}; computed by {runs}")?;
        if let Some(why) = &weight.why_not {
            print_wrapped(&format!("why not: {}", printable(why)), out)?;
        }
        let inputs = weight.input_scales.map_or("none".into(), range);
        let (blocks, globals) = (range(weight.block_scales), range(weight.global_scales));
        writeln!(out, "  scales: blocks {blocks}, global {globals}, input {inputs}")?;
    }
    if !found.others.is_empty() {
        writeln!(out, "\nother weights:")?;
        for other in &found.others {
            writeln!(out, "{}", printable(&other.module))?;
            let what = match other.why {
                Some(why) => format!(": {why}"),
                None => format!("; computed by {}", other.runs.join(", ")),
            };
            print_wrapped(&format!("{} × {:?} {}{what}", other.count, other.shape, other.kind), out)?;
        }
    }
    writeln!(out)?;
    let (errors, warnings): (Vec<_>, Vec<_>) = found.problems.iter().partition(|problem| problem.is_error);
    for (title, problems) in [("problems", errors), ("warnings", warnings)] {
        match problems.len() {
            0 if title == "problems" => writeln!(out, "no problems")?,
            0 => {}
            count => writeln!(out, "{title}: {count}")?,
        }
        for problem in problems {
            writeln!(out, "  {} [{}]", problem.error, problem.code)?;
        }
    }
    Ok(())
}

/// Prints a text in indented lines of at most 100 columns, unless a word is longer.
fn print_wrapped(text: &str, out: &mut impl Write) -> anyhow::Result<()> {
    let mut line = String::from(" ");
    for word in text.split(' ') {
        if line.chars().count() + 1 + word.chars().count() > COLUMNS && line.len() > 2 {
            writeln!(out, "{line}")?;
            line = String::from("   ");
        }
        line = line + " " + word;
    }
    Ok(writeln!(out, "{line}")?)
}

/// Formats a range in scientific notation.
fn range(Range { min, max }: Range) -> String {
    if min == max { format!("{min:.3e}") } else { format!("{min:.3e} … {max:.3e}") }
}

fn to_json(weight: &Weight) -> serde_json::Value {
    let range = |Range { min, max }: Range| json!({"min": min, "max": max});
    json!({
        "module": weight.module,
        "format": weight.format.name(),
        "count": weight.count,
        "runs": weight.runs,
        "why_not": weight.why_not,
        "n": weight.n,
        "k": weight.k,
        "block_scales": range(weight.block_scales),
        "global_scales": range(weight.global_scales),
        "input_scales": weight.input_scales.map(range),
    })
}

fn other_to_json(other: &OtherWeight) -> serde_json::Value {
    let OtherWeight { module, kind, shape, count, runs, why } = other;
    json!({"module": module, "type": kind, "shape": shape, "count": count, "runs": runs, "why_not": why})
}

fn problem_to_json(problem: &Problem) -> serde_json::Value {
    let severity = if problem.is_error { "error" } else { "warning" };
    json!({"code": problem.code, "severity": severity, "message": problem.error.to_string()})
}
