//! `cargo xtask time-model`: writes `benches/lab/time-model.md`. The page explains the emulator's clock, lists its constants,
//! and shows every predicted time beside the measured one.
//!
//! A prediction takes minutes, so predictions are stored in `benches/lab/time-model.json`. `--predict` renews them.

use std::{
    collections::{BTreeMap, BTreeSet},
    env,
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, bail, ensure};
use ptx_emulator::Card;
use serde::Deserialize;

use prediction::{BUSY, H100, H200, Prediction, SAMPLE, UNMEASURED, kept_of_b200, name_of_b200};
use public::Public;
use triton::Tile;

use crate::{
    document::{self, Mode},
    emulate::Nvfp4,
    table::{Table, geomean},
    tools::{self, NVDISASM, PTXAS},
    work, workspace,
};

mod prediction;
mod public;
mod triton;

/// Renew benches/lab/time-model.md from predictions and measurements
#[derive(clap::Args)]
pub struct Args {
    /// Predict again: all measured points, or the points that --point selects
    #[arg(long)]
    predict: bool,
    /// Beginning of the names of the points to predict; may be given several times
    #[arg(long, value_name = "NAME")]
    point: Vec<String>,
    /// nvfp4 command for the predictions, instead of building one
    #[arg(long, value_name = "FILE", requires = "predict")]
    nvfp4: Option<PathBuf>,
    /// Predict public kernels for a B200 from a checkout of gau-nernst/gpu-mode-kernels at aee9cda6, built with nvcc
    #[arg(long, value_name = "FOLDER", conflicts_with = "check")]
    public: Option<PathBuf>,
    /// Predict Triton's kernels: a python3 with Triton (3.9.0 for a B200, 3.6.0 for an H100) and numpy
    #[arg(long, value_name = "PYTHON", conflicts_with = "check")]
    triton: Option<PathBuf>,
    /// Install ptxas and nvdisasm from PyPI under target/ if they are missing
    #[arg(long)]
    install: bool,
    /// Fail if the page does not match the stored predictions
    #[arg(long, conflicts_with = "predict")]
    check: bool,
}

const PAGE: &str = "benches/lab/time-model.md";
const TEMPLATE: &str = include_str!("time_model.md");
const COMMAND: &str = "cargo xtask time-model";
const PREDICTIONS: &str = "benches/lab/time-model.json";

/// Contenders of a measurement, each with its name for `--variant`.
type Contenders = &'static [(&'static str, &'static str)];

/// Measurements of grouped products: GPU, file, contenders. If several files have a point, the last one counts.
const GROUPED: [(&str, &str, Contenders); 4] = [
    (H200, "benches/lab/measurements/h200.json", &[("gated_sm90", ""), (PORTABLE, PORTABLE)]),
    (H200, "benches/lab/measurements/h200-dual.json", &[("gated_sm90", "")]),
    (H100, "benches/lab/measurements/h100.json", &[("gated_sm90", "")]),
    (
        H200,
        "benches/lab/measurements/h200-schedules.json",
        &[("gated_sm90,per-group", "per-group"), ("gated_sm90,unfused", "unfused")],
    ),
];

/// The portable kernel. [`SAMPLE`] SMs run it.
const PORTABLE: &str = "gated_simt";

/// Measurements of linear layers.
const LINEAR: [(&str, &str); 2] = [(H200, "benches/lab/h200-linear.json"), (H100, "benches/lab/h100-linear.json")];

/// Measurements of whole layers, and the names of their models in this library.
const LAYERS: [(&str, &str); 2] = [(H200, "benches/lab/h200-layer.json"), (H100, "benches/lab/h100-layer.json")];
const MODELS: [(&str, &str); 4] = [
    ("qwen3-30b", "qwen3-30b-a3b"),
    ("mixtral-8x7b", "mixtral-8x7b"),
    ("gpt-oss-120b", "gpt-oss-120b"),
    ("deepseek-r1/8", "deepseek-r1-rank"),
];

/// Minimum number of tokens for comparing a layer whose experts are spread over several GPUs.
const RANK_TOKENS: usize = 128;

