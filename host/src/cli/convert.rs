//! `nvfp4 convert`: converts NVFP4 models between formats, without rounding.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::builder::TypedValueParser;
use nvfp4::checkpoint::{Checkpoint, Experts, Format, FromGguf, Reform, ToGguf, Written};
use nvfp4::printable;
use serde_json::json;

use super::leftovers::note_leftovers;
use super::progress::Progress;
use super::{failure, parse};

/// Version of the output of `--json`; it grows when a key is removed or changes its meaning.
const SCHEMA: u32 = 1;

/// Convert an NVFP4 model to other names and layouts, without rounding
#[derive(clap::Args)]
#[command(after_help = "\
Codes and block scales keep their bits. A global scale becomes its inverse between modelopt (a factor) and \
compressed-tensors (a divisor); this is the only number that is rounded. config.json and hf_quant_config.json describe the \
new format. Experts can be stored apart, as engines read them, or fused: one tensor [E, N, K/2] per projection, with gate \
and up in its two halves. Tensors of other types are copied bit for bit.

A file *.gguf with NVFP4 tensors (llama.cpp's type 40) is converted to one safetensors file; its tensors must be NVFP4, F32, \
F16 or BF16, and its architecture llama, qwen2, qwen2moe, qwen3 or qwen3moe. --to gguf needs --template, a GGUF file of the \
same model that llama.cpp's converter made: its metadata and other tensors are kept, and NVFP4 weights replace its matrices.

Engines load the output as a whole model, so `nvfp4 convert` has no --filter. `nvfp4 dequantize`, `diff` and `verify` have one.

`nvfp4 diff IN OUT` compares the numbers of both models.

Examples:
  nvfp4 convert modelopt/ out/ --to compressed-tensors
  nvfp4 convert llama4-modelopt/ out/ --to modelopt --experts apart
  nvfp4 convert model.gguf model.safetensors --to modelopt
  nvfp4 convert model-nvfp4/ model-nvfp4.gguf --to gguf --template model-f16.gguf")]
pub struct Args {
    /// A safetensors file, a directory of safetensors files, or the index of a sharded model.
    #[arg(value_name = "IN", value_hint = clap::ValueHint::AnyPath)]
    input: PathBuf,
    /// The file or directory to write; it may be an existing file or an empty directory.
    #[arg(value_name = "OUT", value_hint = clap::ValueHint::AnyPath)]
    output: PathBuf,
    /// Format of the output.
    #[arg(long, value_name = "FORMAT", value_parser = formats())]
    to: Target,
    /// A GGUF file of the same model, for --to gguf.
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    template: Option<PathBuf>,
    /// How the experts are stored; by default as in the input.
    #[arg(long, value_parser = experts())]
    experts: Option<Experts>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    /// Print only errors.
    #[arg(long, short, conflicts_with = "json")]
    quiet: bool,
}

/// Format of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    Safetensors(Format),
    Gguf,
}

impl Target {
    const fn name(self) -> &'static str {
        match self {
            Self::Safetensors(format) => format.name(),
            Self::Gguf => "gguf",
        }
    }
}

fn formats() -> impl TypedValueParser<Value = Target> {
    let safetensors = [Format::ModelOpt, Format::CompressedTensors].map(Target::Safetensors);
    parse::named(&[safetensors[0], safetensors[1], Target::Gguf], |target| target.name())
}

fn experts() -> impl TypedValueParser<Value = Experts> {
    parse::named(&[Experts::Apart, Experts::Fused], |experts| experts.name())
}

/// Converts the model and prints what was converted.
pub fn run(args: &Args, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let result = convert(args, out);
    failure::with_json(args.json, SCHEMA, result, out)
}

