//! `cargo xtask snapshot`: records what a refactoring must preserve in `tests/data/snapshot.txt`: the PTX of every
//! entry, function and variable without names, and the number of tests per package. (`tests/data/cpu_bits.txt` holds
//! the CPU's outputs; a test compares them.)

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::fs;

use anyhow::{Context, ensure};

use crate::build_ptx::{self, Selection};
use crate::workspace;

/// Record, or compare with --check, the PTX of every entry, function and variable without names and the number of tests per package.
#[derive(clap::Args)]
pub struct Args {
    /// Compare with the recorded snapshot and write nothing
    #[arg(long)]
    check: bool,
}

const RECORDED: &str = "tests/data/snapshot.txt";

/// Compiles the kernels and writes or compares the snapshot.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let path = workspace::root().join(RECORDED);
    let found = snapshot()?;
    if !args.check {
        return fs::write(&path, found).with_context(|| format!("cannot write {}", path.display()));
    }
    let recorded = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let count = |text: &str| {
        let mut lines = BTreeMap::<String, i32>::new();
        text.lines().for_each(|line| *lines.entry(line.to_owned()).or_default() += 1);
        lines
    };
    let (before, after) = (count(&recorded), count(&found));
    let missing = before.iter().filter(|(line, count)| after.get(*line).unwrap_or(&0) < *count);
    let added = after.iter().filter(|(line, count)| before.get(*line).unwrap_or(&0) < *count);
    let differences: Vec<_> =
        missing.map(|(line, _)| format!("- {line}")).chain(added.map(|(line, _)| format!("+ {line}"))).collect();
    differences.iter().for_each(|line| println!("{line}"));
    ensure!(differences.is_empty(), "{RECORDED} is out of date; if the change is intended, run cargo xtask snapshot");
    println!("{RECORDED} is up to date");
    Ok(())
}

fn snapshot() -> anyhow::Result<String> {
    let mut lines = Vec::new();
    for built in build_ptx::build(&Selection::default())? {
        let text = fs::read_to_string(&built.path).with_context(|| format!("cannot read {}", built.path.display()))?;
        lines.extend(entries(&text).map(|entry| format!("ptx {} {:016x}", built.arch, fnv1a(entry.as_bytes()))));
    }
    // The hashes do not depend on names or order, so an entry may move to another kernel or within a file.
    lines.sort_unstable();
    let mut text = lines.join("\n");
    for (package, count) in tests()? {
        write!(text, "\ntests {package} {count}")?;
    }
    Ok(text + "\n")
}

/// Returns the normalized text of each statement of a PTX module: entries, functions, and variables of the module.
fn entries(ptx: &str) -> impl Iterator<Item = String> {
    let (mut statements, mut current, mut depth) = (Vec::new(), String::new(), 0usize);
    for line in ptx.lines() {
        let line = line.split("//").next().unwrap_or_default().trim();
        let is_debug = [".loc", ".file", ".section", ".version", ".target", ".address_size", "$L__tmp"];
        if line.is_empty() || is_debug.iter().any(|directive| line.starts_with(directive)) {
            continue;
        }
        current.push_str(line);
        current.push('\n');
        // An entry contains braces of its own: scopes and inline assembly.
        let count = |brace| line.matches(brace).count();
        depth = (depth + count('{')).saturating_sub(count('}'));
        if depth == 0 && line.ends_with(['}', ';']) {
            statements.push(without_names(&std::mem::take(&mut current)));
        }
    }
    statements.into_iter()
}

/// Replaces names by the order of their first use: registers, labels, and words with an underscore that are no
/// directives.
fn without_names(text: &str) -> String {
    let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '$' | '%' | '.');
    let (mut numbers, mut out, mut rest) = (HashMap::new(), String::new(), text);
    while let Some(first) = rest.chars().next() {
        let length = rest.find(|c| !is_name(c)).unwrap_or(rest.len());
        if length == 0 {
            out.push(first);
            rest = &rest[first.len_utf8()..];
            continue;
        }
        let (word, tail) = rest.split_at(length);
        rest = tail;
        // A register's name ends with a digit and has no dot. Special registers such as `%tid.x` keep their names.
        let is_register = word.starts_with('%') && word.ends_with(|c: char| c.is_ascii_digit()) && !word.contains('.');
        let is_symbol = word.starts_with(['$', '_']) || word.contains('_') && !word.contains('.');
        if is_register || is_symbol {
            let next = numbers.len();
            let number = *numbers.entry(word).or_insert(next);
            let _ = write!(out, "@{number}");
        } else {
            out.push_str(word);
        }
    }
    out
}

/// Returns the 64-bit FNV-1a hash.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

/// Returns the number of `#[test]` lines per package folder.
fn tests() -> anyhow::Result<BTreeMap<String, usize>> {
    let root = workspace::root();
    let mut counts = BTreeMap::new();
    let mut folders = vec![(root.to_owned(), String::from("."))];
    while let Some((folder, mut package)) = folders.pop() {
        if folder.join("Cargo.toml").exists() {
            package = folder.strip_prefix(root)?.display().to_string();
        }
        for entry in fs::read_dir(&folder)? {
            let entry = entry?;
            let (name, path) = (entry.file_name(), entry.path());
            if entry.file_type()?.is_dir() {
                if name != "target" && !name.as_encoded_bytes().starts_with(b".") {
                    folders.push((path, package.clone()));
                }
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path)?;
                let count = text.lines().filter(|line| line.trim() == "#[test]").count();
                *counts.entry(package.clone()).or_default() += count;
            }
        }
    }
    counts.retain(|_, count| *count > 0);
    Ok(counts)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PTX: &str = ".version 8.6\n.visible .entry entry_one(\n.param .u64 entry_one_param_0\n)\n{ // begin\nld.param.b64 %rd5, [entry_one_param_0];\n\
        .loc 1 2 3\n$L__BB0_1:\nmov.u32 %r7, %tid.x;\nadd.s32 %r8, %r7, 12;\nbra $L__BB0_1;\n}\n";

    #[test]
    fn names_comments_and_debug_lines_are_ignored() {
        let renamed =
            PTX.replace("one", "other").replace("BB0_1", "BB3_7").replace("%r7", "%r70").replace("begin", "b");
        assert!(entries(PTX).eq(entries(&renamed)));
    }

    #[test]
    fn a_new_entry_leaves_the_others_unchanged() {
        let inline = PTX.replace("add.s32", "{\n.reg .b32 t;\nmov.b32 t, %r7;\n}\nadd.s32");
        assert_eq!(entries(&inline).count(), 1);
        let two = format!("{inline}.shared .align 4 .b8 ring_one[64];\n{PTX}");
        let all: Vec<_> = entries(&two).collect();
        assert_eq!(all.len(), 3);
        assert!(all.contains(&entries(&inline).next().unwrap()) && all.contains(&entries(PTX).next().unwrap()));
    }

    #[test]
    fn changed_instruction_constant_or_special_register_changes_the_snapshot() {
        for (from, to) in [("add.s32", "sub.s32"), ("12", "13"), ("%tid.x", "%tid.y"), ("%r7, 12", "%r8, 12")] {
            assert!(!entries(PTX).eq(entries(&PTX.replace(from, to))), "{from}");
        }
    }
}
