//! `nvfp4 inspect`: what NVFP4 weights a checkpoint has, and what is wrong with them.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use nvfp4::checkpoint::{Inspection, Range, Weight};
use serde_json::json;

use super::table;

/// List the NVFP4 weights of a checkpoint and everything that is wrong with them
///
/// Weights of experts that differ in the number of the expert only share a row. Exits with 2 if something is wrong.
#[derive(clap::Args)]
#[command(after_help = "Examples:
  nvfp4 inspect model.safetensors
  nvfp4 inspect DeepSeek-R1-NVFP4/ --json")]
pub struct Args {
    /// A safetensors file, a directory of them, or the index of a sharded model.
    #[arg(value_name = "FILE")]
    path: PathBuf,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Prints a table and the problems, or both as JSON.
pub fn run(args: &Args, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let found = Inspection::of(&args.path);
    if args.json {
        let weights: Vec<_> = found.weights.iter().map(to_json).collect();
        let problems: Vec<_> = found.problems.iter().map(ToString::to_string).collect();
        let object = json!({
            "path": args.path.display().to_string(),
            "files": found.files,
            "tensors": found.tensors,
            "weights": weights,
            "problems": problems,
        });
        writeln!(out, "{object}")?;
    } else {
        print(&found, args, out)?;
    }
    Ok(if found.problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(super::exit::BAD_INPUT) })
}

fn print(found: &Inspection, args: &Args, out: &mut impl Write) -> anyhow::Result<()> {
    let count: usize = found.weights.iter().map(|weight| weight.count).sum();
    writeln!(
        out,
        "{}: files {}, tensors {}, NVFP4 weights {}\n",
        args.path.display(),
        found.files,
        table::thousands(found.tensors),
        table::thousands(count)
    )?;
    if !found.weights.is_empty() {
        let header = ["weight", "format", "count", "N", "K", "block scales", "global scales", "input scales"];
        let mut rows = table::table(&header, 2);
        for weight in &found.weights {
            rows.add_row([
                weight.module.clone(),
                weight.format.name().into(),
                weight.count.to_string(),
                weight.n.to_string(),
                weight.k.to_string(),
                format!("{} … {}", weight.block_scales.min, weight.block_scales.max),
                range(weight.global_scales),
                weight.input_scales.map_or("none".into(), range),
            ]);
        }
        writeln!(out, "{rows}\n")?;
    }
    if found.problems.is_empty() {
        writeln!(out, "no problems")?;
    } else {
        writeln!(out, "problems: {}", found.problems.len())?;
        for problem in &found.problems {
            writeln!(out, "  {problem}")?;
        }
    }
    Ok(())
}

/// Numbers that need few digits and much room for their exponent.
fn range(Range { min, max }: Range) -> String {
    if min == max { format!("{min:.3e}") } else { format!("{min:.3e} … {max:.3e}") }
}

fn to_json(weight: &Weight) -> serde_json::Value {
    let range = |Range { min, max }: Range| json!({"min": min, "max": max});
    json!({
        "module": weight.module,
        "format": weight.format.name(),
        "count": weight.count,
        "n": weight.n,
        "k": weight.k,
        "block_scales": range(weight.block_scales),
        "global_scales": range(weight.global_scales),
        "input_scales": weight.input_scales.map(range),
    })
}
