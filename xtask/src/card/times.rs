//! Measured times of a GPU: what a result file holds, and the report of it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::table::Table;

/// Prefix of the names of result files.
pub const PREFIX: &str = "card-";

/// Launch schedules that are timed beside a kernel's instances. Empty: the default.
pub const SCHEDULES: [&str; 5] = ["", "per-group", "streams=8", "graph", "unfused"];

/// Times of a GPU, as stored in `benches/lab/measurements`.
#[derive(Debug, Serialize, Deserialize)]
pub struct Times {
    pub conditions: BTreeMap<String, String>,
    pub rounds: usize,
    pub runs: usize,
    pub shapes: BTreeMap<String, OnShape>,
    /// Median times of MoE and linear layers by `nvfp4 run`. Operands of the previous run are in the L2 cache.
    pub layers_us: BTreeMap<String, f64>,
}

/// A shape with the times of all contenders.
#[derive(Debug, Serialize, Deserialize)]
pub struct OnShape {
    pub op: String,
    pub bytes: u64,
    pub operations: f64,
    pub us: BTreeMap<String, Time>,
    /// Contenders without a time, with the reason.
    pub missing: BTreeMap<String, String>,
}

/// Statistics of a contender's runs, in µs.
#[derive(Debug, Serialize, Deserialize)]
pub struct Time {
    pub median: f64,
    pub p10: f64,
    pub p90: f64,
    pub runs: usize,
}

impl Time {
    pub fn of(mut us: Vec<f64>) -> Self {
        us.sort_by(f64::total_cmp);
        let at = |share: f64| us[((us.len() - 1) as f64 * share).round() as usize];
        Self { median: at(0.5), p10: at(0.1), p90: at(0.9), runs: us.len() }
    }
}

impl Times {
    /// Returns a row per shape and kernel: the time of the default variant, and the fastest instance.
    pub fn rows(&self) -> Vec<Row<'_>> {
        let mut rows = Vec::new();
        for (shape, on) in &self.shapes {
            let kernels = on.us.keys().filter(|name| !name.contains(','));
            for kernel in kernels {
                let own = |name: &&String| {
                    let word = name.strip_prefix(kernel.as_str()).and_then(|rest| rest.strip_prefix(','));
                    word.is_some_and(|word| !SCHEDULES.contains(&word))
                };
                let fastest = on.us.keys().filter(own).min_by(|a, b| on.us[*a].median.total_cmp(&on.us[*b].median));
                let Some(fastest) = fastest else { continue };
                rows.push(Row { shape, kernel, unasked: on.us[kernel].median, fastest, us: on.us[fastest].median });
            }
        }
        rows
    }

    /// Renders the times as tables for `benches/lab/experiments.md`.
    pub fn report(&self) -> String {
        let conditions = &self.conditions;
        let of = |name: &str| conditions.get(name).map_or("", |text| text);
        let mut table = Table::new(2, &["shape", "kernel", "default, µs", "TFLOP/s", "TB/s", "fastest instance", "µs"]);
        for Row { shape, kernel, unasked, fastest, us } in self.rows() {
            let (seconds, on) = (unasked * 1e-6, &self.shapes[shape]);
            table.push(vec![
                shape.to_owned(),
                kernel.to_owned(),
                format!("{unasked:.1}"),
                format!("{:.0}", on.operations / seconds / 1e12),
                format!("{:.2}", on.bytes as f64 / seconds / 1e12),
                instance(fastest).to_owned(),
                format!("{us:.1}"),
            ]);
        }
        let mut text = format!(
            "{}; {}; {}; medians of {} × {} runs\n\n{table}",
            of("gpu"),
            of("date"),
            of("note"),
            self.rounds,
            self.runs
        );
        if !self.layers_us.is_empty() {
            let mut table = Table::new(1, &["layer", "µs, operands in L2"]);
            self.layers_us.iter().for_each(|(name, us)| table.row([name.clone(), format!("{us:.1}")]));
            text += &format!("\n{table}");
        }
        for (shape, on) in &self.shapes {
            on.missing.iter().for_each(|(name, why)| text += &format!("\n{shape}: {name} not measured: {why}"));
        }
        text.trim_end().to_owned() + "\n"
    }
}

/// The default variant of a kernel on a shape beside its fastest instance.
pub struct Row<'t> {
    pub shape: &'t str,
    pub kernel: &'t str,
    /// Time of the default variant in µs.
    pub unasked: f64,
    /// The fastest instance that was timed by name.
    pub fastest: &'t str,
    pub us: f64,
}

/// Returns the instance of a variant `kernel,instance`.
pub fn instance(variant: &str) -> &str {
    variant.split_once(',').map_or(variant, |(_, instance)| instance)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_taken_of_sorted_times() {
        let Time { median, p10, p90, runs } = Time::of((0..=10).rev().map(f64::from).collect());
        assert_eq!((median, p10, p90, runs), (5.0, 1.0, 9.0, 11));
    }
}
