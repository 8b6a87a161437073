//! `nvfp4 inspect`: lists the NVFP4 weights of a checkpoint and their faults.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use nvfp4::checkpoint::{Inspection, OtherWeight, Problem, Range, Weight};
use nvfp4::printable;
use serde_json::json;

use super::table;

/// Version of the output of `--json`. It grows when a key is removed or changes its meaning, not when a key is added.
const SCHEMA_VERSION: u32 = 2;

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
    /// Print one JSON object: path, files, tensors, weights (NVFP4), others (of other types, with the reason why they
    /// do not run), problems (each with code, severity, message) and schema_version.
    #[arg(long)]
    json: bool,
}

/// Prints a table and the problems, or both as JSON.
pub fn run(args: &Args, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let found = Inspection::of(&args.path);
    if args.json {
        let object = json!({
            "schema_version": SCHEMA_VERSION,
            "path": args.path.display().to_string(),
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
    if !found.weights.is_empty() {
        let header = ["weight", "format", "count", "N", "K", "runs", "block scales", "global scales", "input scales"];
        let mut rows = table::table(&header, 2);
        for weight in &found.weights {
            rows.add_row([
                printable(&weight.module),
                weight.format.name().into(),
                weight.count.to_string(),
                weight.n.to_string(),
                weight.k.to_string(),
                weight.runs.as_ref().map_or_else(|why| format!("no: {}", printable(why)), |op| op.name().into()),
                format!("{} … {}", weight.block_scales.min, weight.block_scales.max),
                range(weight.global_scales),
                weight.input_scales.map_or("none".into(), range),
            ]);
        }
        writeln!(out, "{rows}\n")?;
    }
    if !found.others.is_empty() {
        writeln!(out, "other weights, which do not run:")?;
        let mut rows = table::table(&["weight", "type", "count", "shape", "why"], 2);
        for other in &found.others {
            let (module, shape) = (printable(&other.module), format!("{:?}", other.shape));
            rows.add_row([module, other.kind.clone(), other.count.to_string(), shape, other.why.into()]);
        }
        writeln!(out, "{rows}\n")?;
    }
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
        "runs": weight.runs.as_ref().ok().map(|op| op.name()),
        "why_not": weight.runs.as_ref().err(),
        "n": weight.n,
        "k": weight.k,
        "block_scales": range(weight.block_scales),
        "global_scales": range(weight.global_scales),
        "input_scales": weight.input_scales.map(range),
    })
}

fn other_to_json(other: &OtherWeight) -> serde_json::Value {
    let OtherWeight { module, kind, shape, count, why } = other;
    json!({"module": module, "type": kind, "shape": shape, "count": count, "why_not": why})
}

fn problem_to_json(problem: &Problem) -> serde_json::Value {
    let severity = if problem.is_error { "error" } else { "warning" };
    json!({"code": problem.code, "severity": severity, "message": problem.error.to_string()})
}
