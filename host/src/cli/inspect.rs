//! `nvfp4 inspect`.

use std::io::Write;
use std::process::ExitCode;

/// Inspect a checkpoint.
#[derive(clap::Args)]
pub struct Args {}

/// Runs the subcommand.
pub fn run(_: &Args, _: &mut impl Write) -> anyhow::Result<ExitCode> {
    anyhow::bail!("not written yet")
}