/// Shapes that the kernel of [`UNMEASURED`] is predicted on with the default variant.
const UNMEASURED_SHAPES: [&str; 15] = [
    "dual-1",
    "dual-2",
    "dual-3",
    "dual-4",
    "group-1",
    "group-2",
    "group-3",
    "group-4",
    "moe-1",
    "moe-2",
    "moe-3",
    "moe-4",
    "decode-1",
    "decode-4",
    "decode-16",
];

/// Variants that benches/lab/experiments.md compares on that GPU, and the shapes of the comparison.
const VARIANTS: [&str; 8] = ["t64", "t128", "t64_s1", "t64_tma", "t64_serial", "t64_pair", "per-group", "unfused"];
const VARIANTS_SHAPES: [&str; 3] = ["dual-3", "moe-3", "moe-4"];

/// GPUs of compute capability 12.x, which are not measured, and the points that are predicted for them.
const CONSUMER_CARDS: [&str; 4] = ["rtx-5090", "rtx-pro-6000", "rtx-5070-ti", "gb10"];
#[rustfmt::skip] // One point per line.
const CONSUMER_POINTS: [(&str, &str); 10] = [
    ("layer qwen3-30b-a3b, 1 token", "--op moe --shape qwen3-30b-a3b --tokens 1"),
    ("layer qwen3-30b-a3b, 32 tokens", "--op moe --shape qwen3-30b-a3b --tokens 32"),
    ("layer gpt-oss-120b, 1 token", "--op moe --shape gpt-oss-120b --tokens 1"),
    ("layer gpt-oss-120b, 32 tokens", "--op moe --shape gpt-oss-120b --tokens 32"),
    ("layer qwen3-30b-a3b in NVFP4, 1 token", "--op moe --shape qwen3-30b-a3b --tokens 1 --token-format nvfp4"),
    ("layer gpt-oss-120b in NVFP4, 1 token", "--op moe --shape gpt-oss-120b --tokens 1 --token-format nvfp4"),
    ("linear 1,4096,7168", "--op linear --shape 1,4096,7168"),
    ("linear 16,4096,7168", "--op linear --shape 16,4096,7168"),
    ("linear 64,4096,7168", "--op linear --shape 64,4096,7168"),
    ("linear 512,4096,7168", "--op linear --shape 512,4096,7168"),
];

/// Points that constants were fitted to.
const FITTED: [&str; 1] = ["public dual_gemm v1c dual-1"];

/// Errors above this share are listed by name.
const MISS: f64 = 0.15;

/// A point: a measured or predicted time.
struct Point {
    /// What was measured, and the shape.
    name: String,
    /// Measured time. `None`: the GPU is not measured.
    us: Option<f64>,
    card: &'static str,
    way: Way,
}

/// How the emulator computes a point.
enum Way {
    /// `nvfp4 run` with these arguments.
    Command(Vec<String>),
    /// A kernel that Triton compiles.
    Triton(Tile),
}

impl Point {
    /// Creates a measured point. Its name begins with the GPU's name unless the GPU is [`H200`].
    fn measured(card: &'static str, name: String, us: f64, way: Way) -> Self {
        let name = if card == H200 { name } else { format!("{card} {name}") };
        Self { name, us: Some(us), card, way }
    }
}

#[derive(Deserialize)]
struct Measured {
    shapes: BTreeMap<String, MeasuredShape>,
}

#[derive(Deserialize)]
struct MeasuredShape {
    us: BTreeMap<String, Median>,
}

#[derive(Deserialize)]
struct MeasuredLayers {
    points: BTreeMap<String, MeasuredLayer>,
}

#[derive(Deserialize)]
struct MeasuredLayer {
    model: String,
    routing: String,
    tokens: usize,
    us: BTreeMap<String, Median>,
}

#[derive(Deserialize)]
struct MeasuredLinears {
    points: BTreeMap<String, MeasuredLinear>,
}

#[derive(Deserialize)]
struct MeasuredLinear {
    n: usize,
    k: usize,
    tokens: usize,
    us: BTreeMap<String, Median>,
}

#[derive(Deserialize)]
struct Median {
    median: f64,
}

/// The part of the JSON output of `nvfp4 run` that is read.
#[derive(Deserialize)]
struct Printed {
    predicted_us: f64,
    bytes: Option<f64>,
    prediction: Launches,
}

#[derive(Deserialize)]
struct Launches {
    launches: Vec<Launch>,
}

