//! Report of `nvfp4 run`, as text or as JSON, of any operation.

use std::io::Write;
use std::time::Duration;

use nvfp4::backend::{Backend, Layer, Operation, emulated};
use nvfp4::plan::roofline::{Peaks, Roofline};
use nvfp4::printable;
use nvfp4::problem::TokenFormat;
use serde_json::{Map, Value, json};

use super::args::{Args, Verify};
use super::job::{About, Compared, Findings};
use crate::cli::table;

/// A run: its job, times and comparison.
pub struct Report<'a, O: Operation> {
    pub args: &'a Args,
    pub about: About,
    pub backend: &'a dyn Backend,
    pub layer: &'a dyn Layer<O>,
    pub min: Duration,
    pub median: Duration,
    /// Median time to queue a run. `None`: the backend queues nothing.
    pub host: Option<Duration>,
    pub compared: Compared,
    /// Whether the outputs of all runs equal the first run's bit for bit.
    pub same_bits: bool,
}

impl<O: Operation> Report<'_, O> {
    /// `true` if a compared element is wrong, or runs differ.
    pub fn is_wrong(&self) -> bool {
        self.compared.findings.as_ref().is_some_and(|found| found.mismatches > 0) || !self.same_bits
    }

    /// `true` if every element was compared, had a bound, and is right.
    fn verified(&self) -> bool {
        let is_bounded = self.compared.findings.as_ref().is_some_and(|found| found.unbounded == 0);
        self.args.verify == Verify::Full && is_bounded && !self.is_wrong()
    }

    /// Returns the report as one JSON object.
    pub fn json(&self) -> Value {
        let (about, seconds) = (&self.about, self.median.as_secs_f64());
        let mut report = Map::new();
        let mut add = |values: &Value| {
            report.extend(values.as_object().into_iter().flatten().map(|(key, value)| (key.clone(), value.clone())))
        };
        add(&json!({"op": about.op, "backend": self.backend.name(), "kernel": self.layer.kernel()}));
        if about.has_variants {
            add(&json!({"variant": self.layer.launches().map(|_| self.args.variant.to_string())}));
        }
        add(&json!({"device": self.backend.device(), "shape": about.shape, "input": about.input}));
        add(&about.json);
        // No rates for the emulator: they would be mistaken for the device's.
        let rate = |amount: f64| self.layer.counters().is_none().then_some(amount / seconds);
        add(&json!({
            "time_us": {"min": self.min.as_secs_f64() * 1e6, "median": seconds * 1e6},
            "launches": self.layer.launches(),
            "host_us": self.host.map(|host| host.as_secs_f64() * 1e6),
            "tflops": rate(about.operations / 1e12),
            "gb_per_s": rate(about.bytes as f64 / 1e9),
        }));
        add(&self.compared.json);
        if !about.has_variants {
            add(&json!({"same_bits": self.same_bits}));
        }
        add(&json!({"verified": self.verified()}));
        if let Some(counters) = self.layer.counters() {
            add(&json!({"counters": counters}));
            if about.has_variants {
                add(&json!({"useful_share": useful_share(counters, about.operations)}));
            }
        }
        if let Some(prediction) = self.backend.prediction() {
            add(&json!({"predicted_us": prediction.microseconds, "prediction": prediction.json()}));
        }
        Value::Object(report)
    }

    /// Prints the report as text.
    pub fn print(&self, out: &mut impl Write) -> std::io::Result<()> {
        let (about, seconds) = (&self.about, self.median.as_secs_f64());
        let (name, device, kernel) = (self.backend.name(), self.backend.device(), self.layer.kernel());
        writeln!(out, "{} {} · {name} on {device}, {kernel}", printable(&about.shape), about.title)?;
        about.lines.iter().try_for_each(|line| writeln!(out, "{line}"))?;
        match self.layer.counters() {
            Some(counters) => {
                if about.has_variants {
                    let launches = launches(self.layer.launches().unwrap_or(0));
                    writeln!(out, "variant   {}: {launches}", self.args.variant)?;
                }
                print_counters(counters, about.operations, seconds, out)?;
                if let Some(prediction) = self.backend.prediction() {
                    print_prediction(&prediction, out)?;
                }
            }
            None => self.print_times(out)?,
        }
        if let Some((roofline, peaks)) = about.roofline.as_ref().zip(self.backend.peaks()) {
            print_roofline(roofline, peaks, seconds, out)?;
        }
        match &self.compared.findings {
            None => writeln!(out, "verified  no: not checked"),
            Some(found) => {
                writeln!(out, "{}", found.text)?;
                self.print_verdict(found, out)
            }
        }
    }

    fn print_times(&self, out: &mut impl Write) -> std::io::Result<()> {
        let (about, seconds) = (&self.about, self.median.as_secs_f64());
        let (median, min) = (table::time(seconds), table::time(self.min.as_secs_f64()));
        writeln!(out, "time      median {median}, min {min} of {}", self.args.runs().0)?;
        if let (Some(count), Some(host)) = (self.layer.launches(), self.host) {
            let (launches, host) = (launches(count), table::time(host.as_secs_f64()));
            if about.has_variants {
                writeln!(out, "variant   {}: {launches} per run, queued in {host}", self.args.variant)?;
            } else {
                writeln!(out, "launches  {launches}, queued in {host}")?;
            }
        }
        if about.operations > 0.0 {
            let (tflops, gigabytes) = (about.operations / seconds / 1e12, about.bytes as f64 / seconds / 1e9);
            writeln!(out, "rate      {tflops:.3} TFLOP/s, {gigabytes:.2} GB/s")?;
        }
        Ok(())
    }

    /// Prints whether the output is right.
    fn print_verdict(&self, found: &Findings, out: &mut impl Write) -> std::io::Result<()> {
        let (checked, wrong) = (table::thousands(found.checked), table::thousands(found.mismatches));
        match (&found.first, self.args.verify) {
            (Some(first), _) => {
                writeln!(out, "verified  NO: {wrong} of {checked} elements are wrong; the first: {first}")
            }
            _ if !self.same_bits => writeln!(out, "verified  NO: the output of a run differs from the first run's"),
            _ if found.unbounded > 0 => {
                let unbounded = table::thousands(found.unbounded);
                writeln!(
                    out,
                    "verified  no: {unbounded} of {checked} elements may overflow f32 in between; the others are right"
                )
            }
            (None, Verify::Full) => writeln!(out, "verified  yes: all {checked} elements {}", found.bound),
            (None, _) => {
                let right =
                    if self.about.has_variants { format!("all are {}", found.bound) } else { "none is wrong".into() };
                writeln!(out, "verified  no: only a sample of {checked} elements was checked; {right}")
            }
        }
    }
}

