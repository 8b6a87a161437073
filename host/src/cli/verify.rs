//! `nvfp4 verify`: compares a quantized model with the model that it was made from.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use nvfp4::checkpoint::{Checkpoint, ComparedWeight, Comparison, Difference, Errors, Usage, natural};
use nvfp4::printable;
use regex::Regex;
use serde_json::{Value, json};

use super::progress::Progress;
use super::{exit, failure, plot, table};

/// Version of the output of `--json`; it grows when a key is removed or changes its meaning.
const SCHEMA: u32 = 1;

/// Compare a quantized model with its source, weight by weight
#[derive(clap::Args)]
#[command(after_help = "\
Each weight of both models is decoded to f32 and compared: the root-mean-square error relative to the weight's size, the \
largest error, the signal-to-noise ratio and the cosine. Both can have any form that `nvfp4 quantize` and `nvfp4 dequantize` \
read; experts that share a tensor in one model match separate experts in the other. All other tensors are compared byte by \
byte.

The exit code is 1 if a weight exceeds a threshold, is in only one of the models, or has a NaN or an infinity, or if another \
tensor differs or is missing. NVFP4 of Gaussian numbers has a relative error of 9.5 % and an SNR of 20.4 dB.

Examples:
  nvfp4 verify model-nvfp4/ --source model-bf16/
  nvfp4 verify model-nvfp4/ --source model-bf16/ --max-relative-rms 0.11 --min-cosine 0.99 --json
  nvfp4 verify model-nvfp4/ --source model-bf16/ --plot errors.svg
  nvfp4 verify model-nvfp4/ --source model-bf16/ --filter 'layers\\.3\\.mlp'")]
pub struct Args {
    /// The quantized model: a safetensors file, a directory of safetensors files, or an index.
    #[arg(value_name = "MODEL", value_hint = clap::ValueHint::AnyPath)]
    model: PathBuf,
    /// The model that it was made from.
    #[arg(long, value_name = "MODEL", value_hint = clap::ValueHint::AnyPath)]
    source: PathBuf,
    /// Largest accepted root-mean-square error of a weight, relative to its root-mean-square number: 0.11 is 11 %.
    #[arg(long, value_name = "X")]
    max_relative_rms: Option<f64>,
    /// Largest accepted absolute error of a number.
    #[arg(long, value_name = "X")]
    max_abs: Option<f64>,
    /// Smallest accepted signal-to-noise ratio of a weight, in dB.
    #[arg(long, value_name = "DB")]
    min_snr: Option<f64>,
    /// Smallest accepted cosine between a weight and its source.
    #[arg(long, value_name = "X")]
    min_cosine: Option<f64>,
    /// Compare only tensors, and weights (`M.weight`), whose names match.
    #[arg(long, value_name = "REGEX")]
    filter: Option<Regex>,
    /// Number of layers and of weights to print, the worst first.
    #[arg(long, value_name = "N", default_value_t = 10)]
    worst: usize,
    /// Draw the errors by layer and projection, the use of codes and scales, and outlier columns, as SVG or PNG.
    #[arg(long, value_name = "FILE.svg|png", value_parser = plot::parse)]
    plot: Option<PathBuf>,
    /// Print one JSON object, with all layers and weights.
    #[arg(long)]
    json: bool,
}

/// Compares the models and prints the errors, the worst first.
pub fn run(args: &Args, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let result = verify(args, out);
    failure::with_json(args.json, SCHEMA, result, out)
}

fn verify(args: &Args, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let (source, model) = (Checkpoint::open(&args.source)?, Checkpoint::open(&args.model)?);
    let chosen = |name: &str| args.filter.as_ref().is_none_or(|filter| filter.is_match(name));
    let comparison = Comparison::new(&source, &model, &chosen)?;
    let progress = Progress::new("comparing", comparison.work());
    let done = |units| progress.add(units);
    let mut weights = comparison.weights(&done)?;
    let differences = comparison.differences(&done)?;
    drop(progress);
    weights.sort_by(|one, other| worse_first(one.errors, other.errors));
    if let Some(path) = &args.plot {
        draw(path, &model, &chosen, &weights)?;
    }
    let report = Report { args, comparison: &comparison, weights, differences };
    if args.json {
        writeln!(out, "{}", report.to_json())?;
    } else {
        report.print(out)?;
    }
    Ok(if report.failures().is_empty() { ExitCode::SUCCESS } else { ExitCode::from(exit::WRONG) })
}

