//! `cargo xtask experiments`: writes `benches/lab/experiments.md` without running anything. Sources:
//!
//! - counters: `benches/lab/counters.json`
//! - measurements: `benches/lab/measurements/*.json`
//! - predictions: `benches/lab/time-model.json`
//! - optimization steps on Hopper and in the time model of a B200: `benches/*/steps.toml`

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::PathBuf,
    process::Command,
};

use anyhow::{Context, ensure};
use nvfp4::plan::roofline::{Bound, GPUS, Gpu, Peaks};
use nvfp4::shape::Shape;
use serde::Deserialize;

use crate::{
    build_ptx,
    card::times::{PREFIX, Times},
    counters,
    document::{self, Mode},
    emulate::Run,
    table::{Table, geomean},
    time_model, tools, work, workspace,
};

/// Renew benches/lab/experiments.md from counters and measurements.
#[derive(clap::Args)]
pub struct Args {
    /// Fail if the page is out of date
    #[arg(long)]
    check: bool,
}

const PAGE: &str = "benches/lab/experiments.md";
const TEMPLATE: &str = include_str!("experiments.md");
const COMMAND: &str = "cargo xtask experiments";

/// Folder of benchmark results, one file per GPU and benchmark.
const MEASUREMENTS: &str = "benches/lab/measurements";

/// Optimization steps of the Hopper kernel, and of the Blackwell kernel in the time model.
const STEPS: &str = "benches/hopper/steps.toml";
const MODELLED_STEPS: &str = "benches/blackwell/steps.toml";

/// The GPU that the Blackwell kernel is planned for.
const B200: Gpu = GPUS[0];

/// Shape on which the variants are compared.
const VARIANTS_SHAPE: &str = "moe-4";

/// Rule for accepting a change: on the geometric mean of all shapes it is faster by at least the factor `ACCEPTED`, it
/// is slower on no shape, and the repeats spread by less than `SPREAD`.
const ACCEPTED: f64 = 1.4;
const SPREAD: f64 = 0.05;

/// Script that renders the report of a measurement: times, rates and goals.
const REPORT: &str = "benches/hopper/report.py";

/// Changes that the acceptance rule is applied to: name of the change, variant without it, variant with it. An empty
/// variant is the default one.
const CHANGES: [(&str, &str, &str); 9] = [
    ("stages", "t64_s1", "t64"),
    ("tiles", "t128", "t64"),
    ("tma-store", "t64", "t64_tma"),
    ("specialized", "t64_serial", "t64"),
    ("pair", "t64", "t64_pair"),
    ("persistent", "per-group", ""),
    ("streams", "per-group", "streams=8"),
    ("graph", "", "graph"),
    ("fused", "unfused", ""),
];

/// Renders the page, and writes or checks it.
pub fn run(args: &Args) -> anyhow::Result<()> {
    make(if args.check { Mode::Check } else { Mode::Write })
}

/// Renders and writes the page.
pub fn renew() -> anyhow::Result<()> {
    make(Mode::Write)
}

fn make(mode: Mode) -> anyhow::Result<()> {
    let (runs, measurements) = (counters::read()?, measurements()?);
    document::whole(PAGE, &page(&runs, &measurements)?, mode, COMMAND)
}

/// The part of a benchmark result that the acceptance rule needs.
#[derive(Deserialize)]
struct Measurement {
    conditions: BTreeMap<String, String>,
    shapes: BTreeMap<String, Measured>,
}

/// Microseconds of a shape by contender.
#[derive(Deserialize)]
struct Measured {
    us: BTreeMap<String, Time>,
}

#[derive(Deserialize)]
struct Time {
    median: f64,
    p10: f64,
    p90: f64,
}