#[derive(Deserialize)]
struct Launch {
    from_machine_code: bool,
    phases: Vec<Phase>,
}

#[derive(Deserialize)]
struct Phase {
    from_us: f64,
    to_us: f64,
    unit: String,
    busy: f64,
}

impl Args {
    fn asks_for(&self, point: &str) -> bool {
        self.point.is_empty() || self.point.iter().any(|name| point.starts_with(name))
    }
}

/// Predicts the requested points, and writes or checks the page.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let points = points()?;
    let mut kept = kept()?;
    if args.predict {
        let command = Nvfp4::given_or_built(args.nvfp4.as_deref())?;
        let path = path_with_tools(args.install)?;
        for point in points.iter().filter(|point| args.asks_for(&point.name)) {
            let Way::Command(arguments) = &point.way else { continue };
            let prediction = predict(command.path(), &path, point, arguments)?;
            let measured = point.us.map_or_else(String::new, |us| format!(", measured {us:.2}"));
            println!("{}: {:.2} us{measured}", point.name, prediction.us);
            kept.insert(point.name.clone(), prediction);
            keep(&kept)?;
        }
    }
    if let Some(checkout) = &args.public {
        for kernel in public::KERNELS.iter().filter(|kernel| args.asks_for(&kernel.point())) {
            let prediction = kernel.predict(checkout, args.install)?;
            println!("{}: {:.2} us, published {:.2}", kernel.name, prediction.us, kernel.us);
            kept.insert(kernel.point(), prediction);
            keep(&kept)?;
        }
    }
    if let Some(python) = &args.triton {
        let measured = points.iter().filter_map(|point| match &point.way {
            Way::Triton(tile) if args.asks_for(&point.name) => Some((point, tile)),
            _ => None,
        });
        for (point, tile) in measured {
            let prediction = tile.predict(python, args.install)?;
            println!("{}: {:.2} us, measured {:.2}", point.name, prediction.us, point.us.unwrap_or_default());
            kept.insert(point.name.clone(), prediction);
            keep(&kept)?;
        }
        for shape in triton::SHAPES.into_iter().filter(|shape| args.asks_for(&triton::point(shape))) {
            let (tiling, prediction) = triton::fastest(python, shape, args.install)?;
            println!("{}: {:.2} us, {tiling}", triton::point(shape), prediction.us);
            kept.retain(|name, _| triton::tiling(name, shape).is_none());
            kept.insert(format!("{} {tiling}", triton::point(shape)), prediction);
            keep(&kept)?;
        }
    }
    let mode = if args.check { Mode::Check } else { Mode::Write };
    document::whole(PAGE, &page(&points, &kept)?, mode, COMMAND)
}

/// Returns predicted microseconds on a B200 by variant and shape. The variant is "" for the default.
pub fn unmeasured() -> anyhow::Result<BTreeMap<(String, String), f64>> {
    let kept = kept()?;
    let names = kept.iter().filter_map(|(name, prediction)| {
        let rest = name.strip_prefix(UNMEASURED)?.trim_start();
        let (variant, shape) = rest.split_once(' ').unwrap_or(("", rest));
        Some(((variant.to_owned(), shape.to_owned()), prediction.us))
    });
    Ok(names.collect())
}

/// Returns the ratio of Triton's time to the time of `gated_sm100` in the model of a B200, by shape.
pub fn triton_unmeasured() -> anyhow::Result<Vec<(&'static str, f64)>> {
    let kept = kept()?;
    Ok(triton::compared(&kept).iter().map(|compared| (compared.shape, compared.ratio())).collect())
}

fn keep(kept: &BTreeMap<String, Prediction>) -> anyhow::Result<()> {
    let text = serde_json::to_string_pretty(kept)? + "\n";
    fs::write(workspace::root().join(PREDICTIONS), text).with_context(|| format!("cannot write {PREDICTIONS}"))
}

fn kept() -> anyhow::Result<BTreeMap<String, Prediction>> {
    Ok(document::read(PREDICTIONS).map_or_else(|_| Ok(BTreeMap::new()), |text| serde_json::from_str(&text))?)
}

