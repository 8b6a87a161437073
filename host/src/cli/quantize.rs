//! `nvfp4 quantize`: converts a model to NVFP4.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::builder::TypedValueParser;
use nvfp4::checkpoint::{
    Calibration, Checkpoint, Conversion, Converted, Exact, Format, Left, Options, Recorded, Written, natural,
    without_expert,
};
use nvfp4::printable;
use nvfp4::quantize::{Loss, Scales};
use regex::Regex;
use serde_json::{Value, json};

use super::leftovers::note_leftovers;
use super::progress::Progress;
use super::{exit, failure, parse, table};

/// MLP projections of dense layers and of experts, as the usual model families name them.
const PROJECTIONS: &str = r"\.(gate_proj|up_proj|down_proj|gate_up_proj|w1|w2|w3|input_linear|output_linear)\.weight$";

/// Version of the output of `--json`; it grows when a key is removed or changes its meaning.
const SCHEMA: u32 = 1;

/// Quantize a model's weights to NVFP4 and copy everything else
#[derive(clap::Args)]
#[command(after_help = "\
If IN is a file, OUT is a file. If IN is a directory or an index, OUT is a new directory that servers can load: the same \
file names, an index, config.json and (for modelopt) hf_quant_config.json that describe the quantization, the tokenizer and \
the other small files. OUT appears only when everything is written.

Weights in f32, f16, bf16, FP8 with scales (DeepSeek, compressed-tensors) and MXFP4 (gpt-oss) are quantized by ModelOpt's \
algorithm: the global scale is the largest magnitude / 2688. MXFP4 keeps its numbers: with a power of two as global scale, \
only blocks whose exponents lie more than 17 below the tensor's largest are rounded, and the report counts them. Experts that share one tensor (Llama 4, gpt-oss, \
Qwen3-VL-MoE) are written as separate tensors. FP8 and MXFP4 weights that are not quantized become bf16. All other tensors and the \
metadata are copied bit for bit.

Never quantized, even if included: routers, towers for images and sound, layers that draft tokens (mtp), embeddings and \
the output head. Projections that engines merge (q k v; q_a kv_a; gate up) and the experts of a layer are quantized together \
or not at all. The report lists each included tensor that is not quantized, with the reason. If one of them was not excluded \
on purpose, nothing is written and the exit code is 2.

