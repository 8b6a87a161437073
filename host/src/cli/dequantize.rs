//! `nvfp4 dequantize`: converts a quantized model to floats.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::builder::TypedValueParser;
use nvfp4::checkpoint::{Checkpoint, Dequantization, Dtype, Written, natural, without_expert};
use nvfp4::printable;
use regex::Regex;
use serde_json::json;

use super::leftovers::note_leftovers;
use super::progress::Progress;
use super::{failure, parse, table};

/// Version of the output of `--json`; it grows when a key is removed or changes its meaning.
const SCHEMA: u32 = 1;

/// Convert a quantized model to bf16, f16 or f32
#[derive(clap::Args)]
#[command(after_help = "\
NVFP4 (ModelOpt, compressed-tensors; apart or all experts in one tensor), FP8 and MXFP4 weights become floats; all other \
tensors are copied bit for bit. Experts that share a tensor still share one, in the same order of dimensions. A \
pre_quant_scale (AWQ) is multiplied into its weight. config.json then describes no quantization. With --filter the other \
weights stay quantized, and the lists of unquantized modules name the converted ones.

f32 represents each number to the last bit; bf16 and f16 are rounded to nearest. Memory use does not depend on the size of \
the model: weights are converted in parts, and experts that share a tensor one at a time.

Examples:
  nvfp4 dequantize model-nvfp4/ model-bf16/
  nvfp4 dequantize model-nvfp4/ out/ --dtype f32 --filter 'layers\\.3\\.'")]
pub struct Args {
    /// A safetensors file, a directory of safetensors files, or the index of a sharded model.
    #[arg(value_name = "IN", value_hint = clap::ValueHint::AnyPath)]
    input: PathBuf,
    /// The file or directory to write; it may be an existing file or an empty directory.
    #[arg(value_name = "OUT", value_hint = clap::ValueHint::AnyPath)]
    output: PathBuf,
    /// Type of the numbers.
    #[arg(long, default_value = "bf16", value_parser = dtypes())]
    dtype: Dtype,
    /// Convert only weights (`M.weight`) whose names match.
    #[arg(long, value_name = "REGEX")]
    filter: Option<Regex>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    /// Print only errors.
    #[arg(long, short, conflicts_with = "json")]
    quiet: bool,
}

fn dtypes() -> impl TypedValueParser<Value = Dtype> {
    parse::named(&Dequantization::DTYPES, |dtype| match dtype {
        Dtype::F32 => "f32",
        Dtype::F16 => "f16",
        _ => "bf16",
    })
}

/// Converts the model and prints what became floats.
pub fn run(args: &Args, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let result = dequantize(args, out);
    failure::with_json(args.json, SCHEMA, result, out)
}

fn dequantize(args: &Args, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let checkpoint = Checkpoint::open(&args.input)?;
    let chosen = |name: &str| args.filter.as_ref().is_none_or(|filter| filter.is_match(name));
    let conversion = Dequantization::new(&checkpoint, args.dtype, &chosen)?;
    conversion.check_target(&args.output)?;
    note_leftovers(&args.output);
    let (mut copied, mut dropped) = (0, 0);
    let progress = (!args.quiet).then(|| Progress::new("converting", conversion.bytes()));
    conversion.write(&args.output, |written| {
        let bytes = match written {
            Written::Copied { bytes, .. } => {
                copied += 1;
                bytes
            }
            Written::Dropped { bytes, .. } => {
                dropped += 1;
                bytes
            }
            Written::Converted { bytes, .. } => bytes,
        };
        if let Some(progress) = &progress {
            progress.add(bytes);
        }
    })?;
    drop(progress);
    let weights = conversion.converted();
    if args.json {
        let weight = |weight: &nvfp4::checkpoint::Converted<'_>| {
            let [n, k] = weight.sizes;
            json!({"module": weight.module, "tensor": weight.tensor, "n": n, "k": k})
        };
        let object = json!({
            "schema_version": SCHEMA,
            "input": args.input.display().to_string(),
            "output": args.output.display().to_string(),
            "dtype": args.dtype.to_string(),
            "dequantized": weights.iter().map(weight).collect::<Vec<_>>(),
            "copied": copied,
            "dropped": dropped,
            "notes": conversion.notes(),
        });
        writeln!(out, "{object}")?;
    } else if !args.quiet {
        // Experts of a layer with equal sizes share a row.
        let mut folded = std::collections::BTreeMap::new();
        for weight in &weights {
            let name = without_expert(weight.module);
            folded.entry((natural(&name), weight.sizes)).or_insert((name, 0)).1 += 1;
        }
        let mut rows = table::table(&["weight", "count", "N", "K"], 1);
        for ((_, [n, k]), (name, count)) in folded {
            rows.add_row([printable(&name), count.to_string(), n.to_string(), k.to_string()]);
        }
        writeln!(out, "{rows}\n")?;
        for note in conversion.notes() {
            writeln!(out, "{}", printable(&note))?;
        }
        let (count, output) = (weights.len(), printable(&args.output.to_string_lossy()));
        writeln!(out, "{output}: {count} weights became {}, {copied} tensors copied", args.dtype)?;
    }
    Ok(ExitCode::SUCCESS)
}
