//! `nvfp4 diff`: lists what differs between two models.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use nvfp4::checkpoint::{Checkpoint, ComparedWeight, Comparison, Difference};
use nvfp4::printable;
use regex::Regex;
use serde_json::{Value, json};

use super::progress::Progress;
use super::verify::{CELLS, cells, draw, errors_to_json, words, worse_first};
use super::{exit, failure, plot, table};

/// Version of the output of `--json`; it grows when a key is removed or changes its meaning.
const SCHEMA: u32 = 1;

/// List what differs between two models: names, shapes, bytes, and numbers weight by weight
#[derive(clap::Args)]
#[command(after_help = "\
Weights are compared as numbers, whatever form each model stores them in; all other tensors byte by byte. The exit code is \
0 if all names, shapes and numbers are equal, and 1 otherwise.

Examples:
  nvfp4 diff model-a/ model-b/
  nvfp4 diff modelopt/ compressed-tensors/ --filter mlp --json")]
pub struct Args {
    /// A safetensors file, a directory of safetensors files, or the index of a sharded model.
    #[arg(value_name = "ONE", value_hint = clap::ValueHint::AnyPath)]
    one: PathBuf,
    /// The other model.
    #[arg(value_name = "OTHER", value_hint = clap::ValueHint::AnyPath)]
    other: PathBuf,
    /// Compare only tensors, and weights (`M.weight`), whose names match.
    #[arg(long, value_name = "REGEX")]
    filter: Option<Regex>,
    /// Draw the errors of OTHER's quantized weights by layer and projection, the use of codes and scales, and outlier
    /// columns, as SVG or PNG.
    #[arg(long, value_name = "FILE.svg|png", value_parser = plot::parse)]
    plot: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Compares the models and prints the differences.
pub fn run(args: &Args, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let result = diff(args, out);
    failure::with_json(args.json, SCHEMA, result, out)
}

fn diff(args: &Args, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let (one, other) = (Checkpoint::open(&args.one)?, Checkpoint::open(&args.other)?);
    let chosen = |name: &str| args.filter.as_ref().is_none_or(|filter| filter.is_match(name));
    let comparison = Comparison::new(&one, &other, &chosen)?;
    let progress = Progress::new("comparing", comparison.work());
    let done = |units| progress.add(units);
    let (weights, tensors) = (comparison.weights(&done)?, comparison.differences(&done)?);
    drop(progress);
    if let Some(path) = &args.plot {
        draw(path, &other, &chosen, &weights)?;
    }
    let equal = weights.iter().filter(|weight| weight.is_equal()).count();
    let mut different: Vec<_> = weights.into_iter().filter(|weight| !weight.is_equal()).collect();
    different.sort_by(|one, other| worse_first(one.errors, other.errors));
    let found = Found { comparison: &comparison, equal, different, tensors };
    if args.json {
        writeln!(out, "{}", found.to_json(args))?;
    } else {
        found.print(args, out)?;
    }
    Ok(if found.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(exit::WRONG) })
}

/// Differences between two models.
struct Found<'a> {
    comparison: &'a Comparison<'a>,
    /// Number of weights with equal numbers.
    equal: usize,
    /// Weights with different numbers, the worst first.
    different: Vec<ComparedWeight>,
    /// Other tensors that differ.
    tensors: Vec<(&'a str, Difference)>,
}

impl Found<'_> {
    /// Names of only one of the models: weights, then other tensors.
    fn alone(&self, index: usize) -> Vec<&str> {
        let weights = self.comparison.weights_alone()[index].iter().map(String::as_str);
        weights.chain(self.comparison.tensors_alone()[index].iter().copied()).collect()
    }

    fn is_empty(&self) -> bool {
        self.different.is_empty() && self.tensors.is_empty() && (0..2).all(|index| self.alone(index).is_empty())
    }

    fn print(&self, args: &Args, out: &mut impl Write) -> anyhow::Result<()> {
        for (index, path) in [&args.one, &args.other].into_iter().enumerate() {
            for name in self.alone(index) {
                writeln!(out, "only in {}: {}", printable(&path.to_string_lossy()), printable(name))?;
            }
        }
        for (name, difference) in &self.tensors {
            writeln!(out, "{}: {}", printable(name), words(difference))?;
        }
        if !self.different.is_empty() {
            let mut rows = table::table(&[&["weight", "form", "other form"][..], &CELLS].concat(), 3);
            for weight in &self.different {
                let names = [printable(&weight.module)].into_iter().chain(weight.forms.map(|form| form.name().into()));
                rows.add_row(names.chain(cells(weight.errors)));
            }
            writeln!(out, "{rows}\n")?;
        }
        let tensors = self.comparison.other_tensors();
        let (different, others) = (self.different.len(), self.tensors.len());
        writeln!(
            out,
            "weights: {} equal, {different} different; other tensors: {} equal, {others} different",
            self.equal,
            tensors - others
        )?;
        Ok(())
    }

    fn to_json(&self, args: &Args) -> Value {
        let weight = |weight: &ComparedWeight| {
            let [n, k] = weight.sizes;
            let forms = weight.forms.map(|form| form.name());
            json!({"module": weight.module, "n": n, "k": k, "forms": forms, "errors": errors_to_json(weight.errors)})
        };
        let tensor = |(name, difference): &(&str, Difference)| json!({"tensor": name, "difference": words(difference)});
        json!({
            "schema_version": SCHEMA,
            "one": args.one.display().to_string(),
            "other": args.other.display().to_string(),
            "plot": args.plot.as_ref().map(|path| path.display().to_string()),
            "equal": self.is_empty(),
            "only_in_one": self.alone(0),
            "only_in_other": self.alone(1),
            "equal_weights": self.equal,
            "weights": self.different.iter().map(weight).collect::<Vec<_>>(),
            "other_tensors": self.comparison.other_tensors(),
            "tensors": self.tensors.iter().map(tensor).collect::<Vec<_>>(),
        })
    }
}
