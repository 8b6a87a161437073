//! Runs `nvfp4 run --backend emulated` and keeps the counters that the documents show.
//!
//! Every kept number is an integer that the `fair` schedule reproduces exactly for the same PTX. The command is run
//! because it is rebuilt with every kernel; xtask need not be.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, ensure};
use nvfp4::shape::Shape;
use serde::{Deserialize, Serialize};

use crate::{tools, work, workspace};

/// Allowed difference of shares, and relative difference of counts, from the recorded ones.
const DRIFT: f64 = 0.05;

/// A run in the emulator: its arguments and its counters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    pub arch: String,
    pub shape: String,
    /// Variant as `--variant` takes it. Empty: the default variant.
    pub variant: String,
    /// Names of the entries that ran.
    pub entry: String,
    pub launches: u64,
    pub ctas: u64,
    pub shared_bytes: u64,
    pub tmem_columns: u64,
    /// Bytes of weights read by bulk copies, and by other loads.
    pub weights: [u64; 2],
    /// Bytes of tokens read by bulk copies, and by other loads.
    pub tokens: [u64; 2],
    /// Number of bytes of intermediate results that a later launch reads: by bulk copies, and by other loads.
    pub intermediate: [u64; 2],
    /// Bytes of the output written by bulk copies, and by other stores.
    pub output: [u64; 2],
    /// Distinct bytes of global memory read, and written.
    pub distinct: [u64; 2],
    pub multiply_adds: u64,
    pub bank_conflicts: u64,
    /// Number of warp instructions of all warps.
    pub warp_instructions: u64,
    /// Number of loads that a warp waited for, number of these beside matrix operations, and number of those
    /// operations.
    pub loads: [u64; 3],
    /// Emulator steps, summed over CTAs.
    pub steps: u64,
    /// Number of steps during which a warp waited, by the warp's index in the CTA.
    pub waited: Vec<u64>,
}

impl Run {
    /// Maximum tokens of a tile, from the entry's name: `gated_sm100_t64`, `gated_sm90_t64`. `None`: the name has no
    /// tile size.
    pub fn tile_tokens(&self) -> Option<usize> {
        let words = self.entry.split([',', '_']);
        words.skip(2).find_map(|word| word.trim_start_matches('t').parse().ok())
    }

    /// Share of the multiply-adds that contribute to an element of the output of `shape`.
    pub fn useful(&self, shape: &Shape) -> f64 {
        work::multiply_adds(shape) as f64 / self.multiply_adds as f64
    }

    /// Share of loads that ran beside matrix operations.
    pub fn overlap(&self) -> f64 {
        self.loads[1] as f64 / self.loads[0].max(1) as f64
    }

    /// Average number of matrix operations between a load's request and its use.
    pub fn ahead(&self) -> f64 {
        self.loads[2] as f64 / self.loads[0].max(1) as f64
    }

    /// Whether two runs counted the same. Counts that the plan decides must be equal. Counts that depend on the
    /// compiler's instruction order may differ by [`DRIFT`].
    pub fn agrees(&self, other: &Self) -> bool {
        let planned = |run: &Self| Self {
            warp_instructions: 0,
            loads: [run.loads[0], 0, 0],
            steps: 0,
            waited: vec![0; run.waited.len()],
            ..run.clone()
        };
        let near = |a: f64, b: f64, scale: f64| (a - b).abs() <= DRIFT * scale;
        let one_load = self.loads[1].abs_diff(other.loads[1]) <= 1;
        planned(self) == planned(other)
            && near(self.warp_instructions as f64, other.warp_instructions as f64, other.warp_instructions as f64)
            && (one_load || near(self.overlap(), other.overlap(), 1.0))
            && (one_load || near(self.ahead(), other.ahead(), other.ahead()))
            && self.waiting().zip(other.waiting()).all(|(a, b)| near(a, b, 1.0))
    }

    /// Share of the steps during which each warp waited.
    pub fn waiting(&self) -> impl Iterator<Item = f64> {
        self.waited.iter().map(|&steps| steps as f64 / self.steps.max(1) as f64)
    }
}

/// Path of the command `nvfp4`.
pub struct Nvfp4(PathBuf);

impl Nvfp4 {
    /// Builds the command with the profile of the tests, which optimizes the emulator too.
    pub fn build() -> anyhow::Result<Self> {
        let mut cargo = Command::new(env!("CARGO"));
        let status = cargo.current_dir(workspace::root()).args(["build", "--bin", "nvfp4"]).status();
        ensure!(status.context("cannot run cargo")?.success(), "cannot build nvfp4");
        Ok(Self(workspace::target_dir().join("debug/nvfp4")))
    }

    /// A given command, or the built one.
    pub fn given_or_built(given: Option<&Path>) -> anyhow::Result<Self> {
        given.map_or_else(Self::build, |path| Ok(Self(path.to_owned())))
    }

