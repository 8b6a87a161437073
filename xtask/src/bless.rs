//! `cargo xtask bless`: renews what the emulator's tests compare with.

use std::process::Command;

use anyhow::{Context, ensure};

use crate::workspace;

/// Renew the emulator's golden reports, fault texts and coverage table; look at the difference before you commit it.
#[derive(clap::Args)]
pub struct Args {}

/// Runs the tests that keep them, so that each writes what it found.
pub fn run(_: &Args) -> anyhow::Result<()> {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.current_dir(workspace::root()).env("BLESS", "1");
    let status = cargo.args(["test", "--package=ptx_emulator", "--test=programs", "--test=readme"]).status();
    ensure!(status.context("cannot run cargo")?.success(), "not everything could be renewed");
    Ok(())
}
