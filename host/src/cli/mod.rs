//! The command line: one file a subcommand, each an `Args` and a `run`.

mod inspect;
mod quantize;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// A wrong result.
pub const WRONG: u8 = 1;
/// Bad input or usage.
pub const BAD_INPUT: u8 = 2;
/// No device of the kind asked for.
pub const NO_DEVICE: u8 = 3;

/// NVFP4 grouped GEMM for mixture-of-experts models: run it, check it, and bring checkpoints in and out.
#[derive(Parser)]
#[command(name = "nvfp4", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Quantize(quantize::Args),
    Inspect(inspect::Args),
}

/// Parses the arguments, runs the subcommand and turns what came of it into the exit code.
pub fn main() -> ExitCode {
    // clap's own usage errors exit with 2, as bad input does.
    let result = match &Cli::parse().command {
        Command::Quantize(args) => quantize::run(args),
        Command::Inspect(args) => inspect::run(args),
    };
    result.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        let no_device = error.downcast_ref::<nvfp4::Error>().is_some_and(nvfp4::Error::is_no_device);
        ExitCode::from(if no_device { NO_DEVICE } else { BAD_INPUT })
    })
}