fn measurements() -> anyhow::Result<Vec<(String, Measurement)>> {
    let folder = workspace::root().join(MEASUREMENTS);
    let mut files: Vec<PathBuf> = match fs::read_dir(&folder) {
        Ok(entries) => entries.flatten().map(|entry| entry.path()).collect(),
        Err(_) => Vec::new(),
    };
    // The folder also holds verdicts of self-tests.
    let is_measurement = |name: &str| name.ends_with(".json") && !name.ends_with("-selftest.json");
    files.retain(|file| file.file_name().and_then(|name| name.to_str()).is_some_and(is_measurement));
    files.sort();
    let read = |file: &PathBuf| {
        let text = fs::read_to_string(file)?;
        let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        anyhow::Ok((name, serde_json::from_str(&text)?))
    };
    files.iter().map(|file| read(file).with_context(|| format!("cannot read {}", file.display()))).collect()
}

/// An optimization step of a kernel.
#[derive(Deserialize)]
struct Step {
    name: String,
    mechanism: String,
    prediction: String,
    /// `None`: not measured yet.
    outcome: Option<String>,
    #[serde(default)]
    times: Option<toml::Value>,
}

#[derive(Default, Deserialize)]
struct Steps {
    #[serde(default, rename = "step")]
    steps: Vec<Step>,
}

fn steps(file: &str) -> anyhow::Result<Vec<Step>> {
    let Steps { steps } = toml::from_str(&document::read(file)?).with_context(|| file.to_owned())?;
    ensure!(!steps.is_empty(), "{file} has no [[step]]");
    Ok(steps)
}

type Measurements = [(String, Measurement)];

fn page(runs: &[Run], measurements: &Measurements) -> anyhow::Result<String> {
    let variants_of = |name: &str, words: &[&str]| {
        let rows = runs.iter().filter(|run| run.arch == counters::BLACKWELL.to_string() && run.shape == name);
        let rows = rows.filter(|run| words.contains(&run.variant.as_str()));
        counters::variants(&rows.map(|run| (run, shape(&run.shape))).collect())
    };
    let variants = |words: &[&str]| variants_of(VARIANTS_SHAPE, words);
    let mut text = TEMPLATE.to_owned();
    let mut fill = |name: &str, with: String| {
        let place = format!("{{{{{name}}}}}\n");
        ensure!(text.contains(&place), "xtask/src/experiments.md has no placeholder {place}");
        text = text.replace(&place, &with);
        Ok(())
    };
    fill("stages", variants(&["t64_s1", "t64_s2", "t64"]))?;
    fill("tiles", variants(&["t64", "t96", "t128"]))?;
    fill("waste", waste(runs))?;
    fill("stores", stores(runs))?;
    fill("roles", variants(&["t64_serial", "t64_serial_s3", "t64"]))?;
    fill("pair", variants(&["t64", "t64_pair", "t128", "t128_pair"]))?;
    fill("launches", launches(runs))?;
    fill("launches counted", variants_of("moe-2", &["t64", "t64,per-group"]))?;
    fill("fusion", fusion(runs))?;
    fill("light", light())?;
    let kernels = build_ptx::kernels()?;
    let kernels: Vec<_> = kernels.kernels().iter().map(|kernel| kernel.name.as_str()).collect();
    let modeled = time_model::unmeasured()?;
    for (change, without, with) in CHANGES {
        let times = accepted(measurements, &kernels, without, with) + &accepted_in_model(&modeled, without, with);
        fill(&format!("times {change}"), times)?;
    }
    fill("triton", triton(&time_model::triton_unmeasured()?))?;
    fill("measurements", measured(measurements)?)?;
    fill("steps", steps_text(&steps(STEPS)?))?;
    fill("modeled steps", steps_text(&steps(MODELLED_STEPS)?))?;
    ensure!(!text.contains("{{"), "xtask/src/experiments.md has a placeholder that nothing fills");
    Ok(text)
}

fn shape(name: &str) -> &'static Shape {
    work::shape(name).expect("the shape is built in")
}

/// Returns a table of the useful share of the multiply-adds: as the kernel issues them, and if tokens were rows of
/// tiles.
fn waste(runs: &[Run]) -> String {
    let mut table = Table::new(2, &["shape", "entry", "useful, tokens on N", "useful, tokens on M in tiles of 128"]);
    for run in unasked(runs) {
        let shape = shape(&run.shape);
        table.row([
            run.shape.clone(),
            run.entry.clone(),
            counters::percent(run.useful(shape)),
            counters::percent(work::useful_in_rows(shape, 128)),
        ]);
    }
    table.to_string()
}

