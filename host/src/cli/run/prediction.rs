//! Additional results of `nvfp4 run --timed`: a trace, and the sensitivity of the prediction to assumed constants.

use std::io::Write;

use anyhow::Context;
use nvfp4::backend::Backend;
use nvfp4::backend::emulated::{Emulated, Key, Origin, Prediction, trace};
use serde_json::{Value, json};

use super::args::Args;
use super::emulated_gpu;

/// Writes the trace if --trace is given.
pub fn write(args: &Args, prediction: &Prediction) -> anyhow::Result<()> {
    let Some(path) = &args.trace else { return Ok(()) };
    let events = trace::events(&prediction.spans, prediction.card.get(Key::Clock));
    std::fs::write(path, events.to_string()).with_context(|| format!("cannot write {}", path.display()))
}

/// Change of a prediction with an assumed constant.
struct Change {
    key: Key,
    value: f64,
    /// Changes in percent with the constant halved and doubled.
    halved: f64,
    doubled: f64,
}

/// Changes of a prediction with the GPU's constants that are neither measured nor published.
pub struct Sensitivity {
    before: f64,
    changes: Vec<Change>,
}

impl Sensitivity {
    /// Predicts again with each assumed constant halved and doubled, if --sensitivity is given. `run` runs the step on
    /// a GPU.
    pub fn new(args: &Args, run: impl Fn(&Emulated) -> anyhow::Result<()>) -> anyhow::Result<Option<Self>> {
        let Some(card) = args.card()?.filter(|_| args.sensitivity) else { return Ok(None) };
        let gpu = emulated_gpu::untimed(args)?;
        let predict = |card| -> anyhow::Result<f64> {
            let gpu = emulated_gpu::by_clock(args, gpu.clone(), card, false);
            run(&gpu)?;
            Ok(gpu.prediction().map_or(0.0, |prediction| prediction.microseconds))
        };
        let before = predict(card.clone())?;
        let assumed = Key::ALL.iter().filter(|key| matches!(card.constant(**key).origin, Origin::Assumed(_)));
        let change = |&key: &Key| {
            let percent = |factor| Ok::<_, anyhow::Error>(100.0 * (predict(card.scaled(key, factor))? / before - 1.0));
            Ok(Change { key, value: card.get(key), halved: percent(0.5)?, doubled: percent(2.0)? })
        };
        Ok(Some(Self { before, changes: assumed.map(change).collect::<anyhow::Result<_>>()? }))
    }

    /// Returns an object with an entry per constant.
    pub fn json(&self) -> Value {
        let change = |Change { key, value, halved, doubled }: &Change| {
            let unit = key.unit();
            (
                key.name().to_owned(),
                json!({"value": value, "unit": unit, "halved_percent": halved, "doubled_percent": doubled}),
            )
        };
        Value::Object(self.changes.iter().map(change).collect())
    }

    pub fn print(&self, out: &mut impl Write) -> std::io::Result<()> {
        writeln!(out, "sensitivity to assumed constants, in % of {:.2} µs:", self.before)?;
        self.changes.iter().try_for_each(|Change { key, value, halved, doubled }| {
            let (name, unit) = (key.name(), key.unit());
            writeln!(out, "  {name:18} {value:6} {unit:12} halved {halved:+6.1}, doubled {doubled:+6.1}")
        })
    }
}

/// Prints a report as one JSON object or as text, followed by the sensitivity of its prediction.
pub fn print<W: Write>(
    args: &Args,
    mut json: Value,
    text: impl Fn(&mut W) -> std::io::Result<()>,
    sensitivity: Option<&Sensitivity>,
    out: &mut W,
) -> std::io::Result<()> {
    if args.json {
        if let Some(sensitivity) = sensitivity {
            json["sensitivity"] = sensitivity.json();
        }
        return writeln!(out, "{json}");
    }
    text(out)?;
    sensitivity.map_or(Ok(()), |sensitivity| sensitivity.print(out))
}
