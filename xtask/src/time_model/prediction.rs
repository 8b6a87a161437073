//! A prediction, the GPUs that it is made for, and how a launch is predicted.

use std::{collections::BTreeMap, path::Path, process::Command};

use anyhow::Context;
use ptx_emulator::{Card, Listing, Timeline, launch_json::LaunchFile};
use serde::{Deserialize, Serialize};

use crate::tools::{self, NVDISASM, PTXAS};

/// The measured GPUs. The model of the second one differs from the first in the memory's constants only.
pub const H200: &str = "h200";
pub const H100: &str = "h100";

/// The GPU without measurements.
pub const UNMEASURED: &str = "b200";

/// Number of SMs that run a slow kernel. All SMs would take hours.
pub const SAMPLE: u32 = 4;

/// A launch is bound by latency if no unit is busier than this in the longest phase.
pub const BUSY: f64 = 0.6;

/// A stored prediction.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Prediction {
    pub us: f64,
    /// Unit that bounds the longest phase, or `latency`.
    pub bound: String,
    pub from_machine_code: bool,
    /// Bytes that must at least be read or written. `None`: not stored for this point.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<f64>,
}

impl Prediction {
    /// Creates a prediction. `phases`: duration, busy share of the busiest unit, and name of that unit.
    pub fn new<'a>(us: f64, phases: impl Iterator<Item = (f64, f64, &'a str)>, from_machine_code: bool) -> Self {
        let longest = phases.max_by(|a, b| a.0.total_cmp(&b.0));
        let bound = longest.filter(|(_, busy, _)| *busy >= BUSY).map_or("latency", |(_, _, unit)| unit);
        Self { us: (us * 100.0).round() / 100.0, bound: bound.to_owned(), from_machine_code, bytes: None }
    }
}

/// Returns the clock of a GPU for launches whose results are not needed.
pub fn timeline(card: &str) -> anyhow::Result<Timeline> {
    Ok(Timeline::new(Card::named(card).context("the GPU is in the model")?).without_values())
}

/// Predicts a launch of `kernel.ptx` in `folder` from the machine code that ptxas generates for the timeline's GPU.
pub fn time_launch(mut timeline: Timeline, folder: &Path, launch: &str, install: bool) -> anyhow::Result<Prediction> {
    let file = |name: &str| folder.join(name);
    let mut ptxas = Command::new(PTXAS.find(install)?);
    ptxas
        .args(["-lineinfo", "--gpu-name", timeline.card().arch, "-o"])
        .arg(file("kernel.cubin"))
        .arg(file("kernel.ptx"));
    tools::output(&mut ptxas)?;
    let mut nvdisasm = Command::new(NVDISASM.find(install)?);
    let (listing, _) = tools::output(nvdisasm.args(["-gp", "-hex", "-c"]).arg(file("kernel.cubin")))?;
    timeline.add_listing(Listing::parse(&listing).into());
    LaunchFile::parse(launch)?.prepare(folder)?.time(&mut timeline)?;
    let launch = timeline.launches().first().context("the launch file starts no launch")?;
    let phases = launch.phases.iter().map(|phase| (phase.to_us - phase.from_us, phase.busy, phase.unit));
    Ok(Prediction::new(timeline.predicted_us(), phases, launch.from_machine_code))
}

/// Returns the name of the point of a variant of the B200's kernel on a shape.
pub fn name_of_b200(variant: &str, shape: &str) -> String {
    let words = [UNMEASURED, variant, shape].into_iter().filter(|word| !word.is_empty());
    words.collect::<Vec<_>>().join(" ")
}

/// Returns the stored prediction of the B200's default variant on a shape.
pub fn kept_of_b200<'a>(kept: &'a BTreeMap<String, Prediction>, shape: &str) -> Option<&'a Prediction> {
    kept.get(&name_of_b200("", shape))
}
