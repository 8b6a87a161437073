//! `cargo xtask tidy`: what the compiler does not ask of sources.
//!
//! 1. No circle of imports has more than [`imports::MOST_FILES`] files ([`imports`]).
//! 2. In the emulator, imports go down from floor to floor only.
//! 3. Every file opens with `//!`.
//! 4. Every `unsafe fn` says under `# Safety` what it asks of its caller ([`safety`]).
//! 5. No function of the emulator's handlers is longer than [`length::MOST_LINES`] lines, unless it is a table ([`length`]).
//!
//! Tests are exempt: what is under `#[cfg(test)]` or `#[test]`, and from the last two rules folders and files named `tests`.

mod imports;
mod length;
mod safety;
mod sources;

use std::path::Path;

use anyhow::{Context, ensure};

use sources::Sources;

use crate::workspace;

/// Where the emulator's handlers are.
const HANDLERS: &str = "crates/ptx_emulator/src/exec";

/// The emulator, and its floors from the ground up: files and folders of its `src` (they stand in its README).
const EMULATOR: &str = "crates/ptx_emulator/src";
const FLOORS: [&[&str]; 9] = [
    &["config", "hw", "parser", "random", "types"],
    &["operand"],
    &["timing"],
    &["machine"],
    &["code"],
    &["decode"],
    &["exec"],
    &["scheduler"],
    &["device", "launch_json", "module", "program", "timed"],
];

/// Look for circles of imports, files and unsafe functions that say nothing of themselves, and handlers that are too long.
#[derive(clap::Args)]
pub struct Args {
    /// Only files below this folder of the workspace
    #[arg(long, value_name = "FOLDER", default_value = "")]
    folder: String,
}

/// Prints everything that is untidy, and fails if there is something.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let root = workspace::root();
    let sources = Sources::read(root, &args.folder).with_context(|| format!("cannot read {}", root.display()))?;
    ensure!(!sources.is_empty(), "no .rs file below {:?}", args.folder);
    let is_handler = |file: &Path| file.starts_with(HANDLERS);
    let handlers = sources.files().filter(|(file, _)| is_handler(file)).count();
    ensure!(handlers > 0 || !args.folder.is_empty(), "{HANDLERS} has no file: where are the emulator's handlers now?");

    let mut untidy = imports::circles(&sources);
    untidy.extend(imports::upward(&sources, Path::new(EMULATOR), &FLOORS));
    for (file, source) in sources.files() {
        if !source.text.starts_with("//!") {
            untidy.push(format!("{}:1: the file does not open with `//!`", file.display()));
        }
        if !of_tests(file) {
            untidy.extend(safety::unexplained(&source.tree).map(|found| format!("{}:{found}", file.display())));
            if is_handler(file) {
                untidy.extend(length::too_long(&source.tree).map(|found| format!("{}:{found}", file.display())));
            }
        }
    }
    for what in &untidy {
        eprintln!("{what}");
    }
    ensure!(untidy.is_empty(), "{} places are untidy", untidy.len());
    println!("{} files are tidy", sources.files().count());
    Ok(())
}

/// Whether a file is of tests alone: in a folder `tests`, or `tests.rs`.
fn of_tests(file: &Path) -> bool {
    file.iter().any(|part| Path::new(part).file_stem().is_some_and(|name| name == "tests"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_tests_are_told_by_their_place() {
        for (file, expected) in [
            ("tests/src/lib.rs", true),
            ("host/tests/no_driver.rs", true),
            ("host/src/backend/cuda/tests.rs", true),
            ("host/src/backend/cuda/layer.rs", false),
            ("host/src/my_tests.rs", false),
        ] {
            assert_eq!(of_tests(Path::new(file)), expected, "{file}");
        }
    }
}
