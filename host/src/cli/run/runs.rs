//! Runs a job on a backend, compares its output, and prints the report.

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use nvfp4::Error;
use nvfp4::backend::{self, Backend, Layer, Operation, cpu::Cpu};
use nvfp4::checkpoint::{Checkpoint, OutputFile};

use super::args::{Args, Choice};
use super::job::Job;
use super::prediction::{self, Sensitivity};
use super::report::Report;
use crate::cli::exit;
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
    let mut layer = match J::Op::prepare(backend.as_ref(), job.weights()) {
        Err(Error::NotComputed(_)) if args.backend == Choice::Auto && !about.has_variants => {
            backend = Box::new(Cpu::new());
            J::Op::prepare(backend.as_ref(), job.weights())?
        }
        prepared => prepared?,
    };
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
    prediction::print(args, report.json(), |out| report.print(out), sensitivity.as_ref(), out)?;
    written?;
    Ok(if is_wrong { ExitCode::from(exit::WRONG) } else { ExitCode::SUCCESS })
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