A calibration is a safetensors file with activations [.., K] or their largest magnitudes by module \
(model.layers.3.mlp.experts.5.down_proj, or model.layers.3.mlp for all projections that read the block's input; * stands \
for any characters), or a JSON object of such names and magnitudes. Without --calibrate, no input scales are written and \
the model is described as W4A16.

--calibrate-hessian takes activations: tensors [.., K] in f32, f16 or bf16, named as in a calibration (or M.weight). The rows of a weight are rounded by GPTQ with a damping of 1 % and columns in their order; scales of blocks follow --scales. Weights without activations are rounded to nearest, and the report counts them. Record at least K tokens; the errors of weights grow, the errors of products fall.

Examples:
  nvfp4 quantize model.safetensors model-nvfp4.safetensors
  nvfp4 quantize Qwen3-30B-A3B/ Qwen3-30B-A3B-NVFP4/ --format compressed-tensors
  nvfp4 quantize gpt-oss-20b/ out/ --exclude 'model.layers.0' --exclude 're:.*self_attn.*' --dry-run
  nvfp4 quantize Qwen3-30B-A3B/ out/ --calibrate-hessian recorded/ --scales mse
  nvfp4 quantize in/ out/ --include '\\.(self_attn|mlp)\\..*\\.weight$' --calibrate amax.json")]
pub struct Args {
    /// A safetensors file, a directory of safetensors files, or the index of a sharded model.
    #[arg(value_name = "IN")]
    input: PathBuf,
    /// The file or directory to write; it may be an existing file or an empty directory.
    #[arg(value_name = "OUT", required_unless_present = "dry_run")]
    output: Option<PathBuf>,
    /// Naming of the parts of a weight and meaning of its global scale: modelopt (a factor) or compressed-tensors (a
    /// divisor).
    #[arg(long, default_value = Format::ModelOpt.name(), value_parser = formats())]
    format: Format,
    /// Names of the tensors to quantize; by default the projections of MLPs and of experts. For experts that share a
    /// tensor, give the names of the separate output tensors: experts.0.gate_proj.weight.
    #[arg(long, value_name = "REGEX", default_value = PROJECTIONS)]
    include: Regex,
    /// A module to leave unquantized, with everything below it. Accepts `*`, `?` and `[…]` as in a shell, or `re:` and
    /// a regular expression for the beginning of the name, as in the `ignore` list of a model. Can be repeated.
    #[arg(long, value_name = "NAME", value_parser = Pattern::parse)]
    exclude: Vec<Pattern>,
    /// Give each projection its own global scale, even where engines merge projections, and allow quantizing them
    /// separately.
    #[arg(long)]
    separate_scales: bool,
    /// Write input scales, for servers that also quantize activations. FILE holds activations or their largest
    /// magnitudes.
    #[arg(long, value_name = "FILE")]
    calibrate: Option<PathBuf>,
    /// Round by GPTQ, so that products with recorded activations change least. FILE has the tokens that modules read, as
    /// safetensors; a folder of such files is one recording. Needs 8·K² bytes of memory for each of two modules.
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::AnyPath)]
    calibrate_hessian: Option<PathBuf>,
    /// Rule for the scales of blocks: the largest magnitude becomes 6 (max, ModelOpt's bytes); the scale with the smallest
    /// squared error (mse); or the better of 6 and 4 for the largest magnitude (four-over-six). Files look the same; a
    /// Gaussian matrix has an error of 9.5 %, 8.2 % or 8.7 %.
    #[arg(long, value_name = "RULE", default_value = Scales::Max.name(), value_parser = scales())]
    scales: Scales,
    /// Refuse an MXFP4 weight if one of its blocks cannot keep its numbers, instead of rounding the block.
    #[arg(long)]
    exact: bool,
    /// Report what would be done, and write nothing.
    #[arg(long)]
    dry_run: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    /// Print only errors.
    #[arg(long, short, conflicts_with = "json")]
    quiet: bool,
}

fn formats() -> impl TypedValueParser<Value = Format> {
    parse::named(&[Format::ModelOpt, Format::CompressedTensors], |format| format.name())
}

fn scales() -> impl TypedValueParser<Value = Scales> {
    parse::named(&Scales::ALL, |scales| scales.name())
}

/// Pattern of module names.
#[derive(Clone, Debug)]
struct Pattern {
    text: String,
    regex: Regex,
}

impl Pattern {
    fn parse(text: &str) -> Result<Self, String> {
        let regex = match text.strip_prefix("re:") {
            Some(regex) => format!("^(?:{regex})"),
            // A pattern for a module also matches everything below it.
            None => format!(r"^(?:{})(?:\..*)?$", glob(text)),
        };
        let regex =
            Regex::new(&regex).map_err(|error| error.to_string().lines().last().unwrap_or_default().to_owned())?;
        Ok(Self { text: text.to_owned(), regex })
    }
}

/// Returns the regular expression of a shell pattern.
fn glob(text: &str) -> String {
    let mut regex = String::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        rest = &rest[first.len_utf8()..];
        match first {
            '*' => regex.push_str(".*"),
            '?' => regex.push('.'),
            '[' if rest.get(1..).is_some_and(|rest| rest.contains(']')) => {
                let end = 1 + rest[1..].find(']').expect("the closing bracket exists");
                let class = rest[..end].replace('\\', r"\\").replace('[', r"\[");
                regex
                    .push_str(&format!("[{}]", class.strip_prefix('!').map_or(class.clone(), |not| format!("^{not}"))));
                rest = &rest[end + 1..];
            }
            other => regex.push_str(&regex::escape(&other.to_string())),
        }
    }
    regex
}

