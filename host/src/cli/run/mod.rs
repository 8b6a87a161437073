//! `nvfp4 run`: the main job. Inputs, a backend, runs, the check against the exact reference, a report.

mod args;
mod job;
mod report;
mod verification;

use std::io::Write;
use std::process::ExitCode;

use anyhow::bail;
use nvfp4::Output;
use nvfp4::backend::{self, Backend, cpu::Cpu, cuda::Cuda, emulated};
use nvfp4::checkpoint::{Checkpoint, OutputFile, refuse_input};
use nvfp4::plan::variant::Variant;
use nvfp4::problem::Step;

use super::exit;
use super::progress::Progress;
pub use args::Args;
use args::Choice;
use job::Job;
use report::Report;
use verification::verify;

/// Runs the job and prints the report.
pub fn run(args: &Args, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let backend = choose_backend(args)?;
    let checkpoint = args.weights.as_deref().map(Checkpoint::open).transpose()?;
    if let Some(path) = &args.output {
        let inputs = checkpoint.iter().flat_map(Checkpoint::paths).chain(args.activations.as_deref());
        refuse_input(path, inputs)?;
    }
    let Job { shape, input, weights, tokens } = match &checkpoint {
        Some(checkpoint) => job::loaded(args, checkpoint)?,
        None => job::generated(args)?,
    };
    let step = Step::new(&weights, tokens, args.out_dtype)?;
    let problem = step.problem();
    let output_file = args.output.as_deref().map(|path| OutputFile::create(path, problem)).transpose()?;
    let mut output = Output::new(problem);
    let mut layer = backend.prepare(&weights)?;

    let (timed, warm_up) = args.runs();
    let (mut times, mut host_times) = (Vec::new(), Vec::new());
    {
        let progress = Progress::new("running", warm_up + timed);
        for _ in 0..warm_up + timed {
            times.push(backend::run(layer.as_mut(), &step, &mut output)?);
            host_times.extend(layer.host_time());
            progress.add(1);
        }
    }
    for times in [&mut times, &mut host_times] {
        times.drain(..warm_up.min(times.len()));
        times.sort();
    }

    let comparison = verify(args, &weights, &step, &output);
    let report = Report {
        args,
        shape,
        input,
        problem,
        backend: backend.as_ref(),
        layer: layer.as_ref(),
        min: times[0],
        median: times[times.len() / 2],
        host: host_times.get(host_times.len() / 2).copied(),
        comparison,
    };
    if args.json {
        writeln!(out, "{}", report.json())?;
    } else {
        report.print(out)?;
    }
    if comparison.is_some_and(|comparison| !comparison.passed()) {
        return Ok(ExitCode::from(exit::WRONG));
    }
    if let Some(file) = output_file {
        file.write(&output)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn choose_backend(args: &Args) -> anyhow::Result<Box<dyn Backend>> {
    if args.backend != Choice::Emulated && (args.arch.is_some() || args.schedule.is_some()) {
        bail!("--arch and --schedule are the emulator's; add --backend emulated");
    }
    let cuda = || Cuda::open(0)?.with_variant(args.variant);
    let plain = args.variant == Variant::default();
    Ok(match args.backend {
        Choice::Cpu if !plain => bail!("--variant is of GPUs, real and emulated; leave it out with --backend cpu"),
        Choice::Cpu => Box::new(Cpu::new()),
        Choice::Cuda => Box::new(cuda()?),
        Choice::Emulated => {
            let schedule = args.schedule.unwrap_or_default();
            let options = emulated::Options { schedule, ..Default::default() };
            let gpu = emulated::Emulated::new(args.arch.as_deref().unwrap_or(emulated::default_arch()), options)?;
            Box::new(gpu.with_variant(args.variant)?)
        }
        Choice::Auto => match cuda() {
            Ok(gpu) => Box::new(gpu),
            Err(error) if error.is_no_device() && plain => Box::new(Cpu::new()),
            Err(error) => return Err(error.into()),
        },
    })
}
