//! This workspace's own tasks: one file a command.

mod bless;
mod build_ptx;
mod counters;
mod document;
mod emulate;
mod experiments;
mod ptxas;
mod sass;
mod table;
mod tools;

use std::path::{Path, PathBuf};

use clap::Parser;

/// This workspace's own tasks.
#[derive(Parser)]
#[command(name = "cargo xtask")]
enum Command {
    Bless(bless::Args),
    BuildPtx(build_ptx::Args),
    Counters(counters::Args),
    Experiments(experiments::Args),
    Ptxas(ptxas::Args),
    Sass(sass::Args),
}

fn main() -> anyhow::Result<()> {
    match Command::parse() {
        Command::Bless(args) => bless::run(&args),
        Command::BuildPtx(args) => build_ptx::run(&args),
        Command::Counters(args) => counters::run(&args),
        Command::Experiments(args) => experiments::run(&args),
        Command::Ptxas(args) => ptxas::run(&args),
        Command::Sass(args) => sass::run(&args),
    }
}

/// The workspace's root: xtask lies in it.
fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace")
}

/// Where the workspace's build results go.
fn target_dir() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| workspace().join("target"), PathBuf::from)
}