fn stores(runs: &[Run]) -> String {
    let header = ["shape", "variant", "bytes by st", "by TMA", "warp instructions", "bank conflicts", "shared bytes"];
    let mut table = Table::new(2, &header);
    let chosen = runs.iter().filter(|run| run.shape == VARIANTS_SHAPE);
    for run in chosen.filter(|run| ["t64", "t64_tma"].contains(&run.variant.as_str())) {
        table.row([
            run.shape.clone(),
            run.variant.clone(),
            counters::thousands(run.output[1]),
            counters::thousands(run.output[0]),
            counters::thousands(run.warp_instructions),
            counters::thousands(run.bank_conflicts),
            counters::thousands(run.shared_bytes),
        ]);
    }
    table.to_string()
}

/// Returns a table of calculated launches, waves and idle shares, for the default tiles of each shape.
fn launches(runs: &[Run]) -> String {
    let header = ["shape", "entry", "tiles", "waves", "idle", "launches if per-group", "waves", "idle"];
    let mut table = Table::new(2, &header);
    let idle = |tiles: usize, waves: usize| counters::percent(1.0 - tiles as f64 / (waves * B200.sms) as f64);
    for (run, tokens) in unasked(runs).filter_map(|run| Some((run, run.tile_tokens()?))) {
        let (all, groups) = work::tilings(shape(&run.shape), tokens, B200.sms);
        let apart = groups.iter().map(|group| group.waves).sum();
        let mut cells = vec![run.shape.clone(), run.entry.clone(), all.tiles.to_string(), all.waves.to_string()];
        let [together, apart_idle] = [all.waves, apart].map(|waves| idle(all.tiles, waves));
        cells.extend([together, groups.len().to_string(), apart.to_string(), apart_idle]);
        table.push(cells);
    }
    table.to_string()
}

/// Returns the runs of MoE shapes with the default variant.
fn unasked(runs: &[Run]) -> impl Iterator<Item = &Run> {
    let chosen = runs.iter().filter(|run| run.arch == counters::BLACKWELL.to_string() && run.variant.is_empty());
    chosen.filter(|run| run.shape.starts_with("moe-") || run.shape.starts_with("decode-"))
}

fn fusion(runs: &[Run]) -> String {
    let header = ["shape", "variant", "launches", "read", "written", "between launches"];
    let mut table = Table::new(2, &header);
    for run in
        runs.iter().filter(|run| run.shape == VARIANTS_SHAPE && ["t128", "unfused"].contains(&run.variant.as_str()))
    {
        let [read, written] = run.distinct.map(counters::thousands);
        let between = counters::thousands(run.intermediate.iter().sum());
        table.row([run.shape.clone(), run.variant.clone(), run.launches.to_string(), read, written, between]);
    }
    table.to_string()
}

/// Returns a table of the speed of light on a B200. It is the longer of two times: to read and write every byte once,
/// and to execute every operation once.
fn light() -> String {
    /// Figures of a B200 that the earlier attempt assumed.
    const THEN: Peaks = Peaks { bytes_per_second: 4.5e12, ops_per_second: 2.5e15 };
    let header = ["shape", "bytes, µs", "operations, µs", "light, µs", "bound by", "light, old figures", "bound by"];
    let mut table = Table::new(1, &header);
    for name in ["moe-1", "moe-2", "moe-3", "moe-4", "decode-1", "group-1", "group-2", "group-3", "group-4"] {
        let work = work::roofline(shape(name));
        let us = |seconds: f64| format!("{:.1}", seconds * 1e6);
        let bound = |peaks| match work.bound(peaks) {
            Bound::Memory => "memory".to_owned(),
            Bound::Compute => "compute".to_owned(),
        };
        let (memory, compute) = (us(work.memory_seconds(B200.peaks)), us(work.compute_seconds(B200.peaks)));
        let [light, then] = [B200.peaks, THEN].map(|peaks| us(work.seconds(peaks)));
        table.row([name.to_owned(), memory, compute, light, bound(B200.peaks), then, bound(THEN)]);
    }
    table.to_string()
}

