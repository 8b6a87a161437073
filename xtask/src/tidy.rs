//! `cargo xtask tidy`: source rules that the compiler does not check.
//!
//! 1. The files of a crate have no import cycle ([`imports`]).
//! 2. In the emulator, a file imports from its own floor or a lower one only.
//! 3. Every file begins with `//!`.
//! 4. Every `unsafe fn` states its caller's obligations under `# Safety` ([`safety`]).
//! 5. No function is longer than [`length::MOST_LINES`] lines, unless it is a table ([`length`]). In kernels, which
//!    explain single instructions, clippy counts only the lines of code (`too_many_lines` in `kernels-gpu/Cargo.toml`).
//!
//! Code under `#[cfg(test)]`, `#[test]` or the feature `fake` is exempt. Folders and files named `tests` are exempt from
//! rules 4 and 5.

mod imports;
mod length;
mod safety;
mod sources;

use std::path::Path;

use anyhow::{Context, ensure};

use sources::Sources;

use crate::workspace;

/// Folder of the kernels.
const KERNELS: &str = "kernels-gpu";

/// Sources of the emulator, and its floors from the lowest up: files and folders of its `src`. The emulator's README
/// lists the same floors.
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
    &["device", "explorer", "launch_json", "module", "program", "timed"],
];

/// Find import cycles, files without documentation, unsafe functions without a safety section, and long functions
#[derive(clap::Args)]
pub struct Args {
    /// Check only files below this folder of the workspace
    #[arg(long, value_name = "FOLDER", default_value = "")]
    folder: String,
}

/// Prints every violation, and fails if there is one.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let root = workspace::root();
    let sources = Sources::read(root, &args.folder).with_context(|| format!("cannot read {}", root.display()))?;
    ensure!(!sources.is_empty(), "no .rs file below {:?}", args.folder);
    let mut untidy = imports::circles(&sources);
    untidy.extend(imports::upward(&sources, Path::new(EMULATOR), &FLOORS));
    for (file, source) in sources.files() {
        if !source.text.starts_with("//!") {
            untidy.push(format!("{}:1: the file must begin with a `//!` comment", file.display()));
        }
        if !of_tests(file) {
            untidy.extend(safety::unexplained(&source.tree).map(|found| format!("{}:{found}", file.display())));
            if !file.starts_with(KERNELS) {
                untidy.extend(length::too_long(&source.tree).map(|found| format!("{}:{found}", file.display())));
            }
        }
    }
    for what in &untidy {
        eprintln!("{what}");
    }
    ensure!(untidy.is_empty(), "found {} violations", untidy.len());
    println!("{} files are tidy", sources.files().count());
    Ok(())
}

/// Whether a file holds only tests: it lies in a folder `tests`, or its name is `tests.rs`.
fn of_tests(file: &Path) -> bool {
    file.iter().any(|part| Path::new(part).file_stem().is_some_and(|name| name == "tests"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_files_are_recognized_by_path() {
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
