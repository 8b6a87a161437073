//! `cargo xtask time-model`: writes `docs/time-model.md`: how the emulator's clock works, its constants, and every predicted time
//! beside the measured one.
//!
//! Predictions are kept in `docs/time-model.json`, since they take minutes; `--predict` makes them again.

use std::{collections::BTreeMap, env, fs, process::Command};

use anyhow::{Context, ensure};
use ptx_emulator::Card;
use serde::{Deserialize, Serialize};

use crate::{
    document::{self, Mode},
    emulate::Nvfp4,
    table::Table,
    tools::{self, NVDISASM, PTXAS},
    workspace,
};

/// Renew docs/time-model.md from predictions and measurements.
#[derive(clap::Args)]
pub struct Args {
    /// Predict again: all points that were measured, or those that `--shape` names
    #[arg(long)]
    predict: bool,
    /// A shape to predict; may be given several times
    #[arg(long, value_name = "NAME", requires = "predict")]
    shape: Vec<String>,
    /// Install ptxas and nvdisasm from PyPI under target/ if there are none
    #[arg(long)]
    install: bool,
    /// Fail if the page is not what is kept makes of it
    #[arg(long, conflicts_with = "predict")]
    check: bool,
}

const PAGE: &str = "docs/time-model.md";
const TEMPLATE: &str = include_str!("time_model.md");
const COMMAND: &str = "cargo xtask time-model";
const PREDICTIONS: &str = "docs/time-model.json";
const MEASURED: &str = "docs/measurements/h200.json";

/// The measured kernel, and the points on which constants were fitted.
const KERNEL: &str = "gated_sm90";
const FITTED: [&str; 1] = ["group-4"];

/// A miss beyond this share is named.
const MISS: f64 = 0.15;

/// What is kept of a prediction.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Prediction {
    us: f64,
    /// The unit that bounds the longest phase.
    bound: String,
    from_machine_code: bool,
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
struct Median {
    median: f64,
}

/// Of nvfp4's JSON.
#[derive(Deserialize)]
struct Printed {
    predicted_us: f64,
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
}

/// Predicts what was asked for, and writes or compares the page.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let measured: Measured = serde_json::from_str(&document::read(MEASURED)?).context(MEASURED)?;
    let mut kept: BTreeMap<String, Prediction> =
        document::read(PREDICTIONS).map_or_else(|_| Ok(BTreeMap::new()), |text| serde_json::from_str(&text))?;
    if args.predict {
        let command = Nvfp4::build()?;
        let path = path_with_tools(args.install)?;
        let all = || measured.shapes.keys().cloned().collect();
        let shapes: Vec<String> = if args.shape.is_empty() { all() } else { args.shape.clone() };
        for shape in shapes {
            let prediction = predict(&command, &path, &shape)?;
            println!("{shape}: {:.2} us", prediction.us);
            kept.insert(shape, prediction);
            let text = serde_json::to_string_pretty(&kept)? + "\n";
            fs::write(workspace::root().join(PREDICTIONS), text)
                .with_context(|| format!("cannot write {PREDICTIONS}"))?;
        }
    }
    let mode = if args.check { Mode::Check } else { Mode::Write };
    document::whole(PAGE, &page(&measured, &kept)?, mode, COMMAND)
}

/// PATH with the folders of the assembler and the disassembler.
fn path_with_tools(install: bool) -> anyhow::Result<std::ffi::OsString> {
    let tools = [PTXAS.find(install)?, NVDISASM.find(install)?];
    let folders = tools.iter().filter_map(|tool| tool.parent().map(std::path::Path::to_path_buf));
    let before = env::var_os("PATH").unwrap_or_default();
    Ok(env::join_paths(folders.chain(env::split_paths(&before)))?)
}