/// Returns the point of a variant of the B200's kernel on a shape.
fn of_b200(variant: &str, shape: &str) -> Point {
    let mut arguments = vec!["--shape".to_owned(), shape.to_owned()];
    if !variant.is_empty() {
        arguments.extend(["--variant".to_owned(), variant.to_owned()]);
    }
    Point { name: name_of_b200(variant, shape), us: None, card: UNMEASURED, way: Way::Command(arguments) }
}

/// Returns a point of a GPU of compute capability 12.x.
fn of_consumer(card: &'static str, name: &str, arguments: &str) -> Point {
    let arguments = arguments.split(' ').map(str::to_owned).collect();
    Point { name: format!("{card} {name}"), us: None, card, way: Way::Command(arguments) }
}

/// Returns all points that can be predicted, except for public kernels and Triton's kernel on the B200.
fn points() -> anyhow::Result<Vec<Point>> {
    let mut points = Vec::new();
    for (card, file, contenders) in GROUPED {
        let measured: Measured = serde_json::from_str(&document::read(file)?).context(file)?;
        for (contender, variant) in contenders {
            for (shape, times) in &measured.shapes {
                let Some(Median { median }) = times.us.get(*contender) else { continue };
                let mut arguments = vec!["--shape".to_owned(), shape.clone()];
                if !variant.is_empty() {
                    arguments.extend(["--variant".to_owned(), (*variant).to_owned()]);
                }
                if *variant == PORTABLE {
                    arguments.extend(["--sample".to_owned(), SAMPLE.to_string()]);
                }
                let point = Point::measured(card, format!("{contender} {shape}"), *median, Way::Command(arguments));
                points.retain(|earlier: &Point| earlier.name != point.name);
                points.push(point);
            }
        }
    }
    for (card, file) in LAYERS {
        let layers: MeasuredLayers = serde_json::from_str(&document::read(file)?).context(file)?;
        for (name, layer) in &layers.points {
            let shape = MODELS.iter().find(|(model, _)| *model == layer.model).map(|(_, shape)| *shape);
            let shape = shape.with_context(|| format!("{file}: model {} is missing from MODELS", layer.model))?;
            // A layer is measured as a CUDA graph, which the host does not slow down. Skip layers without that
            // measurement, and tokens whose experts are all on other GPUs, which no routing here produces.
            let Some(Median { median }) = layer.us.get("layer-graph").filter(|_| layer.routing != "elsewhere") else {
                continue;
            };
            // With few tokens the number of experts that a rank receives depends on the seed, and seeds differ.
            if shape.ends_with("-rank") && layer.tokens < RANK_TOKENS {
                continue;
            }
            let words = ["--op", "moe", "--shape", shape, "--routing", &layer.routing, "--tokens"];
            let arguments = words.iter().map(|word| (*word).to_owned()).chain([layer.tokens.to_string()]).collect();
            points.push(Point::measured(card, format!("layer {name}"), *median, Way::Command(arguments)));
        }
    }
    for (card, file) in LINEAR {
        let linears: MeasuredLinears = serde_json::from_str(&document::read(file)?).context(file)?;
        for (name, MeasuredLinear { n, k, tokens, us }) in &linears.points {
            let Some(Median { median }) = us.get("linear") else { continue };
            let words = ["--op".to_owned(), "linear".to_owned(), "--shape".to_owned(), format!("{tokens},{n},{k}")];
            points.push(Point::measured(card, format!("linear {name}"), *median, Way::Command(words.into())));
        }
    }
    let tilings: Measured = serde_json::from_str(&document::read(triton::MEASURED)?).context(triton::MEASURED)?;
    for (shape, times) in tilings.shapes {
        for (tiling, Median { median }) in times.us {
            let name = format!("Triton {shape} {tiling}");
            points.push(Point::measured(H100, name, median, Way::Triton(Tile { shape: shape.clone(), tiling })));
        }
    }
    points.extend(UNMEASURED_SHAPES.map(|shape| of_b200("", shape)));
    let consumer =
        CONSUMER_CARDS.iter().flat_map(|card| CONSUMER_POINTS.map(|(name, line)| of_consumer(card, name, line)));
    points.extend(consumer);
    points.extend(VARIANTS.iter().flat_map(|variant| VARIANTS_SHAPES.map(|shape| of_b200(variant, shape))));
    Ok(points)
}