/// Draws the errors of the quantized weights, and how the NVFP4 weights use their format.
pub fn draw(
    path: &Path,
    model: &Checkpoint,
    chosen: &dyn Fn(&str) -> bool,
    weights: &[ComparedWeight],
) -> anyhow::Result<()> {
    let quantized: Vec<_> = weights.iter().filter(|weight| weight.is_quantized()).cloned().collect();
    let mut panels: Vec<_> = plot::errors(&quantized).into_iter().collect();
    panels.extend(plot::usage(&Usage::of(model, chosen, &|_| ())?));
    plot::write(path, &panels)
}

/// Orders errors: weights with a NaN first, then by relative error.
pub fn worse_first(one: Errors, other: Errors) -> std::cmp::Ordering {
    let key = |errors: Errors| (errors.not_finite(), errors.relative_rms());
    let ((nans, one), (other_nans, other)) = (key(one), key(other));
    other_nans.cmp(&nans).then(other.total_cmp(&one))
}

/// JSON of errors; infinity, which JSON cannot represent, is null.
pub fn errors_to_json(errors: Errors) -> Value {
    let finite = |number: f64| Some(number).filter(|number| number.is_finite());
    json!({
        "relative_rms": finite(errors.relative_rms()),
        "max_abs": errors.max_abs(),
        "snr_db": finite(errors.snr_db()),
        "cosine": errors.cosine(),
        "not_finite": errors.not_finite(),
    })
}

/// Cells of a table: relative error, largest error, SNR, cosine.
pub fn cells(errors: Errors) -> [String; 4] {
    [
        format!("{:.3} %", 100.0 * errors.relative_rms()),
        format!("{:.3e}", errors.max_abs()),
        format!("{:.2} dB", errors.snr_db()),
        format!("{:.6}", errors.cosine()),
    ]
}

/// Headers of [`cells`].
pub const CELLS: [&str; 4] = ["rel. RMS error", "max. error", "SNR", "cosine"];

/// Result of a comparison.
struct Report<'a> {
    args: &'a Args,
    comparison: &'a Comparison<'a>,
    /// Weights, the worst first.
    weights: Vec<ComparedWeight>,
    differences: Vec<(&'a str, Difference)>,
}