/// Prints the share of the device's peak that a run of `seconds` seconds reaches.
fn print_roofline(roofline: &Roofline, peaks: Peaks, seconds: f64, out: &mut impl Write) -> std::io::Result<()> {
    let least = roofline.seconds(peaks);
    let share = least / seconds;
    writeln!(
        out,
        "roofline  {:.0} % of the device's peak: {} at {:.1} GB/s and {:.2} TFLOP/s{}",
        100.0 * share,
        table::time(least),
        peaks.bytes_per_second / 1e9,
        peaks.ops_per_second / 1e12,
        if share > 1.0 { "; data this small stays in caches" } else { "" }
    )
}

/// Prints the predicted time and its breakdown.
fn print_prediction(prediction: &emulated::Prediction, out: &mut impl Write) -> std::io::Result<()> {
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
    format!("{} {kind}token{}", table::thousands(count), if count == 1 { "" } else { "s" })
}

fn launches(count: usize) -> String {
    if count == 1 { "1 launch".into() } else { format!("{count} launches") }
}

/// Useful share of the multiply-adds on tensor cores. `None`: the tensor cores are not used.
fn useful_share(counters: &emulated::Counters, operations: f64) -> Option<f64> {
    let useful = (operations / 2.0) as u64;
    (counters.total.matrix_multiply_adds > 0).then(|| counters.useful_share(useful))
}

/// Prints the counters of an emulated kernel. Rates are omitted, because the time is the emulator's.
fn print_counters(
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