/// Returns PATH with the folders of the assembler and the disassembler in front.
fn path_with_tools(install: bool) -> anyhow::Result<std::ffi::OsString> {
    let tools = [PTXAS.find(install)?, NVDISASM.find(install)?];
    let folders = tools.iter().filter_map(|tool| tool.parent().map(std::path::Path::to_path_buf));
    let before = env::var_os("PATH").unwrap_or_default();
    Ok(env::join_paths(folders.chain(env::split_paths(&before)))?)
}

fn predict(nvfp4: &Path, path: &OsStr, point: &Point, arguments: &[String]) -> anyhow::Result<Prediction> {
    let mut command = Command::new(nvfp4);
    command.args([
        "run",
        "--backend",
        "emulated",
        "--timed",
        "--gpu",
        point.card,
        "--no-values",
        "--json",
        "--verify",
        "off",
    ]);
    let (json, _) = tools::output(command.args(arguments).env("PATH", path)).with_context(|| point.name.clone())?;
    let Printed { predicted_us, bytes, prediction } =
        serde_json::from_str(&json).context("cannot parse the JSON output of nvfp4")?;
    let launches = &prediction.launches;
    let phases = launches.iter().flat_map(|launch| &launch.phases);
    let phases = phases.map(|phase| (phase.to_us - phase.from_us, phase.busy, &*phase.unit));
    let from_machine_code = launches.iter().all(|launch| launch.from_machine_code);
    let prediction = Prediction::new(predicted_us, phases, from_machine_code);
    Ok(Prediction { bytes: bytes.filter(|_| CONSUMER_CARDS.contains(&point.card)), ..prediction })
}

/// Formats the number of points, the median error, and the shares of points within error bounds.
fn summary(errors: &mut [f64]) -> String {
    errors.sort_by(f64::total_cmp);
    let share = |bound: f64| 100 * errors.iter().filter(|&&error| error <= bound).count() / errors.len().max(1);
    let median = errors.get(errors.len() / 2).copied().unwrap_or_default();
    format!(
        "{} points, median error {:.1} %; {} % are within 10 %, {} % within 15 %, {} % within 30 %",
        errors.len(),
        100.0 * median,
        share(0.10),
        share(0.15),
        share(0.30)
    )
}

fn page(points: &[Point], kept: &BTreeMap<String, Prediction>) -> anyhow::Result<String> {
    let mut text = TEMPLATE.to_owned();
    let known = points.iter().map(|point| point.name.clone()).chain(public::KERNELS.iter().map(Public::point));
    let known: BTreeSet<String> = known.collect();
    let is_known =
        |name: &str| known.contains(name) || triton::SHAPES.iter().any(|shape| triton::tiling(name, shape).is_some());
    if let Some(unknown) = kept.keys().find(|name| !is_known(name)) {
        bail!("{PREDICTIONS}: {unknown} has a prediction but no measurement; remove it from the file");
    }
    let files = |of: &str| {
        let grouped = GROUPED.iter().map(|(card, file, _)| (*card, *file));
        let all = grouped.chain(LAYERS).chain(LINEAR).chain([(H100, triton::MEASURED)]);
        all.filter(|(card, _)| *card == of).map(|(_, file)| file).collect::<Vec<_>>().join(", ")
    };
    text += &format!(
        "\n## Against an H200\n\nMeasured: medians of {}, for single products (also by launch schedule), linear layers, and whole \
         layers as a CUDA graph with the routing of another seed. Predicted: `nvfp4 run --backend emulated --timed --gpu {H200} \
         --no-values`; {PORTABLE} with `--sample {SAMPLE}`. The machine code is from ptxas 13.5.37, here and below. No constant \
         is fitted to these times.\n\n",
        files(H200)
    );
    text += &comparison(H200, points, kept)?;
    text += &format!(
        "\n## Against an H100\n\nAn H100 is the chip of an H200 with another memory. The model takes the memory's latency and bandwidth \
         from benches/probes on that H100, and all other constants from the H200. Measured: {}, with the same kernels as \
         predicted. `Triton` is the benchmark's peer (benches/hopper/triton_decode_kernel.py), one point per tiling: tokens and \
         rows, elements of K, warps, stages. It is predicted by `{COMMAND} --triton PYTHON` with Triton 3.6.0, the measured \
         version, from {SAMPLE} SMs.\n\n",
        files(H100)
    );
    text += &comparison(H100, points, kept)?;
    text += NOT_COMPARED;
    text += &others(kept)?;
    text += &blackwell(kept)?;
    text += &triton::page(kept)?;
    text += &consumer(kept)?;
    for name in Card::NAMES {
        let card = Card::named(name).context("the GPU is in the model")?;
        text += &format!("\n## Constants: {name}, {} SMs\n\n{card}", card.sms);
    }
    Ok(text)
}

