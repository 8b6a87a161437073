//! `cargo xtask bless`: renews the golden files that tests compare with.

use std::process::Command;

use anyhow::{Context, ensure};

use crate::workspace;

/// Renew the emulator's golden reports, fault texts and coverage table, the CPU's recorded bits and the book's table
/// of operations. Review the difference before you commit it.
#[derive(clap::Args)]
pub struct Args {}

/// The tests that own golden files: packages with arguments of `cargo test`.
const TESTS: [&[&str]; 2] = [
    &["ptx_emulator", "--test", "programs", "--test", "readme"],
    &["nvfp4-tests", "--test", "suite", "--", "cpu_bits::", "operations::"],
];

/// Runs the tests that own the golden files with `BLESS=1`, which makes each test write its file.
pub fn run(_: &Args) -> anyhow::Result<()> {
    for test in TESTS {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.current_dir(workspace::root()).env("BLESS", "1").args(["test", "--package"]).args(test);
        ensure!(
            cargo.status().context("cannot run cargo")?.success(),
            "some files were not renewed; see the failed tests above"
        );
    }
    Ok(())
}
