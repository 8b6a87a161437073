//! `nvfp4 run`: prepares inputs, runs a backend, checks the output against the exact reference, and prints a report.

mod args;
mod emulated_gpu;
mod job;
mod linear;
mod moe;
mod prediction;
mod report;
mod tensors;
mod tokens;
mod verification;

use std::io::Write;
use std::process::ExitCode;

use anyhow::bail;
use nvfp4::backend::cuda::{self, Cuda, Verdicts};
use nvfp4::backend::{self, Backend, cpu::Cpu};
use nvfp4::checkpoint::{Checkpoint, OutputFile, check_file, refuse_input};
use nvfp4::kernels::Subject;
use nvfp4::plan::variant::Variant;
use nvfp4::problem::Step;
use nvfp4::{Error, Output};

use super::exit;
use super::leftovers::note_leftovers;
use super::progress::Progress;
use super::selftest::{self, FirstUse};
pub use args::Args;
use args::{Choice, Operation};
use job::Job;
use prediction::Sensitivity;
use report::Report;
use verification::verify;

/// Version of an error with `--json`.
pub const SCHEMA: u32 = 1;

/// Runs the job and prints the report.
pub fn run(args: &Args, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let backend = choose_backend(args)?;
    if args.is_moe() {
        return moe::run(args, backend, out);
    }
    if args.op == Some(Operation::Linear) {
        return linear::run(args, backend, out);
    }
    if args.tensor.is_some() {
        bail!("--tensor needs --op linear; use --layer instead, or add --op linear");
    }
    if args.routing.is_some() || args.tokens.is_some() && args.weights.is_none() {
        bail!("--routing needs --op moe, and --tokens needs --op moe or --weights; add the missing option");
    }
    if args.token_format.is_some() {
        bail!("--token-format needs --op moe or --op linear; add one of them");
    }
    let checkpoint = args.checkpoint()?;
    if let Some(path) = &args.output {
        let inputs = checkpoint.iter().flat_map(Checkpoint::paths).chain(args.activations.as_deref());
        refuse_input(path, inputs)?;
        check_file(path)?;
        note_leftovers(path);
    }
    let Job { shape, input, modules, tensors, weights, tokens } = match &checkpoint {
        Some(checkpoint) => job::loaded(args, checkpoint)?,
        None => job::generated(args)?,
    };
    let step = Step::new(&weights, tokens, args.out_dtype.unwrap_or(job::OUT_DTYPE))?;
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
    if let Some(checkpoint) = &checkpoint {
        // Checked before any number from the checkpoint is reported.
        checkpoint.check_unchanged()?;
    }
    let report = Report {
        args,
        shape,
        input,
        modules,
        tensors,
        problem,
        backend: backend.as_ref(),
        layer: layer.as_ref(),
        min: times[0],
        median: times[times.len() / 2],
        host: host_times.get(host_times.len() / 2).copied(),
        comparison,
    };
    if let Some(prediction) = backend.prediction() {
        prediction::write(args, &prediction)?;
    }
    let is_wrong = comparison.is_some_and(|comparison| !comparison.passed());
    // Written before the report: if the reader of the report is gone, printing ends the command.
    let written = output_file.filter(|_| !is_wrong).map_or(Ok(()), |file| file.write(&output));
    let sensitivity = Sensitivity::new(args, |gpu| {
        backend::run(gpu.prepare(&weights)?.as_mut(), &step, &mut Output::new(problem))?;
        Ok(())
    })?;
    prediction::print(args, report.json(), |out| report.print(out), sensitivity.as_ref(), out)?;
    written?;
    Ok(if is_wrong { ExitCode::from(exit::WRONG) } else { ExitCode::SUCCESS })
}

/// Opens the first GPU. Kernels that would be used for the first time there are self-tested before.
fn open_gpu(args: &Args) -> Result<Cuda, Error> {
    let unasked = args.variant.kernel.is_none() && args.ptx.is_none() && !args.force;
    if unasked {
        selftest::on_first_use(match args.op {
            _ if args.is_moe() => FirstUse::OfMoe(args.token_format),
            Some(Operation::Linear) => FirstUse::Of(Subject::linear(args.token_format.unwrap_or_default())),
            _ => FirstUse::OfGroups,
        });
    }
    let verdicts = if args.force { Verdicts::Ignored } else { Verdicts::UserCache };
    let options = cuda::Options { code: args.ptx.clone(), verdicts, ..Default::default() };
    let gpu = Cuda::open_with(0, options)?.with_variant(args.variant)?;
    if unasked && !args.is_moe() && args.op != Some(Operation::Linear) {
        gpu.info().notes.iter().for_each(|note| eprintln!("note: {note}"));
    }
    Ok(gpu)
}

fn choose_backend(args: &Args) -> anyhow::Result<Box<dyn Backend>> {
    let emulated = args.arch.is_some() || args.schedule.is_some() || args.sms.is_some() || args.timed;
    if args.backend != Choice::Emulated && emulated {
        bail!("--arch, --schedule, --sms and --timed need the emulator; add --backend emulated");
    }
    if args.force && ![Choice::Auto, Choice::Cuda].contains(&args.backend) {
        bail!("--force needs a GPU; remove it, or use --backend cuda");
    }
    let cuda = || open_gpu(args);
    let of_any_device = args.variant == Variant::default() && args.ptx.is_none();
    Ok(match args.backend {
        Choice::Cpu if !of_any_device => {
            bail!("--variant and --ptx need a real or emulated GPU; remove them, or use another --backend")
        }
        Choice::Cpu => Box::new(Cpu::new()),
        Choice::Cuda => Box::new(cuda()?),
        Choice::Emulated => Box::new(emulated_gpu::by_card(args)?),
        Choice::Auto => match cuda() {
            Ok(gpu) => Box::new(gpu),
            Err(error) if error.is_no_device() && of_any_device => {
                // If there is a GPU, its kernels have failed their self-tests.
                if cuda::devices().is_ok() {
                    eprintln!("note: running on the CPU: {error}");
                }
                Box::new(Cpu::new())
            }
            Err(error) => return Err(error.into()),
        },
    })
}