/// Renders the measured and predicted times of a GPU, and a summary of the errors.
fn comparison(card: &str, points: &[Point], kept: &BTreeMap<String, Prediction>) -> anyhow::Result<String> {
    let points = || points.iter().filter(|point| point.card == card && point.us.is_some());
    let mut text = String::new();
    let mut table = Table::new(1, &["point", "measured us", "predicted us", "error", "bound by", ""]);
    let (mut errors, mut misses) = (BTreeMap::<&str, Vec<f64>>::new(), Vec::new());
    for Point { name, us, .. } in points() {
        let (Some(prediction), Some(us)) = (kept.get(name), us) else { continue };
        let (error, fitted) = (prediction.us / us - 1.0, FITTED.contains(&&**name));
        if !fitted {
            errors.entry(&prediction.bound).or_default().push(error.abs());
        }
        if error.abs() > MISS {
            misses.push(format!("{name} by {:+.0} %", 100.0 * error));
        }
        ensure!(
            prediction.from_machine_code,
            "{name} was predicted without machine code; use --predict with ptxas and nvdisasm"
        );
        table.row([
            name.clone(),
            format!("{us:.1}"),
            format!("{:.1}", prediction.us),
            format!("{:+.1} %", 100.0 * error),
            prediction.bound.clone(),
            if fitted { "fitted" } else { "" }.to_owned(),
        ]);
    }
    text += &table.to_string();
    let mut all: Vec<f64> = errors.values().flatten().copied().collect();
    text += &format!(
        "\nAll: {}. By the bounding unit in the model (\"latency\": no unit is busy for {:.0} % of the longest phase):\n\n",
        summary(&mut all),
        100.0 * BUSY
    );
    for (bound, errors) in &mut errors {
        text += &format!("- {bound}: {}.\n", summary(errors));
    }
    text += &if misses.is_empty() {
        format!("\nNo point is off by more than {:.0} %.\n", 100.0 * MISS)
    } else {
        format!("\nOff by more than {:.0} %: {}.\n", 100.0 * MISS, misses.join(", "))
    };
    let missing = points().filter(|point| !kept.contains_key(&point.name)).count();
    if missing > 0 {
        text += &format!(
            "\n{missing} more points were measured but not predicted; `{COMMAND} --predict --point NAME` predicts the points whose names \
             begin with NAME (gated_sm90, layer qwen3-30b, b200).\n"
        );
    }
    Ok(text)
}

/// Renders the predictions of public kernels for a B200 beside their published times.
fn others(kept: &BTreeMap<String, Prediction>) -> anyhow::Result<String> {
    let mut text = format!(
        "\n## Public kernels on the model's B200\n\nThe best public sources with published times: gau-nernst/gpu-mode-kernels, aee9cda6, \
         built with nvcc by `{COMMAND} --public CHECKOUT`. Published times come from events with a resolution of about 2 us, with a \
         cold L2; read each as an interval of 2 us. The fitted point determines `l2-bandwidth`. group-2 comes out 2 us too fast \
         because the model has no DRAM writes: its results are 15 MB.\n\n"
    );
    let mut table = Table::new(1, &["kernel", "published us", "modeled us", "error", "bound by", ""]);
    let mut errors = Vec::new();
    for kernel in &public::KERNELS {
        let Some(prediction) = kept.get(&kernel.point()) else { continue };
        let (error, fitted) = (prediction.us / kernel.us - 1.0, FITTED.contains(&&*kernel.point()));
        ensure!(
            prediction.from_machine_code,
            "{} was predicted without machine code; use --public with ptxas and nvdisasm",
            kernel.name
        );
        errors.extend((!fitted).then_some(error.abs()));
        table.row([
            kernel.name.to_owned(),
            format!("{:.1}", kernel.us),
            format!("{:.1}", prediction.us),
            format!("{:+.1} %", 100.0 * error),
            prediction.bound.clone(),
            if fitted { "fitted" } else { "" }.to_owned(),
        ]);
    }
    text += &table.to_string();
    text += &format!("\n{}.\n", summary(&mut errors));
    Ok(text)
}

