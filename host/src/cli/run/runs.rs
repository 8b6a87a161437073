//! Runs a job on a backend, compares its output, and prints the report.

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use nvfp4::Error;
use nvfp4::backend::{self, Backend, Layer, Operation, cpu::Cpu};
use nvfp4::checkpoint::{Checkpoint, OutputFile};
use nvfp4::kernels::explain::PlannedLaunch;

use super::args::{Args, Choice};
use super::job::Job;
use super::prediction::{self, Sensitivity};
use super::report::Report;
use crate::cli::exit;
use crate::cli::explain::{self, LEGEND, On};
use crate::cli::progress::Progress;

/// Runs the job, writes a right output to `file`, and prints the report. The files of `checkpoint` must not have changed
/// before results are reported.
pub fn compute<J: Job>(
    args: &Args,
    job: &J,
    mut backend: Box<dyn Backend>,
    checkpoint: Option<&Checkpoint>,
    file: Option<OutputFile>,
    out: &mut impl Write,
) -> anyhow::Result<ExitCode> {
    let about = job.about();
    let plan = plan(args, job, backend.as_ref())?;
    if let Some(plan) = plan.as_deref().filter(|_| !args.json) {
        writeln!(out, "{}\n\n{LEGEND}\n", explain::rows(plan))?;
    }
    let mut layer = prepare::<J::Op>(args, &mut backend, about.has_variants, job.weights())?;
    let Runs { times, host_times, output, same_bits } = Runs::new(args, job, layer.as_mut())?;
    let compared = job.compare(args, &output);
    checkpoint.map_or(Ok(()), Checkpoint::check_unchanged)?;
    if let Some(prediction) = backend.prediction() {
        prediction::write(args, &prediction)?;
    }
    let report = Report {
        args,
        about,
        backend: backend.as_ref(),
        layer: layer.as_ref(),
        min: times[0],
        median: times[times.len() / 2],
        host: host_times.get(host_times.len() / 2).copied(),
        compared,
        same_bits,
    };
    let is_wrong = report.is_wrong();
    // Written before the report: if the reader of the report is gone, printing ends the command.
    let written = file.filter(|_| !is_wrong).map_or(Ok(()), |file| job.write(file, &output));
    let sensitivity = Sensitivity::new(args, |gpu| {
        let mut layer = J::Op::prepare(gpu, job.weights())?;
        backend::run(layer.as_mut(), job.step(), &mut J::Op::output(job.step()))?;
        Ok(())
    })?;
    let mut json = report.json();
    if let Some(plan) = &plan {
        json["plan"] = explain::values(plan).into();
    }
    prediction::print(args, json, |out| report.print(out), sensitivity.as_ref(), out)?;
    written?;
    Ok(if is_wrong { ExitCode::from(exit::WRONG) } else { ExitCode::SUCCESS })
}

/// Returns the launches of the step that --explain asks for.
fn plan<J: Job>(args: &Args, job: &J, backend: &dyn Backend) -> anyhow::Result<Option<Vec<PlannedLaunch>>> {
    if !args.explain {
        return Ok(None);
    }
    let Some((capability, sms)) = backend.gpu() else {
        bail!(
            "--explain needs a GPU, because the CPU has no launches; add --backend cuda, or --backend emulated --arch sm_90a"
        );
    };
    Ok(Some(job.explain(On { name: &backend.device(), capability, sms })?))
}

/// Prepares a layer on the backend. If --backend did not choose one, the CPU takes its place for a layer that the backend
/// does not compute.
///
/// # Errors
/// Returns an error if no backend that may be used computes the layer.
pub fn prepare<'w, O: Operation>(
    args: &Args,
    backend: &mut Box<dyn Backend>,
    has_variants: bool,
    weights: &O::Weights<'w>,
) -> Result<Box<dyn Layer<O> + 'w>, Error> {
    match O::prepare(&**backend, weights) {
        Err(Error::NotComputed(_)) if args.backend == Choice::Auto && !has_variants => {
            *backend = Box::new(Cpu::new());
            O::prepare(&**backend, weights)
        }
        prepared => prepared,
    }
}

/// Results of all runs.
struct Runs<O> {
    /// Sorted times of the timed runs.
    times: Vec<Duration>,
    host_times: Vec<Duration>,
    output: O,
    /// Whether the outputs of all runs equal the first run's bit for bit.
    same_bits: bool,
}

impl<O> Runs<O> {
    /// Runs the layer.
    fn new<J: Job>(args: &Args, job: &J, layer: &mut dyn Layer<J::Op>) -> anyhow::Result<Self>
    where
        J::Op: Operation<Output = O>,
    {
        let (timed, warm_up) = args.runs();
        let (mut times, mut host_times, mut same_bits) = (Vec::new(), Vec::new(), true);
        let (mut first, mut again) = (job.output(args), job.output_again());
        let progress = Progress::new("running", warm_up + timed);
        for run in 0..warm_up + timed {
            let output = again.as_mut().filter(|_| run > 0).unwrap_or(&mut first);
            times.push(backend::run(layer, job.step(), output)?);
            host_times.extend(layer.host_time());
            same_bits &= run == 0 || again.as_ref().is_none_or(|again| J::is_same(&first, again));
            progress.add(1);
        }
        for times in [&mut times, &mut host_times] {
            times.drain(..warm_up.min(times.len()));
            times.sort();
        }
        Ok(Self { times, host_times, output: first, same_bits })
    }
}