/// Applies the acceptance rule to a change, for every kernel and every measurement that has both variants.
fn accepted(measurements: &Measurements, kernels: &[&str], without: &str, with: &str) -> String {
    let mut lines = Vec::new();
    for (file, measurement) in measurements {
        for &kernel in kernels {
            let name = |word: &str| if word.is_empty() { kernel.to_owned() } else { format!("{kernel},{word}") };
            let mut ratios = Vec::new();
            let mut spread: f64 = 0.0;
            for (shape, Measured { us }) in &measurement.shapes {
                if let (Some(before), Some(after)) = (us.get(&name(without)), us.get(&name(with))) {
                    ratios.push((shape, before.median / after.median));
                    spread = [spread, before.spread(), after.spread()].into_iter().fold(0.0, f64::max);
                }
            }
            let Some((slowest, least)) = ratios.iter().min_by(|a, b| a.1.total_cmp(&b.1)) else { continue };
            let mean = geomean(ratios.iter().map(|(_, ratio)| *ratio));
            let holds = mean >= ACCEPTED && *least >= 1.0 && spread < SPREAD;
            lines.push(format!(
                "- `{}` against `{}` on {} ({file}): {mean:.2}× on the geometric mean of {} shapes, least {least:.2}× \
                 ({slowest}), spread {:.1} %: the rule {}.\n",
                name(with),
                name(without),
                measurement.card(),
                ratios.len(),
                100.0 * spread,
                if holds { "holds" } else { "does not hold" }
            ));
        }
    }
    let b200 = measurements.iter().any(|(_, measurement)| measurement.card().contains("B200"));
    if !b200 {
        lines.push("- On a B200: not measured, no B200 is available.\n".to_owned());
    }
    lines.concat()
}

/// Applies the same rule to times predicted for a B200, which have no spread.
fn accepted_in_model(modeled: &BTreeMap<(String, String), f64>, without: &str, with: &str) -> String {
    let us = |variant: &str, shape: &str| modeled.get(&(variant.to_owned(), shape.to_owned()));
    let shapes: BTreeSet<&str> = modeled.keys().map(|(_, shape)| &**shape).collect();
    let ratios: Vec<_> =
        shapes.into_iter().filter_map(|shape| Some((shape, us(without, shape)? / us(with, shape)?))).collect();
    let Some((slowest, least)) = ratios.iter().min_by(|a, b| a.1.total_cmp(&b.1)) else { return String::new() };
    let mean = geomean(ratios.iter().map(|(_, ratio)| *ratio));
    let name = |variant: &str| if variant.is_empty() { "the default".to_owned() } else { format!("`{variant}`") };
    format!(
        "- Modeled for a B200 ([time-model.md](time-model.md)), not measured: {} against {}, {mean:.2}× on the geometric mean \
         of {} shapes, least {least:.2}× ({slowest}): the rule would {}.\n",
        name(with),
        name(without),
        ratios.len(),
        if mean >= ACCEPTED && *least >= 1.0 { "hold" } else { "not hold" }
    )
}

/// Compares Triton's kernel with `gated_sm100` by predicted times for a B200.
fn triton(ratios: &[(&str, f64)]) -> String {
    let Some((closest, least)) = ratios.iter().min_by(|a, b| a.1.total_cmp(&b.1)) else { return String::new() };
    let mean = geomean(ratios.iter().map(|(_, ratio)| *ratio));
    format!(
        "- Modeled for a B200 ([time-model.md](time-model.md)), not measured: Triton takes {mean:.2} times as long as `gated_sm100` on the \
         geometric mean of {} shapes, at least {least:.2} times ({closest}).\n",
        ratios.len()
    )
}

impl Time {
    /// Spread of the repeats, as a share of the median.
    fn spread(&self) -> f64 {
        (self.p90 - self.p10) / self.median
    }
}

impl Measurement {
    /// Name of the GPU.
    fn card(&self) -> &str {
        self.conditions.get("gpu").and_then(|gpu| gpu.split(',').next()).unwrap_or("an unnamed GPU")
    }
}

