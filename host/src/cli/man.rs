//! `nvfp4 man`: manual pages.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;

/// Write the manual pages, one per subcommand, into a folder.
#[derive(clap::Args)]
#[command(after_help = "Example:
  nvfp4 man ~/.local/share/man/man1")]
pub struct Args {
    /// An existing folder.
    #[arg(value_hint = clap::ValueHint::DirPath)]
    folder: PathBuf,
}

/// Writes `nvfp4.1`, `nvfp4-run.1` and so on, generated from the help texts.
pub fn run(args: &Args, command: clap::Command, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let folder = args.folder.display();
    clap_mangen::generate_to(command, &args.folder).with_context(|| format!("cannot write to {folder}"))?;
    writeln!(out, "{folder}: nvfp4.1 and a page for each subcommand")?;
    Ok(ExitCode::SUCCESS)
}