/// Converts the model; prints the quantization errors and the skipped tensors. With --json, an error is also an object
/// on stdout.
pub fn run(args: &Args, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let result = quantize(args, out);
    failure::with_json(args.json, SCHEMA, result, out)
}

fn quantize(args: &Args, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let checkpoint = Checkpoint::open(&args.input)?;
    let calibration = args.calibrate.as_deref().map(Calibration::open).transpose()?;
    let used: Vec<_> = args.exclude.iter().map(|_| Cell::new(false)).collect();
    let exclude = |name: &str| {
        let mut patterns = args.exclude.iter().zip(&used);
        let (pattern, used) = patterns.find(|(pattern, _)| pattern.regex.is_match(name))?;
        used.set(true);
        Some(format!("--exclude {}", pattern.text))
    };
    let include = |name: &str| args.include.is_match(name);
    let options = Options {
        format: args.format,
        include: &include,
        exclude: &exclude,
        separate_scales: args.separate_scales,
        calibration: calibration.as_ref(),
        scales: args.scales,
        exact: args.exact,
    };
    let recorded = args.calibrate_hessian.as_deref().map(Recorded::open).transpose()?;
    let mut conversion = Conversion::new(&checkpoint, &options)?;
    if let Some(recorded) = &recorded {
        conversion = conversion.with_activations(recorded)?;
    }
    let names = |pattern: &Pattern| checkpoint.names().any(|name| pattern.regex.is_match(name));
    for (pattern, _) in args.exclude.iter().zip(&used).filter(|(pattern, used)| !used.get() && !names(pattern)) {
        eprintln!("note: --exclude {} matches no tensor", pattern.text);
    }
    if let Some(output) = &args.output {
        conversion.check_target(output)?;
        note_leftovers(output);
    }
    let refusal = conversion.check();
    if !args.dry_run {
        refusal?;
        let report = convert(args, &conversion)?;
        report.print(args, &conversion, out)?;
        return Ok(ExitCode::SUCCESS);
    }
    let weights = conversion.converted();
    let quantized = weights.iter().map(|weight| Row::of(*weight, None, None)).collect();
    Report { rows: quantized, copied: 0 }.print(args, &conversion, out)?;
    Ok(match refusal {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(exit::BAD_INPUT)
        }
    })
}

/// Writes the model.
fn convert(args: &Args, conversion: &Conversion<'_>) -> anyhow::Result<Report> {
    let mut report = Report { rows: Vec::new(), copied: 0 };
    let progress = (!args.quiet).then(|| Progress::new("quantizing", conversion.bytes()));
    let output = args.output.as_deref().expect("clap requires OUT");
    conversion.write(output, |written| {
        let bytes = match written {
            Written::Copied { bytes, .. } => {
                report.copied += 1;
                bytes
            }
            Written::Dropped { bytes, .. } => bytes,
            Written::Converted { weight, bytes, loss, exact } => {
                report.rows.push(Row::of(weight, loss, exact));
                bytes
            }
        };
        if let Some(progress) = &progress {
            progress.add(bytes);
        }
    })?;
    Ok(report)
}

/// Result of a conversion, or of a dry run.
struct Report {
    rows: Vec<Row>,
    copied: usize,
}

/// A converted weight.
struct Row {
    module: String,
    tensor: String,
    sizes: [usize; 2],
    quantized: bool,
    loss: Option<Loss>,
    /// Blocks that kept their numbers, of an MXFP4 source.
    exact: Option<Exact>,
}

impl Row {
    fn of(weight: Converted<'_>, loss: Option<Loss>, exact: Option<Exact>) -> Self {
        let Converted { module, tensor, sizes, quantized } = weight;
        Self { module: module.to_owned(), tensor: tensor.to_owned(), sizes, quantized, loss, exact }
    }
}