/// Returns the report of each measurement, by the benchmark's script or by `cargo xtask card`.
fn measured(measurements: &Measurements) -> anyhow::Result<String> {
    let mut text = String::new();
    for (file, _) in measurements {
        if file.starts_with(PREFIX) {
            let times: Times = serde_json::from_str(&document::read(&format!("{MEASUREMENTS}/{file}"))?)?;
            text += &format!("### {file}\n\n{}\n", times.report());
            continue;
        }
        let mut python = Command::new("python3");
        python.current_dir(workspace::root()).args([REPORT, &format!("{MEASUREMENTS}/{file}")]);
        let (report, _) = tools::output(&mut python)?;
        text += &format!("### {file}\n\n```text\n{report}```\n\n");
    }
    Ok(if text.is_empty() { "Not measured yet.\n".into() } else { text.trim_end().to_owned() + "\n" })
}

fn steps_text(steps: &[Step]) -> String {
    if steps.is_empty() {
        return "None recorded.\n".into();
    }
    let one = |step: &Step| {
        let Step { name, mechanism, prediction, outcome, times } = step;
        let times = times.as_ref().map(|times| format!("- Times: {}\n", plain(times))).unwrap_or_default();
        format!(
            "### {name}\n\n- Mechanism: {}\n- Predicted: {}\n- Outcome: {}\n{times}\n",
            mechanism.trim(),
            prediction.trim(),
            outcome.as_deref().unwrap_or("not measured yet").trim()
        )
    };
    steps.iter().map(one).collect::<String>().trim_end().to_owned() + "\n"
}

/// Formats a TOML value as text: `moe-1 350 → 280; decode-1 110`.
fn plain(value: &toml::Value) -> String {
    match value {
        toml::Value::String(text) => text.trim().to_owned(),
        toml::Value::Table(table) => {
            let pairs: Vec<_> = table.iter().map(|(name, value)| format!("{name} {}", plain(value))).collect();
            pairs.join("; ")
        }
        toml::Value::Array(values) => values.iter().map(plain).collect::<Vec<_>>().join(" → "),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measurement(without: [f64; 2], with: [f64; 2]) -> Vec<(String, Measurement)> {
        let time = |median: f64| serde_json::json!({"median": median, "p10": median, "p90": median * 1.01});
        let shape = |n: usize| serde_json::json!({"us": {"gated_sm90,t64_s1": time(without[n]), "gated_sm90,t64": time(with[n])}});
        let json = serde_json::json!({
            "conditions": {"gpu": "NVIDIA H200, 1"},
            "shapes": {"moe-1": shape(0), "moe-2": shape(1)},
        });
        vec![("file".into(), serde_json::from_value(json).unwrap())]
    }

    #[test]
    fn rule_requires_the_mean_and_no_slower_shape() {
        let said = |without, with| accepted(&measurement(without, with), &["gated_sm90"], "t64_s1", "t64");
        assert!(said([2.0, 2.0], [1.0, 1.0]).contains("2.00× on the geometric mean of 2 shapes"));
        assert!(said([2.0, 2.0], [1.0, 1.0]).contains("the rule holds"));
        assert!(said([4.0, 0.9], [1.0, 1.0]).contains("least 0.90× (moe-2), spread 1.0 %: the rule does not hold"));
        assert!(said([1.3, 1.3], [1.0, 1.0]).contains("does not hold"));
        assert!(said([2.0, 2.0], [1.0, 1.0]).ends_with("- On a B200: not measured, no B200 is available.\n"));
    }

    #[test]
    fn steps_are_listed_as_text() {
        let toml =
            "[[step]]\nname = 'A'\nmechanism = 'm'\nprediction = 'p'\noutcome = 'o'\ntimes = { moe-1 = [3, 2] }\n";
        let Steps { steps } = toml::from_str(toml).unwrap();
        let text = steps_text(&steps);
        assert_eq!(text, "### A\n\n- Mechanism: m\n- Predicted: p\n- Outcome: o\n- Times: moe-1 3 → 2\n");
    }
}