fn predict(nvfp4: &Nvfp4, path: &std::ffi::OsStr, shape: &str) -> anyhow::Result<Prediction> {
    let mut command = Command::new(nvfp4.path());
    command.args([
        "run",
        "--backend",
        "emulated",
        "--timed",
        "--gpu",
        "h200",
        "--no-values",
        "--json",
        "--shape",
        shape,
    ]);
    let (json, _) = tools::output(command.env("PATH", path)).with_context(|| format!("{shape} on h200"))?;
    let Printed { predicted_us, prediction } = serde_json::from_str(&json).context("nvfp4's JSON")?;
    let launches = &prediction.launches;
    let phases = launches.iter().flat_map(|launch| &launch.phases);
    let longest = phases.max_by(|a, b| (a.to_us - a.from_us).total_cmp(&(b.to_us - b.from_us)));
    Ok(Prediction {
        us: (predicted_us * 100.0).round() / 100.0,
        bound: longest.map_or_else(String::new, |phase| phase.unit.clone()),
        from_machine_code: launches.iter().all(|launch| launch.from_machine_code),
    })
}

fn page(measured: &Measured, kept: &BTreeMap<String, Prediction>) -> anyhow::Result<String> {
    let mut text = TEMPLATE.to_owned();
    text += "\n## Against an H200\n\n";
    text += &format!(
        "Measured: `{KERNEL}` in {MEASURED}, medians. Predicted: `nvfp4 run --backend emulated --timed --gpu h200 --no-values`. **Fitted** \
         marks the points that constants were fitted on; the errors below leave them out.\n\n"
    );
    let mut table = Table::new(1, &["shape", "measured us", "predicted us", "error", "bound by", ""]);
    let (mut errors, mut misses) = (Vec::new(), Vec::new());
    for (shape, prediction) in kept {
        let us = measured.shapes.get(shape).and_then(|shape| shape.us.get(KERNEL));
        let us = us.with_context(|| format!("{shape} was predicted and not measured"))?.median;
        let (error, fitted) = (prediction.us / us - 1.0, FITTED.contains(&shape.as_str()));
        if !fitted {
            errors.push(error.abs());
        }
        if error.abs() > MISS {
            misses.push(format!("{shape} by {:+.0} %", 100.0 * error));
        }
        ensure!(prediction.from_machine_code, "{shape} was predicted without machine code");
        let mark = if fitted { "fitted" } else { "" };
        table.row([
            shape.clone(),
            format!("{us:.1}"),
            format!("{:.1}", prediction.us),
            format!("{:+.1} %", 100.0 * error),
            prediction.bound.clone(),
            mark.to_owned(),
        ]);
    }
    text += &table.to_string();
    errors.sort_by(f64::total_cmp);
    let share = |bound: f64| 100 * errors.iter().filter(|&&error| error <= bound).count() / errors.len().max(1);
    let median = errors.get(errors.len() / 2).copied().unwrap_or_default();
    text += &format!(
        "\nOf {} points that nothing was fitted on, the median error is {:.1} %; {} % are within 10 %, {} % within 15 %, {} % within \
         30 %. ",
        errors.len(),
        100.0 * median,
        share(0.10),
        share(0.15),
        share(0.30)
    );
    text += &if misses.is_empty() {
        format!("None is off by more than {:.0} %.\n", 100.0 * MISS)
    } else {
        format!("Off by more than {:.0} %: {}.\n", 100.0 * MISS, misses.join(", "))
    };
    let missing: Vec<&str> =
        measured.shapes.keys().map(String::as_str).filter(|shape| !kept.contains_key(*shape)).collect();
    if !missing.is_empty() {
        text += &format!("Measured and not yet predicted: {}.\n", missing.join(", "));
    }
    text += NOT_COMPARED;
    for name in Card::NAMES {
        let card = Card::named(name).context("a card's own name")?;
        text += &format!("\n## Constants: {name}, {} multiprocessors\n\n{card}", card.sms);
    }
    Ok(text)
}

/// What is said of everything that has no row.
const NOT_COMPARED: &str = include_str!("time_model_tail.md");
