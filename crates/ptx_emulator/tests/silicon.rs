//! What GPUs have shown, held against the emulator. Each fact of `tests/silicon.json` has a source and, if a program can
//! express it, a program of `tests/pass`, `tests/fail` or `tests/reported`. The page `SILICON.md` lists the emulator's
//! verdict on each program at each level; `BLESS=1 cargo test` rewrites it.

mod verdicts;

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;
use std::path::{Path, PathBuf};

use ptx_emulator::program::Program;
use serde::Deserialize;
use verdicts::{cell, run, schedules};

const HEAD: &str = "\
# What silicon has shown

Facts about GPUs from public reports and from our own measurements, and what the emulator says of a program that does the same. A test runs
each program at each level on 22 schedules (fair, worst and 20 seeds), and compares this page with the verdicts. At default, all schedules have
the same verdict. At other levels, the number of schedules is given where they differ. \"right\" means that the launch ends with the expected
memory, and \"wrong memory\" that it ends with other memory and without a fault; a warning is named behind it. Programs are in `tests`. The
README explains the levels.
";

#[derive(Deserialize)]
#[serde(untagged, deny_unknown_fields)]
enum Line {
    Topic { topic: String },
    Shown { fact: String, gpu: String, source: String, program: String },
    Told { fact: String, gpu: String, source: String, test: String },
}

/// The emulator's verdict on a program at a level and on a schedule.
fn verdict(program: &Program, level: &str, schedule: String) -> String {
    match run(program, level, schedule) {
        Err(fault) => fault.kind.to_string(),
        Ok((report, is_right)) => {
            let mut kinds: Vec<_> = report.warnings.iter().map(|warning| warning.fault.kind.to_string()).collect();
            kinds.dedup();
            let warnings = if kinds.is_empty() { String::new() } else { format!("; warning {}", kinds.join(", ")) };
            format!("{}{warnings}", if is_right { "right" } else { "wrong memory" })
        }
    }
}

/// The verdicts at a level, each with its number of schedules. A program may name the schedules that show its fault.
fn verdicts(program: &Program, level: &str) -> BTreeMap<String, usize> {
    let mut verdicts = BTreeMap::new();
    for schedule in program.outcome.schedules.clone().unwrap_or_else(|| schedules().collect()) {
        *verdicts.entry(verdict(program, level, schedule)).or_default() += 1;
    }
    verdicts
}

/// All programs of `tests`, by folder and name.
fn programs() -> HashMap<PathBuf, Program> {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let mut programs = HashMap::new();
    for folder in ["pass", "fail", "reported"] {
        for program in Program::read_all(&tests.join(folder)).unwrap_or_else(|error| panic!("{error:#}")) {
            let stem = program.path.file_stem().expect("a file").to_owned();
            programs.insert(Path::new(folder).join(stem), program);
        }
    }
    programs
}

fn facts() -> Vec<Line> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/silicon.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn page() -> String {
    let (programs, lines) = (programs(), facts());
    let mut page = HEAD.to_owned();
    for line in lines {
        match line {
            Line::Topic { topic } => {
                write!(page, "\n## {topic}\n\n| fact | GPU | source | machine | default | strict | program |\n")
                    .unwrap();
                page.push_str("|---|---|---|---|---|---|---|\n");
            }
            Line::Shown { fact, gpu, source, program } => {
                let found = programs.get(&PathBuf::from(&program));
                let found = found.unwrap_or_else(|| panic!("tests/{program} does not exist"));
                let levels = ["machine", "default", "strict"].map(|level| verdicts(found, level));
                assert_eq!(levels[1].len(), 1, "{program} has several verdicts at default: {:?}", levels[1]);
                let [machine, default, strict] = levels.each_ref().map(cell);
                writeln!(page, "| {fact} | {gpu} | {source} | {machine} | {default} | {strict} | `{program}` |")
                    .unwrap();
            }
            Line::Told { fact, gpu, source, test } => {
                writeln!(page, "| {fact} | {gpu} | {source} | – | – | – | {test} |").unwrap();
            }
        }
    }
    page
}

#[test]
fn page_has_the_verdict_on_every_fact() {
    let (page, path) = (page(), Path::new(env!("CARGO_MANIFEST_DIR")).join("SILICON.md"));
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(&path, &page).unwrap();
    }
    assert_eq!(page, std::fs::read_to_string(path).unwrap_or_default(), "run with BLESS=1 if this is right");
}

#[test]
fn an_option_lets_allocations_of_a_pair_wait_for_each_other() {
    let mut program = programs()[Path::new("fail/pair_freed_before_the_peer_allocates")].clone();
    program.launch.alloc_rendezvous = true;
    assert_eq!(verdict(&program, "default", "fair".into()), "right");
}
