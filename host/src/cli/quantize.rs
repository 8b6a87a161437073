//! `nvfp4 quantize`.

use std::process::ExitCode;

/// Quantize a checkpoint.
#[derive(clap::Args)]
pub struct Args {}

/// Runs the subcommand.
pub fn run(_: &Args) -> anyhow::Result<ExitCode> {
    anyhow::bail!("not written yet")
}