    /// Path of the command.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Runs a shape on the `fair` schedule with the sanitizer, and checks every element against the oracle.
    pub fn run(&self, arch: &str, shape: &str, variant: &str) -> anyhow::Result<Run> {
        let mut command = Command::new(&self.0);
        command.args(["run", "--backend", "emulated", "--schedule", "fair", "--json"]);
        command.args(["--arch", arch, "--shape", shape]);
        if !variant.is_empty() {
            command.args(["--variant", variant]);
        }
        let (json, _) =
            tools::output(&mut command).with_context(|| format!("{shape} on {arch}, variant {variant:?}"))?;
        let Printed { launches, counters, verified } =
            serde_json::from_str(&json).context("cannot parse the JSON output of nvfp4")?;
        ensure!(verified, "{shape} on {arch}, variant {variant:?}: the output is wrong");
        let Counters { kernel, ctas, cta_steps, total, roles, buffers, .. } = counters;
        let sum = |name: &str, bytes: fn(&Buffer) -> [u64; 2]| {
            let named = buffers.iter().filter(|buffer| buffer.name.as_deref() == Some(name)).map(bytes);
            named.fold([0; 2], |sum, bytes| [sum[0] + bytes[0], sum[1] + bytes[1]])
        };
        let loaded = |name| sum(name, |buffer| [buffer.bulk_loaded, buffer.loaded]);
        Ok(Run {
            arch: arch.to_owned(),
            shape: shape.to_owned(),
            variant: variant.to_owned(),
            entry: kernel,
            launches,
            ctas,
            shared_bytes: counters.shared_bytes,
            tmem_columns: counters.peak_tmem_columns,
            weights: loaded("weights"),
            tokens: loaded("tokens"),
            intermediate: loaded("intermediate"),
            output: sum("output", |buffer| [buffer.bulk_stored, buffer.stored]),
            distinct: [counters.dram_read_bytes, counters.dram_write_bytes],
            multiply_adds: total.matrix_multiply_adds,
            bank_conflicts: total.bank_conflicts,
            warp_instructions: total.warp_instructions,
            loads: [total.loads.phases, total.loads.overlapped, total.loads.matrix_operations],
            steps: cta_steps,
            waited: roles.iter().map(|role| role.waited_steps).collect(),
        })
    }
}

/// The part of `nvfp4 run --json` that is read.
#[derive(Deserialize)]
struct Printed {
    launches: u64,
    counters: Counters,
    verified: bool,
}

#[derive(Deserialize)]
struct Counters {
    kernel: String,
    ctas: u64,
    cta_steps: u64,
    total: Role,
    roles: Vec<Role>,
    buffers: Vec<Buffer>,
    dram_read_bytes: u64,
    dram_write_bytes: u64,
    shared_bytes: u64,
    peak_tmem_columns: u64,
}

#[derive(Deserialize)]
struct Role {
    warp_instructions: u64,
    waited_steps: u64,
    bank_conflicts: u64,
    matrix_multiply_adds: u64,
    loads: Loads,
}

#[derive(Deserialize)]
struct Loads {
    phases: u64,
    overlapped: u64,
    matrix_operations: u64,
}

#[derive(Deserialize)]
struct Buffer {
    name: Option<String>,
    loaded: u64,
    stored: u64,
    bulk_loaded: u64,
    bulk_stored: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_agree_despite_moved_instructions() {
        let kept = Run {
            arch: "sm_100f".into(),
            shape: "moe-1".into(),
            variant: String::new(),
            entry: "gated_sm100_t64_s1".into(),
            launches: 1,
            ctas: 148,
            shared_bytes: 1,
            tmem_columns: 512,
            weights: [1000, 0],
            tokens: [10, 0],
            intermediate: [0; 2],
            output: [0, 7],
            distinct: [1, 2],
            multiply_adds: 5,
            bank_conflicts: 0,
            warp_instructions: 1000,
            loads: [100, 90, 1800],
            steps: 1000,
            waited: vec![500, 20],
        };
        assert_eq!(kept.tile_tokens(), Some(64));
        assert!(kept.agrees(&kept));
        assert!(kept.agrees(&Run { warp_instructions: 1040, steps: 1030, loads: [100, 91, 1830], ..kept.clone() }));
        for other in [
            Run { weights: [1001, 0], ..kept.clone() },
            Run { multiply_adds: 6, ..kept.clone() },
            Run { launches: 2, ..kept.clone() },
            Run { loads: [101, 90, 1800], ..kept.clone() },
            Run { loads: [100, 0, 0], ..kept.clone() },
            Run { waited: vec![500, 90], ..kept.clone() },
            Run { warp_instructions: 1100, ..kept.clone() },
        ] {
            assert!(!kept.agrees(&other), "{other:?}");
        }
    }
}
