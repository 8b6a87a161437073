//! The command line: one file per subcommand, each with an `Args` and a `run`.

mod completions;
mod convert;
mod dequantize;
mod devices;
mod diff;
mod doctor;
mod exit;
mod explain;
mod failure;
mod inspect;
mod leftovers;
mod man;
mod message;
mod parse;
mod plot;
mod progress;
mod quantize;
mod roofline;
mod run;
mod selftest;
mod shapes;
mod table;
mod verify;

use std::io::{self, Write};
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use message::message;

/// Mixture-of-experts and linear layers with 4-bit (NVFP4) weights: run and check them, and read and write checkpoints.
#[derive(Parser)]
#[command(name = "nvfp4", version = version(), arg_required_else_help = true)]
#[command(after_help = "Examples:
  nvfp4 run                                     the default shape on the best device here, verified
  nvfp4 run --weights model/ --layer 3          a layer of a real checkpoint
  nvfp4 quantize model/ model-nvfp4/            f32, f16, bf16, FP8, MXFP4 to NVFP4
  nvfp4 verify model-nvfp4/ --source model/     its errors, weight by weight, the worst first
  nvfp4 inspect model-nvfp4/                    what is in a checkpoint, and what is wrong with it
  nvfp4 roofline --shape decode-1 --gpu h200    the least time that a shape can take")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// Returns the version and the compiled features.
fn version() -> String {
    let features = [
        ("cuda", cfg!(feature = "cuda")),
        ("emulated", cfg!(feature = "emulated")),
        ("kernels", cfg!(feature = "kernels")),
    ];
    let features: Vec<_> = features.into_iter().filter_map(|(name, is_on)| is_on.then_some(name)).collect();
    format!("{} (features: cli, {})", env!("CARGO_PKG_VERSION"), features.join(", "))
}

#[derive(Subcommand)]
enum Command {
    Run(Box<run::Args>),
    Quantize(quantize::Args),
    Dequantize(dequantize::Args),
    Convert(convert::Args),
    Verify(verify::Args),
    Diff(diff::Args),
    Inspect(inspect::Args),
    Doctor(doctor::Args),
    Explain(explain::Args),
    Roofline(roofline::Args),
    Devices(devices::Args),
    Selftest(selftest::Args),
    Shapes(shapes::Args),
    Completions(completions::Args),
    Man(man::Args),
}

/// Parses the arguments, runs the subcommand and turns its result into an exit code.
pub fn main() -> ExitCode {
    nvfp4::checkpoint::handle_signals();
    // clap's usage errors exit with 2, like bad input.
    let out = &mut io::stdout().lock();
    let result = match &Cli::parse().command {
        Command::Run(args) => {
            let result = run::run(args, out);
            failure::with_json(args.json, run::SCHEMA, result, out)
        }
        Command::Quantize(args) => quantize::run(args, out),
        Command::Dequantize(args) => dequantize::run(args, out),
        Command::Convert(args) => convert::run(args, out),
        Command::Verify(args) => verify::run(args, out),
        Command::Diff(args) => diff::run(args, out),
        Command::Inspect(args) => inspect::run(args, out),
        Command::Doctor(args) => doctor::run(args, out),
        Command::Explain(args) => explain::run(args, out),
        Command::Roofline(args) => roofline::run(args, out),
        Command::Devices(args) => devices::run(args, out),
        Command::Selftest(args) => selftest::run(args, out),
        Command::Shapes(args) => shapes::run(args, out),
        Command::Completions(args) => completions::run(args, Cli::command(), out),
        Command::Man(args) => man::run(args, Cli::command(), out),
    };
    let result = result.and_then(|code| Ok(out.flush().map(|()| code)?));
    result.unwrap_or_else(|error| {
        if error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe) {
            // The reader closed the pipe and needs no more output.
            return ExitCode::SUCCESS;
        }
        eprintln!("error: {}", message(&error));
        ExitCode::from(match error.downcast_ref::<nvfp4::Error>() {
            Some(error) if error.is_no_device() => exit::NO_DEVICE,
            Some(error) if error.code() == "fault" => exit::WRONG,
            _ => exit::BAD_INPUT,
        })
    })
}