fn convert(args: &Args, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let is_gguf = args.input.extension().is_some_and(|ending| ending == "gguf");
    anyhow::ensure!(
        args.template.is_some() == (args.to == Target::Gguf),
        "--to gguf and --template belong together: the template gives the metadata, which llama.cpp needs"
    );
    anyhow::ensure!(
        args.experts.is_none() || !(is_gguf || args.to == Target::Gguf),
        "--experts: a GGUF file always holds the experts of a layer in one tensor, and they are written apart from it"
    );
    let report = match (is_gguf, args.to, &args.template) {
        (true, Target::Safetensors(format), _) => from_gguf(args, format)?,
        (true, Target::Gguf, _) => anyhow::bail!("{}: the file is GGUF already", args.input.display()),
        (false, Target::Gguf, Some(template)) => to_gguf(args, template)?,
        (false, Target::Gguf, None) => unreachable!("the check above"),
        (false, Target::Safetensors(format), _) => reform(args, format)?,
    };
    report.print(args, out)?;
    Ok(ExitCode::SUCCESS)
}

/// Result of a conversion.
struct Report {
    from: &'static str,
    converted: Vec<String>,
    count: usize,
    copied: usize,
    notes: Vec<String>,
}

impl Report {
    fn print(&self, args: &Args, out: &mut impl Write) -> anyhow::Result<()> {
        let to = args.to.name();
        if args.json {
            let object = json!({
                "schema_version": SCHEMA,
                "input": args.input.display().to_string(),
                "output": args.output.display().to_string(),
                "from": self.from,
                "to": to,
                "converted": self.converted,
                "count": self.count,
                "copied": self.copied,
                "notes": self.notes,
            });
            writeln!(out, "{object}")?;
        } else if !args.quiet {
            for note in &self.notes {
                writeln!(out, "{}", printable(note))?;
            }
            let (count, from, copied) = (self.count, self.from, self.copied);
            let output = printable(&args.output.to_string_lossy());
            writeln!(out, "{output}: {count} weights from {from} to {to}, {copied} tensors copied")?;
        }
        Ok(())
    }
}

/// Starts the progress bar, unless the command is quiet.
fn progress(args: &Args, bytes: usize) -> Option<Progress> {
    (!args.quiet).then(|| Progress::new("converting", bytes))
}

/// Converts between formats of safetensors.
fn reform(args: &Args, format: Format) -> anyhow::Result<Report> {
    let checkpoint = Checkpoint::open(&args.input)?;
    let reform = Reform::new(&checkpoint, format, args.experts)?;
    reform.check_target(&args.output)?;
    note_leftovers(&args.output);
    let mut copied = 0;
    let progress = progress(args, reform.bytes());
    reform.write(&args.output, |written| {
        let bytes = match written {
            Written::Copied { bytes, .. } => {
                copied += 1;
                bytes
            }
            Written::Dropped { bytes, .. } | Written::Converted { bytes, .. } => bytes,
        };
        if let Some(progress) = &progress {
            progress.add(bytes);
        }
    })?;
    let converted: Vec<_> = reform.converted().iter().map(|weight| weight.module.to_owned()).collect();
    let (from, count, notes) = (reform.input_form().name(), converted.len(), reform.notes());
    Ok(Report { from, converted, count, copied, notes })
}

fn from_gguf(args: &Args, format: Format) -> anyhow::Result<Report> {
    let file = FromGguf::open(&args.input, format)?;
    note_leftovers(&args.output);
    let progress = progress(args, file.bytes());
    let mut tensors = 0;
    file.write(&args.output, |bytes| {
        tensors += 1;
        if let Some(progress) = &progress {
            progress.add(bytes);
        }
    })?;
    let converted = file.modules()?;
    let note = "the output has no config.json and no tokenizer; take them from the original model";
    let (count, copied) = (converted.len(), tensors - file.nvfp4_tensors());
    Ok(Report { from: "gguf", converted, count, copied, notes: vec![note.into()] })
}

fn to_gguf(args: &Args, template: &std::path::Path) -> anyhow::Result<Report> {
    let checkpoint = Checkpoint::open(&args.input)?;
    let file = ToGguf::new(&checkpoint, template)?;
    note_leftovers(&args.output);
    let progress = progress(args, file.bytes());
    file.write(&args.output, |bytes| {
        if let Some(progress) = &progress {
            progress.add(bytes);
        }
    })?;
    let (converted, count) = (file.modules(), file.converted());
    Ok(Report { from: "safetensors", converted, count, copied: file.copied(), notes: file.notes() })
}
