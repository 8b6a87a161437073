//! Report of `nvfp4 run`, as text or as JSON.

use std::io::Write;
use std::time::Duration;

use nvfp4::backend::{Backend, Layer, emulated};
use nvfp4::checkpoint::LayerTensors;
use nvfp4::compare::{Comparison, Tolerance};
use nvfp4::plan::roofline::Roofline;
use nvfp4::printable;
use nvfp4::problem::{Group, GroupedProblem, TokenFormat};
use serde_json::json;

use super::args::{Args, Verify};
use super::tensors;
use crate::cli::table;

/// A run: its inputs, times and comparison.
pub struct Report<'a> {
    pub args: &'a Args,
    pub shape: String,
    pub input: String,
    /// Modules of the weights. Empty: the weights do not come from a checkpoint.
    pub modules: Vec<String>,
    /// Tensors of the layer that were used and left, from a checkpoint.
    pub tensors: Option<LayerTensors>,
    pub problem: &'a GroupedProblem,
    pub backend: &'a dyn Backend,
    pub layer: &'a dyn Layer,
    pub min: Duration,
    pub median: Duration,
    /// Median time to queue a run. `None`: the backend queues nothing.
    pub host: Option<Duration>,
    pub comparison: Option<Comparison>,
}

impl Report<'_> {
    /// `true` if every element was checked and is right.
    fn verified(&self) -> bool {
        self.args.verify == Verify::Full && self.comparison.is_some_and(|comparison| comparison.passed())
    }

    /// Returns the report as one JSON object.
    pub fn json(&self) -> serde_json::Value {
        let work = Roofline::new(self.problem);
        let seconds = self.median.as_secs_f64();
        let groups: Vec<_> =
            self.problem.groups().iter().map(|group| json!({"m": group.m, "n": group.n, "k": group.k})).collect();
        // No rates for the emulator: they would be mistaken for the device's.
        let rate = |amount: f64| self.layer.counters().is_none().then_some(amount / seconds);
        let mut report = json!({
            "op": self.problem.op(),
            "backend": self.backend.name(),
            "kernel": self.layer.kernel(),
            "variant": self.layer.launches().map(|_| self.args.variant.to_string()),
            "device": self.backend.device(),
            "shape": self.shape,
            "input": self.input,
            "modules": self.modules,
            "tensors": tensors::json(self.tensors.as_ref()),
            "groups": groups,
            "time_us": {"min": self.min.as_secs_f64() * 1e6, "median": seconds * 1e6},
            "launches": self.layer.launches(),
            "host_us": self.host.map(|host| host.as_secs_f64() * 1e6),
            "tflops": rate(work.operations / 1e12),
            "gb_per_s": rate(work.bytes() as f64 / 1e9),
            "max_abs_err": self.comparison.map(|comparison| comparison.max_abs_err),
            "max_rel_err": self.comparison.map(|comparison| comparison.max_rel_err),
            "mismatches": self.comparison.map(|comparison| comparison.mismatches),
            "verified": self.verified(),
        });
        if let Some(counters) = self.layer.counters() {
            report["counters"] = json!(counters);
            report["useful_share"] = json!(useful_share(counters, work.operations));
        }
        if let Some(prediction) = self.backend.prediction() {
            report["predicted_us"] = json!(prediction.microseconds);
            report["prediction"] = prediction.json();
        }
        report
    }

    /// Prints the report as text.
    pub fn print(&self, out: &mut impl Write) -> std::io::Result<()> {
        let work = Roofline::new(self.problem);
        let seconds = self.median.as_secs_f64();
        writeln!(
            out,
            "{} {} · {} → {} · {} on {}, {}",
            printable(&self.shape),
            self.problem.op().name(),
            printable(&self.input),
            self.problem.out_dtype().name(),
            self.backend.name(),
            self.backend.device(),
            self.layer.kernel()
        )?;
        if !self.modules.is_empty() {
            writeln!(out, "weights   {}", printable(&self.modules.join(", ")))?;
        }
        tensors::print(self.tensors.as_ref(), out)?;
        writeln!(out, "{}", group_table(self.problem.groups()))?;
        match self.layer.counters() {
            Some(counters) => {
                writeln!(out, "variant   {}: {}", self.args.variant, launches(self.layer.launches().unwrap_or(0)))?;
                print_counters(counters, work.operations, seconds, out)?;
                if let Some(prediction) = self.backend.prediction() {
                    print_prediction(&prediction, out)?;
                }
            }
            None => {
                writeln!(
                    out,
                    "time      median {}, min {} of {}",
                    table::time(seconds),
                    table::time(self.min.as_secs_f64()),
                    self.args.runs().0
                )?;
                if let (Some(count), Some(host)) = (self.layer.launches(), self.host) {
                    let host = table::time(host.as_secs_f64());
                    writeln!(out, "variant   {}: {} per run, queued in {host}", self.args.variant, launches(count))?;
                }
                writeln!(
                    out,
                    "rate      {:.3} TFLOP/s, {:.2} GB/s",
                    work.operations / seconds / 1e12,
                    work.bytes() as f64 / seconds / 1e9
                )?;
            }
        }
        if let Some(peaks) = self.backend.peaks() {
            let share = work.seconds(peaks) / seconds;
            writeln!(
                out,
                "roofline  {:.0} % of the device's peak: {} at {:.1} GB/s and {:.2} TFLOP/s{}",
                100.0 * share,
                table::time(work.seconds(peaks)),
                peaks.bytes_per_second / 1e9,
                peaks.ops_per_second / 1e12,
                if share > 1.0 { "; data this small stays in caches" } else { "" }
            )?;
        }
        let Some(comparison) = &self.comparison else {
            writeln!(out, "verified  no: not checked")?;
            return Ok(());
        };
        writeln!(
            out,
            "error     at most {:.2e} absolute, {:.2e} relative",
            comparison.max_abs_err, comparison.max_rel_err
        )?;
        let Tolerance { absolute, relative } = Tolerance::of(self.problem.out_dtype());
        let rounds = self.args.variant.schedule.rounds_gate_and_up();
        let more = if rounds { " + the effect of rounding gate and up" } else { "" };
        let bound = format!("within {absolute} + {relative}·|x|{more} of the exact reference");
        let checked = table::thousands(comparison.checked);
        match (comparison.first, self.args.verify) {
            (Some(first), _) => {
                let wrong = table::thousands(comparison.mismatches);
                writeln!(out, "verified  NO: {wrong} of {checked} elements are wrong; the first: {first}")
            }
            (None, Verify::Full) => writeln!(out, "verified  yes: all {checked} elements {bound}"),
            (None, _) => {
                writeln!(out, "verified  no: only a sample of {checked} elements was checked; all are {bound}")
            }
        }
    }
}