impl Report {
    fn print(&self, args: &Args, conversion: &Conversion<'_>, out: &mut impl Write) -> anyhow::Result<()> {
        if args.json {
            writeln!(out, "{}", self.to_json(args, conversion))?;
        } else if !args.quiet {
            self.print_tables(args, conversion, out)?;
        }
        Ok(())
    }

    fn quantized(&self) -> impl Iterator<Item = &Row> {
        self.rows.iter().filter(|row| row.quantized)
    }

    /// Returns the blocks of all MXFP4 weights that kept their numbers; `None` if no weight was MXFP4.
    fn exact(&self) -> Option<Exact> {
        self.rows.iter().filter_map(|row| row.exact).reduce(|mut sum, exact| {
            sum += exact;
            sum
        })
    }

    fn print_tables(&self, args: &Args, conversion: &Conversion<'_>, out: &mut impl Write) -> anyhow::Result<()> {
        // Experts of a layer with equal sizes share a row.
        let mut folded: BTreeMap<_, (String, usize, Option<Loss>)> = BTreeMap::new();
        for row in self.quantized() {
            let name = without_expert(&row.module);
            let entry = folded.entry((natural(&name), row.sizes)).or_insert((name, 0, None));
            entry.1 += 1;
            entry.2 = match (entry.2, row.loss) {
                (Some(sum), Some(loss)) => Some(sum.join(loss)),
                (one, other) => one.or(other),
            };
        }
        let mut header = vec!["weight", "count", "N", "K"];
        if !args.dry_run {
            header.extend(["rel. RMS error", "max. error", "SNR"]);
        }
        let mut rows = table::table(&header, 1);
        for ((_, [n, k]), (name, count, loss)) in folded {
            let mut row = vec![printable(&name), count.to_string(), n.to_string(), k.to_string()];
            row.extend(loss.iter().flat_map(|loss| {
                [
                    format!("{:.3} %", 100.0 * loss.relative_rms()),
                    format!("{:.3e}", loss.max_abs()),
                    format!("{:.2} dB", loss.snr_db()),
                ]
            }));
            rows.add_row(row);
        }
        writeln!(out, "{rows}\n")?;

        if let Some(Exact { blocks, all }) = self.exact() {
            let (share, rounded) = (100.0 * blocks as f64 / all.max(1) as f64, table::thousands(all - blocks));
            writeln!(out, "MXFP4 without loss: {share:.3} % of the blocks of 16; {rounded} blocks were rounded\n")?;
        }
        let widened = self.rows.iter().filter(|row| !row.quantized);
        print_folded(out, "FP8 or MXFP4 in, bf16 out", widened.map(|row| (&row.module[..], "")))?;
        let left = conversion.left();
        let (refused, excluded): (Vec<&Left>, _) = left.into_iter().partition(|left| left.refusal.is_some());
        print_folded(
            out,
            "included, but not quantized",
            excluded.iter().map(|left| (&left.name[..], &left.reason[..])),
        )?;
        print_folded(out, "cannot be quantized", refused.iter().map(|left| (&left.name[..], &left.reason[..])))?;
        for note in conversion.notes() {
            writeln!(out, "{}", printable(&note))?;
        }
        let quantized = self.quantized().count();
        let files = conversion.other_files().len();
        let scales = if conversion.has_input_scales() { ", with input scales" } else { "" };
        if args.dry_run {
            writeln!(out, "{quantized} tensors would be quantized{scales}, {files} files written beside them")?;
        } else {
            let output = args.output.as_deref().expect("clap requires OUT").display();
            let copied = self.copied;
            writeln!(out, "{output}: {quantized} tensors quantized{scales}, {copied} copied, {files} other files")?;
        }
        Ok(())
    }

