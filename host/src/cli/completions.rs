//! `nvfp4 completions`: completion scripts for shells.

use std::io::Write;
use std::process::ExitCode;

/// Print a completion script for a shell.
#[derive(clap::Args)]
#[command(after_help = "Example:
  nvfp4 completions bash > ~/.local/share/bash-completion/completions/nvfp4")]
pub struct Args {
    /// The shell.
    shell: clap_complete::Shell,
}

/// Writes the script of the whole command line to stdout.
pub fn run(args: &Args, mut command: clap::Command, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    // The generator panics if its writer fails, for example on a closed pipe.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "nvfp4", &mut script);
    out.write_all(&script)?;
    Ok(ExitCode::SUCCESS)
}
