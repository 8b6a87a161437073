//! `nvfp4 quantize`: a model file in, an NVFP4 one out.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use nvfp4::checkpoint::{Checkpoint, Conversion, Format};
use regex::Regex;

use super::progress::Progress;
use super::table;

/// The MLP projections of dense layers and of experts, as the usual model families name them.
const PROJECTIONS: &str = r"\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight$";

/// Quantise a model's weights to NVFP4 and copy everything else
#[derive(clap::Args)]
#[command(after_help = "\
A file gives a file; a directory or an index gives a new directory with the same file names and, for several files, an \
index. Two-dimensional f32, f16 and bf16 tensors that --include matches are quantised by ModelOpt's algorithm: the \
global scale is the largest magnitude / 2688, and projections that inference engines fuse (gate and up, w1 and w3, q k \
and v) share one. All other tensors and the metadata are copied bit for bit. Nothing is at OUT until all of it is written.

Only weights are quantised: there are no input scales, for which a model must be run on calibration data. Other files \
(config.json, tokenizer …) are not copied; servers also want the quantisation described in config.json.

Examples:
  nvfp4 quantize model.safetensors model-nvfp4.safetensors
  nvfp4 quantize Qwen3-30B-A3B/ Qwen3-30B-A3B-NVFP4/ --format compressed-tensors
  nvfp4 quantize in.safetensors out.safetensors --include '\\.experts\\..*\\.weight$'")]
pub struct Args {
    /// A safetensors file, a directory of them, or the index of a sharded model.
    #[arg(value_name = "IN")]
    input: PathBuf,
    /// The file or the directory to write; it may be an existing file or an empty directory.
    #[arg(value_name = "OUT")]
    output: PathBuf,
    /// How the parts of a weight are named, and what a global scale means: modelopt (a factor) or compressed-tensors (a
    /// divisor).
    #[arg(long, default_value = Format::ModelOpt.name(), value_parser = parse_format)]
    format: Format,
    /// The names of the tensors to quantise; by default the projections of MLPs and of experts.
    #[arg(long, value_name = "REGEX", default_value = PROJECTIONS)]
    include: Regex,
}

fn parse_format(name: &str) -> Result<Format, String> {
    let known = [Format::ModelOpt, Format::CompressedTensors];
    known.into_iter().find(|format| format.name() == name).ok_or("modelopt or compressed-tensors".into())
}

/// Converts, and prints what quantising cost each tensor.
pub fn run(args: &Args, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let checkpoint = Checkpoint::open(&args.input)?;
    let conversion = Conversion::new(&checkpoint, args.format, |name| args.include.is_match(name))?;
    let mut rows = table::table(&["tensor", "N", "K", "rel. RMS error", "max. error", "SNR"], 1);
    let (mut quantised, mut copied) = (0usize, 0usize);
    {
        let progress = Progress::new("quantising", conversion.bytes());
        conversion.write(&args.output, |written| {
            progress.add(written.bytes);
            let Some(([n, k], loss)) = written.quantised else {
                copied += 1;
                return;
            };
            quantised += 1;
            rows.add_row([
                written.name.to_owned(),
                n.to_string(),
                k.to_string(),
                format!("{:.3} %", 100.0 * loss.relative_rms),
                format!("{:.3e}", loss.max_abs),
                format!("{:.2} dB", loss.snr_db()),
            ]);
        })?;
    }
    writeln!(out, "{rows}\n")?;
    writeln!(out, "{}: {quantised} tensors quantised, {copied} copied", args.output.display())?;
    Ok(ExitCode::SUCCESS)
}