    fn to_json(&self, args: &Args, conversion: &Conversion<'_>) -> Value {
        let weight = |row: &Row| {
            let mut weight = json!({"module": row.module, "tensor": row.tensor, "n": row.sizes[0], "k": row.sizes[1]});
            if row.quantized {
                weight["activations"] = json!(conversion.activations_of(&row.module));
            }
            if let Some(loss) = row.loss {
                weight["relative_rms"] = json!(loss.relative_rms());
                weight["max_abs"] = json!(loss.max_abs());
                weight["exact_blocks"] = json!(row.exact.map(|exact| json!({"exact": exact.blocks, "all": exact.all})));
                // JSON cannot represent infinity.
                weight["snr_db"] = json!(Some(loss.snr_db()).filter(|snr| snr.is_finite()));
            }
            weight
        };
        let left = conversion
            .left()
            .into_iter()
            .map(|left| json!({"tensor": left.name, "reason": left.reason, "refused": left.refusal.is_some()}));
        json!({
            "schema_version": SCHEMA,
            "input": args.input.display().to_string(),
            "output": args.output.as_ref().map(|path| path.display().to_string()),
            "dry_run": args.dry_run,
            "format": args.format.name(),
            "separate_scales": args.separate_scales,
            "scales": args.scales.name(),
            "calibrate_hessian": args.calibrate_hessian.as_ref().map(|path| path.display().to_string()),
            "input_scales": conversion.has_input_scales(),
            "quantised": self.quantized().map(weight).collect::<Vec<_>>(),
            "dequantised": self.rows.iter().filter(|row| !row.quantized).map(weight).collect::<Vec<_>>(),
            "left": left.collect::<Vec<_>>(),
            "copied": self.copied,
            "exact_blocks": self.exact().map(|exact| json!({"exact": exact.blocks, "all": exact.all})),
            "files": conversion.other_files(),
            "notes": conversion.notes(),
        })
    }
}

/// Prints names with their reasons; names that differ only in numbers share a line.
fn print_folded<'n>(
    out: &mut impl Write,
    title: &str,
    names: impl Iterator<Item = (&'n str, &'n str)>,
) -> anyhow::Result<()> {
    let mut folded: BTreeMap<_, (String, usize, &str)> = BTreeMap::new();
    for (name, reason) in names {
        let is_number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
        let parts: Vec<&str> = name.split('.').map(|part| if is_number(part) { "*" } else { part }).collect();
        let shown = parts.join(".");
        folded.entry((shown.clone(), reason)).or_insert((name.to_owned(), 0, reason)).1 += 1;
    }
    if folded.is_empty() {
        return Ok(());
    }
    writeln!(out, "{title}:")?;
    for ((pattern, _), (name, count, reason)) in folded {
        let shown = printable(&if count == 1 { name } else { format!("{pattern} ({count})") });
        let reason = if reason.is_empty() { String::new() } else { format!(": {}", printable(reason)) };
        writeln!(out, "  {shown}{reason}")?;
    }
    writeln!(out)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shell_and_model_patterns_match() {
        for (pattern, name, expected) in [
            ("lm_head", "lm_head", true),
            ("lm_head", "lm_head.weight", true),
            ("lm_head", "lm_head2", false),
            ("model.layers.1", "model.layers.1.mlp.gate_proj", true),
            ("model.layers.1", "model.layers.10.mlp.gate_proj", false),
            ("*self_attn*", "model.layers.1.self_attn.q_proj", true),
            ("*.self_attn", "model.layers.1.self_attn.q_proj", true),
            ("model.layers.?.mlp", "model.layers.1.mlp.up_proj", true),
            ("model.layers.[!1-2].mlp", "model.layers.1.mlp.up_proj", false),
            ("model.layers.[!1-2].mlp", "model.layers.3.mlp.up_proj", true),
            ("model[", "model[", true),
            ("re:.*mlp.gate$", "model.layers.1.mlp.gate", true),
            ("re:mlp.gate", "model.layers.1.mlp.gate", false),
            ("model-layers", "model.layers", false),
        ] {
            assert_eq!(Pattern::parse(pattern).unwrap().regex.is_match(name), expected, "{pattern} {name}");
        }
        assert!(Pattern::parse("re:(").is_err());
    }
}
