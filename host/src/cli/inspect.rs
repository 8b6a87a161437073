//! `nvfp4 inspect`.

use std::process::ExitCode;

/// Inspect a checkpoint.
#[derive(clap::Args)]
pub struct Args {}

/// Runs the subcommand.
pub fn run(_: &Args) -> anyhow::Result<ExitCode> {
    anyhow::bail!("not written yet")
}
