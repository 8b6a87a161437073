//! Predictions of kernels that Triton compiles: a rival with `tl.dot_scaled` for a B200, and measured tilings of the
//! Hopper benchmark's peer.
//!
//! Scripts in `benches/` hold the kernels. Triton compiles them to PTX without a GPU, and the scripts write launch
//! files.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Context;
use ptx_emulator::Timeline;

use super::prediction::{H100, Prediction, SAMPLE, UNMEASURED, kept_of_b200, time_launch, timeline};
use crate::{
    table::{Table, geomean},
    tools, workspace,
};

/// Script of the rival's kernel, and the shapes that it is predicted on.
const RIVAL: &str = "benches/blackwell/triton_dot_scaled.py";
#[rustfmt::skip] // One kind of shape per line.
pub const SHAPES: [&str; 12] = [
    "dual-1", "dual-2", "dual-3", "dual-4",
    "group-1", "group-2", "group-3", "group-4",
    "moe-1", "moe-2", "moe-3", "moe-4",
];

/// Script of the peer's kernel, and its measurements.
const PEER: &str = "benches/hopper/triton_decode_kernel.py";
pub const MEASURED: &str = "benches/lab/h100-triton.json";

/// A tiling of the peer's kernel on a shape.
pub struct Tile {
    pub shape: String,
    pub tiling: String,
}

impl Tile {
    /// Predicts the tiling for the GPU that it was measured on.
    pub fn predict(&self, python: &Path, install: bool) -> anyhow::Result<Prediction> {
        let folder = tempfile::tempdir()?;
        write(python, PEER, &self.shape, folder.path())?;
        predict(timeline(H100)?.sampled(SAMPLE), &folder.path().join(&self.tiling), install)
    }
}

/// Name of the rival's prediction on a shape, without the tiling that follows it.
pub fn point(shape: &str) -> String {
    format!("Triton {shape}")
}

/// Returns the tiling in the name of a prediction. `None`: the prediction is not the rival's on this shape.
pub fn tiling<'a>(name: &'a str, shape: &str) -> Option<&'a str> {
    name.strip_prefix(&point(shape))?.strip_prefix(' ')
}

/// Predicts every tiling of the rival on a shape and returns the fastest, as a user's tuning would find it.
pub fn fastest(python: &Path, shape: &str, install: bool) -> anyhow::Result<(String, Prediction)> {
    let folder = tempfile::tempdir()?;
    write(python, RIVAL, shape, folder.path())?;
    let mut predictions = Vec::new();
    for tiling in folder.path().read_dir()? {
        let tiling = tiling?;
        let prediction = predict(timeline(UNMEASURED)?, &tiling.path(), install)?;
        predictions.push((tiling.file_name().to_string_lossy().into_owned(), prediction));
    }
    let fastest = predictions.into_iter().min_by(|a, b| a.1.us.total_cmp(&b.1.us));
    fastest.with_context(|| format!("{RIVAL} wrote no tiling"))
}

/// Runs a script that writes its launch files for a shape, one folder per tiling.
fn write(python: &Path, script: &str, shape: &str, folder: &Path) -> anyhow::Result<()> {
    let script: PathBuf = workspace::root().join(script);
    tools::output(Command::new(python).arg(script).arg(folder).arg(shape))?;
    Ok(())
}

fn predict(timeline: Timeline, folder: &Path, install: bool) -> anyhow::Result<Prediction> {
    let launch = fs::read_to_string(folder.join("launch.json"))?;
    time_launch(timeline, folder, &launch, install)
}

/// The rival's prediction on a shape of the B200, beside the time of `gated_sm100`.
pub struct Compared<'a> {
    pub shape: &'static str,
    tiling: &'a str,
    rival: &'a Prediction,
    own_us: f64,
}

impl Compared<'_> {
    /// Ratio of the rival's time to the time of `gated_sm100`.
    pub fn ratio(&self) -> f64 {
        self.rival.us / self.own_us
    }
}

/// Returns the shapes with a prediction of the rival.
pub fn compared(kept: &BTreeMap<String, Prediction>) -> Vec<Compared<'_>> {
    let of_shape = SHAPES.into_iter().filter_map(|shape| {
        let (name, rival) = kept.iter().find(|(name, _)| tiling(name, shape).is_some())?;
        Some(Compared { shape, tiling: tiling(name, shape)?, rival, own_us: kept_of_b200(kept, shape)?.us })
    });
    of_shape.collect()
}

/// Renders the rival's section of the page.
pub fn page(kept: &BTreeMap<String, Prediction>) -> anyhow::Result<String> {
    let mut text = "\n## Triton's `tl.dot_scaled` on the model's B200\n\nAn earlier attempt ([experiments.md](experiments.md)) rejected Triton \
                    because it had no NVFP4 MMA. Triton 3.9.0 has one: \
                    [benches/blackwell/triton_dot_scaled.py](../blackwell/triton_dot_scaled.py), written for this \
                    comparison, compiles to block-scaled `tcgen05.mma`, with scales copied by `tcgen05.cp`. Its results are correct in the \
                    emulator. The table has the fastest of ten tilings: tokens × rows of weights × elements of K, stages, and whether warps \
                    have roles. Times are modeled, not measured.\n\n"
        .to_owned();
    let mut table = Table::new(2, &["shape", "tiling", "Triton us", "gated_sm100 us", "times as long", "bound by"]);
    let compared = compared(kept);
    for row in &compared {
        let [rival, own] = [row.rival.us, row.own_us].map(|us| format!("{us:.1}"));
        let ratio = format!("{:.2}", row.ratio());
        table.row([row.shape.to_owned(), row.tiling.to_owned(), rival, own, ratio, row.rival.bound.clone()]);
    }
    text += &table.to_string();
    if !compared.is_empty() {
        let mean = geomean(compared.iter().map(Compared::ratio));
        text += &format!("\nTriton takes {mean:.2} times as long on the geometric mean.\n");
    }
    Ok(text)
}