impl Report<'_> {
    /// Errors of each layer, the worst first; weights outside of layers share an entry.
    fn layers(&self) -> Vec<(String, Errors, usize)> {
        let mut layers: BTreeMap<_, (String, Errors, usize)> = BTreeMap::new();
        for weight in self.weights.iter().filter(|weight| weight.is_quantized()) {
            let name = weight.layer().unwrap_or("outside of layers").to_owned();
            let entry = layers.entry(natural(&name)).or_insert((name, Errors::default(), 0));
            entry.1 = entry.1.join(weight.errors);
            entry.2 += 1;
        }
        let mut layers: Vec<_> = layers.into_values().collect();
        layers.sort_by(|one, other| worse_first(one.1, other.1));
        layers
    }

    /// Returns why a weight fails.
    fn failure(&self, weight: &ComparedWeight) -> Option<String> {
        let (args, errors) = (self.args, weight.errors);
        let above = |limit: Option<f64>, is: f64, what: &str| {
            limit.filter(|limit| is > *limit).map(|limit| format!("{what} {is:.6} exceeds {limit}"))
        };
        let below = |limit: Option<f64>, is: f64, what: &str| {
            limit.filter(|limit| is < *limit).map(|limit| format!("{what} {is:.6} is below {limit}"))
        };
        let not_finite = errors.not_finite();
        (not_finite > 0)
            .then(|| format!("{not_finite} numbers are NaN or infinite"))
            .or_else(|| above(args.max_relative_rms, errors.relative_rms(), "relative error"))
            .or_else(|| above(args.max_abs, errors.max_abs(), "largest error"))
            .or_else(|| below(args.min_snr, errors.snr_db(), "SNR"))
            .or_else(|| below(args.min_cosine, errors.cosine(), "cosine"))
    }

    /// Everything that makes the models differ more than accepted, as name and reason.
    fn failures(&self) -> Vec<(String, String)> {
        let weights = self.weights.iter().filter_map(|weight| Some((weight.module.clone(), self.failure(weight)?)));
        let (weights_alone, tensors_alone) = (self.comparison.weights_alone(), self.comparison.tensors_alone());
        let mut failures: Vec<_> = weights.collect();
        for (index, reason) in ["is missing in the model", "is missing in the source"].into_iter().enumerate() {
            failures.extend(weights_alone[index].iter().map(|name| (name.clone(), format!("this weight {reason}"))));
            // Scales of a KV cache and other additions of a quantizer are no fault.
            if index == 0 {
                failures
                    .extend(tensors_alone[0].iter().map(|name| ((*name).to_owned(), format!("this tensor {reason}"))));
            }
        }
        failures.extend(self.differences.iter().map(|(name, difference)| ((*name).to_owned(), words(difference))));
        failures
    }

    fn print(&self, out: &mut impl Write) -> anyhow::Result<()> {
        let quantized = || self.weights.iter().filter(|weight| weight.is_quantized());
        let mut rows = table::table(&[&["layer", "weights"][..], &CELLS].concat(), 1);
        let layers = self.layers();
        for (name, errors, count) in layers.iter().take(self.args.worst) {
            rows.add_row([printable(name), count.to_string()].into_iter().chain(cells(*errors)));
        }
        writeln!(out, "{rows}\n")?;
        let mut rows = table::table(&[&["weight"][..], &CELLS, &["at row, column"]].concat(), 1);
        for weight in quantized().take(self.args.worst) {
            let [row, column] = weight.worst_place();
            let place = format!("{row}, {column}");
            rows.add_row(std::iter::once(printable(&weight.module)).chain(cells(weight.errors)).chain([place]));
        }
        writeln!(out, "{rows}\n")?;
        let failures = self.failures();
        for (name, reason) in failures.iter().take(self.args.worst) {
            writeln!(out, "{}: {}", printable(name), printable(reason))?;
        }
        if failures.len() > self.args.worst {
            writeln!(out, "… and {} more", failures.len() - self.args.worst)?;
        }
        let all = quantized().fold(Errors::default(), |all, weight| all.join(weight.errors));
        let (count, others) = (quantized().count(), self.weights.len() - quantized().count());
        let tensors = self.comparison.other_tensors();
        writeln!(
            out,
            "{count} quantized weights: relative RMS error {:.3} %, SNR {:.2} dB, cosine {:.6}; {others} weights in floats \
             and {tensors} other tensors compared; {} failures",
            100.0 * all.relative_rms(),
            all.snr_db(),
            all.cosine(),
            failures.len()
        )?;
        Ok(())
    }

    fn to_json(&self) -> Value {
        let weight = |weight: &ComparedWeight| {
            let ([n, k], [row, column]) = (weight.sizes, weight.worst_place());
            json!({
                "module": weight.module, "n": n, "k": k, "layer": weight.layer(),
                "source_form": weight.forms[0].name(), "form": weight.forms[1].name(),
                "errors": errors_to_json(weight.errors), "worst_row": row, "worst_column": column,
                "failure": self.failure(weight),
            })
        };
        let layer = |(name, errors, count): &(String, Errors, usize)| json!({"layer": name, "weights": count, "errors": errors_to_json(*errors)});
        let quantized = self.weights.iter().filter(|weight| weight.is_quantized());
        let all = quantized.fold(Errors::default(), |all, weight| all.join(weight.errors));
        let failures = self.failures();
        let failed = failures.iter().map(|(name, reason)| json!({"name": name, "reason": reason}));
        json!({
            "schema_version": SCHEMA,
            "model": self.args.model.display().to_string(),
            "source": self.args.source.display().to_string(),
            "plot": self.args.plot.as_ref().map(|path| path.display().to_string()),
            "passed": failures.is_empty(),
            "errors": errors_to_json(all),
            "layers": self.layers().iter().map(layer).collect::<Vec<_>>(),
            "weights": self.weights.iter().map(weight).collect::<Vec<_>>(),
            "other_tensors": self.comparison.other_tensors(),
            "only_in_model": self.comparison.tensors_alone()[1],
            "failures": failed.collect::<Vec<_>>(),
        })
    }
}

/// Describes a difference between two tensors.
pub fn words(difference: &Difference) -> String {
    match difference {
        Difference::Layout([one, other]) => format!("{other}, but {one} in the other model"),
        Difference::Bytes { different, all } => format!("{different} of {all} bytes differ"),
    }
}