/// Prints the predicted time and its breakdown.
pub fn print_prediction(prediction: &emulated::Prediction, out: &mut impl Write) -> std::io::Result<()> {
    let note = if prediction.without_machine_code() > 0 { format!("; {}", prediction.note()) } else { String::new() };
    writeln!(
        out,
        "predicted {:.2} µs on {}, by the model, not measured{note}",
        prediction.microseconds, prediction.card.name
    )?;
    prediction.launches.iter().try_for_each(|launch| write!(out, "{launch}"))
}

/// Formats a number of tokens and the format in which they are multiplied, unless it is their 16-bit type.
pub fn tokens_of(format: TokenFormat, count: usize) -> String {
    let kind = match format {
        TokenFormat::Bits16 => "",
        TokenFormat::Fp8 => "FP8 ",
        TokenFormat::Nvfp4 => "NVFP4 ",
    };
    format!("{} {kind}tokens", table::thousands(count))
}

pub fn launches(count: usize) -> String {
    if count == 1 { "1 launch".into() } else { format!("{count} launches") }
}

/// Useful share of the multiply-adds on tensor cores. `None`: the tensor cores are not used.
fn useful_share(counters: &emulated::Counters, operations: f64) -> Option<f64> {
    let useful = (operations / 2.0) as u64;
    (counters.total.matrix_multiply_adds > 0).then(|| counters.useful_share(useful))
}

/// Prints the counters of an emulated kernel. Rates are omitted, because the time is the emulator's.
pub fn print_counters(
    counters: &emulated::Counters,
    operations: f64,
    seconds: f64,
    out: &mut impl Write,
) -> std::io::Result<()> {
    let total = &counters.total;
    let number = |count: u64| table::thousands(count as usize);
    let bytes = |count: u64| table::bytes(count as f64);
    writeln!(
        out,
        "executed  {} thread instructions, {} warp instructions, {} CTAs; no fault",
        number(total.thread_instructions),
        number(total.warp_instructions),
        number(counters.ctas)
    )?;
    let loaded = |name| {
        let buffers = counters.buffers_named(name);
        bytes(buffers.loaded + buffers.bulk_loaded)
    };
    writeln!(
        out,
        "global    {} of weights and {} of tokens loaded, {} distinct; {} stored",
        loaded(emulated::WEIGHTS),
        loaded(emulated::TOKENS),
        bytes(counters.dram_read_bytes),
        bytes(total.bytes.global_store + total.bulk.global_store)
    )?;
    writeln!(
        out,
        "shared    {} loaded, {} stored, {} extra cycles from bank conflicts",
        bytes(total.bytes.shared_load),
        bytes(total.bytes.shared_store),
        number(total.bank_conflicts)
    )?;
    if let Some(useful) = useful_share(counters, operations) {
        writeln!(
            out,
            "matrix    {} multiply-adds, {:.1} % useful",
            number(total.matrix_multiply_adds),
            100.0 * useful
        )?;
    }
    if total.loads.phases > 0 {
        writeln!(
            out,
            "pipeline  {:.1} % of {} loads beside matrix operations, on average {:.1} operations ahead of use",
            100.0 * total.loads.overlap(),
            number(total.loads.phases),
            total.loads.mean_distance()
        )?;
    }
    let waits: Vec<_> =
        counters.roles.iter().map(|role| format!("{:.0}", 100.0 * counters.waiting_share(role))).collect();
    writeln!(out, "waiting   {} % of the emulated time, by warp", waits.join(", "))?;
    writeln!(out, "time      {} to emulate; not a GPU's time", table::time(seconds))
}

/// Returns the table of groups. Consecutive groups of equal size share a row.
fn group_table(groups: &[Group]) -> comfy_table::Table {
    let mut rows = table::table(&["group", "M", "N", "K"], 1);
    let mut first = 0;
    for equal in groups.chunk_by(|a, b| a == b) {
        let last = first + equal.len() - 1;
        let name = if first == last { first.to_string() } else { format!("{first}–{last}") };
        rows.add_row([name, equal[0].m.to_string(), equal[0].n.to_string(), equal[0].k.to_string()]);
        first = last + 1;
    }
    rows
}
