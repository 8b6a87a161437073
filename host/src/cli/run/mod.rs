//! `nvfp4 run`: prepares inputs, runs a backend, checks the output against the exact reference, and prints a report.

mod args;
mod emulated_gpu;
mod grouped;
mod job;
mod latent;
mod linear;
mod moe;
mod prediction;
mod report;
mod runs;
mod tensors;
mod tokens;
mod verification;

use std::io::Write;
use std::process::ExitCode;

use anyhow::bail;
use nvfp4::Error;
use nvfp4::backend::cuda::{self, Cuda, Verdicts};
use nvfp4::backend::{Backend, cpu::Cpu};
use nvfp4::kernels::Subject;
use nvfp4::plan::variant::Variant;

use super::selftest::{self, FirstUse};
pub use args::Args;
use args::{Choice, Operation};

/// Version of an error with `--json`.
pub const SCHEMA: u32 = 1;

/// Runs the job and prints the report.
pub fn run(args: &Args, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let backend = choose_backend(args)?;
    match args.op {
        _ if args.is_moe() => moe::run(args, backend, out),
        Some(Operation::Linear) => linear::run(args, backend, out),
        _ => grouped::run(args, backend, out),
    }
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