/// Renders the predictions of the B200's kernel beside the speed of light and the best public kernel.
fn blackwell(kept: &BTreeMap<String, Prediction>) -> anyhow::Result<String> {
    let mut text = "\n## `gated_sm100` on the model's B200\n\nWith the default variant. Times are modeled, not measured. Light is the public \
                    competition's figure. The published time of the best public kernel is measured, in steps of about 2 us. The column \
                    \"times as long\" compares model with model.\n\n"
        .to_owned();
    let header = ["shape", "modeled us", "light us", "best public: published", "modeled", "times as long", "bound by"];
    let mut table = Table::new(1, &header);
    let mut ratios = Vec::new();
    for shape in UNMEASURED_SHAPES {
        let Some(prediction) = kept_of_b200(kept, shape) else { continue };
        let known = work::shape(shape).with_context(|| format!("unknown shape {shape}"))?;
        let us = |us: Option<f64>| us.map_or_else(|| "–".to_owned(), |us| format!("{us:.1}"));
        let of_shape = public::KERNELS.iter().filter(|kernel| kernel.name.ends_with(&format!(" {shape}")));
        let public =
            of_shape.filter_map(|kernel| kept.get(&kernel.point())).map(|public| public.us).min_by(f64::total_cmp);
        let ratio = public.map(|public| public / prediction.us);
        ratios.extend(ratio);
        table.row([
            shape.to_owned(),
            format!("{:.1}", prediction.us),
            us(known.b200_light_us),
            us(known.b200_best_public_us),
            us(public),
            ratio.map_or_else(|| "–".to_owned(), |ratio| format!("{ratio:.2}")),
            prediction.bound.clone(),
        ]);
    }
    text += &table.to_string();
    let mean = geomean(ratios.iter().copied());
    let least = ratios.iter().copied().fold(f64::INFINITY, f64::min);
    if !ratios.is_empty() {
        text += &format!(
            "\nThe best public kernels take {mean:.2} times as long on the geometric mean, at least {least:.2} times.\n"
        );
    }
    Ok(text)
}

/// Renders the predictions of MoE and linear layers on GPUs of compute capability 12.x.
fn consumer(kept: &BTreeMap<String, Prediction>) -> anyhow::Result<String> {
    let mut text = "\n## Layers on the model's GPUs of compute capability 12.x\n\nModeled microseconds, not measured. In brackets: GB/s of \
                    the bytes that must at least be read or written. Kernels: `moe_sm120` with its lists and sums, and `linear_sm120` \
                    (M,N,K), with tokens in bf16; `moe_nvfp4_sm120` for tokens in NVFP4. Layers route tokens at random. No operand is \
                    in a cache. All times contain the assumed 5 us between two events around an empty kernel. **None of it is \
                    calibrated**: of the constants below, only SMs, clock, bandwidth, L2's size, FP4's rate and some latencies belong \
                    to these GPUs.\n\n"
        .to_owned();
    let header: Vec<_> = ["point"].into_iter().chain(CONSUMER_CARDS).collect();
    let mut table = Table::new(1, &header);
    for (point, line) in CONSUMER_POINTS {
        let predictions = CONSUMER_CARDS.map(|card| kept.get(&of_consumer(card, point, line).name));
        if predictions.iter().all(Option::is_none) {
            continue;
        }
        let mut row = vec![point.to_owned()];
        for prediction in predictions {
            row.push(match prediction {
                None => "–".to_owned(),
                Some(prediction) => {
                    ensure!(
                        prediction.from_machine_code,
                        "{point} was predicted without machine code; use --predict with ptxas and nvdisasm"
                    );
                    let rate = |bytes: f64| format!(" ({:.0})", bytes / prediction.us / 1e3);
                    format!("{:.1}{}", prediction.us, prediction.bytes.map(rate).unwrap_or_default())
                }
            });
        }
        table.push(row);
    }
    text += &table.to_string();
    Ok(text)
}

/// Part of the page after the comparisons: known misses, and results without a table row.
const NOT_COMPARED: &str = include_str!("time_model_tail.md");
