//! What `nvfp4 run --timed` says beyond its report: a trace, and how the prediction hangs on constants that nobody has measured.

use std::io::Write;

use anyhow::Context;
use nvfp4::Output;
use nvfp4::backend::emulated::{Key, Origin, Prediction, trace};
use nvfp4::backend::{self, Backend};
use nvfp4::problem::{Step, Weights};

use super::args::Args;
use super::emulated_gpu;

/// Writes the trace that was asked for.
pub fn write(args: &Args, prediction: &Prediction) -> anyhow::Result<()> {
    let Some(path) = &args.trace else { return Ok(()) };
    let events = trace::events(&prediction.spans, prediction.card.get(Key::Clock));
    std::fs::write(path, events.to_string()).with_context(|| format!("writing {}", path.display()))
}

/// Predicts again with each assumed constant halved and doubled.
pub fn sensitivity(args: &Args, weights: &Weights<'_>, step: &Step<'_>, out: &mut impl Write) -> anyhow::Result<()> {
    let Some(card) = args.card()? else { return Ok(()) };
    let gpu = emulated_gpu::untimed(args)?;
    let predict = |card| -> anyhow::Result<f64> {
        let gpu = gpu.clone().with_clock(card, !args.no_values, false);
        let mut layer = gpu.prepare(weights)?;
        backend::run(layer.as_mut(), step, &mut Output::new(step.problem()))?;
        Ok(gpu.prediction().map_or(0.0, |prediction| prediction.microseconds))
    };
    let before = predict(card.clone())?;
    writeln!(out, "sensitivity, in % of {before:.2} µs:")?;
    for &key in Key::ALL.iter().filter(|key| matches!(card.constant(**key).origin, Origin::Assumed(_))) {
        let change = |factor| Ok::<_, anyhow::Error>(100.0 * (predict(card.scaled(key, factor))? / before - 1.0));
        let (halved, doubled) = (change(0.5)?, change(2.0)?);
        let (name, value, unit) = (key.name(), card.get(key), key.unit());
        writeln!(out, "  {name:18} {value:6} {unit:12} halved {halved:+6.1}, doubled {doubled:+6.1}")?;
    }
    Ok(())
}
