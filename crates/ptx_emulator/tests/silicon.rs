//! What GPUs have shown, held against the emulator. Each fact of `tests/silicon.json` has a source and, if a program can
//! express it, a program of `tests/pass` or `tests/fail`. The page `SILICON.md` lists the emulator's verdict on each
//! program at each level; `BLESS=1 cargo test` rewrites it.

use std::collections::HashMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use ptx_emulator::program::Program;
use serde::Deserialize;

const HEAD: &str = "\
# What silicon has shown

Facts about GPUs from public reports and from our own measurements, and what the emulator says of a program that does the same. A test runs
each program at each level, and compares this page with the verdicts. \"right\" means that the launch ends with the expected memory; a warning
is named behind it. Programs are in `tests`. The README explains the levels.
";

#[derive(Deserialize)]
#[serde(untagged, deny_unknown_fields)]
enum Line {
    Topic { topic: String },
    Shown { fact: String, gpu: String, source: String, program: String },
    Told { fact: String, gpu: String, source: String, test: String },
}

/// The emulator's verdict on a program at a level. A program that says which schedules show its fault is run on the first
/// of them.
fn verdict(program: &Program, level: &str) -> String {
    let schedule = program.outcome.schedules.as_ref().and_then(|all| all.first().cloned());
    verdict_on(program, level, schedule)
}

/// The emulator's verdict on a program at a level and on a schedule.
fn verdict_on(program: &Program, level: &str, schedule: Option<String>) -> String {
    let mut program = program.clone();
    (program.launch.sanitize, program.launch.strict) = (level != "machine", level == "strict");
    program.launch.schedule = schedule;
    let mut prepared = program.prepare().unwrap_or_else(|error| panic!("{error:#}"));
    // With several threads, the order of racing clusters depends on timing.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    match pool.install(|| prepared.run()) {
        Err(fault) => fault.kind.to_string(),
        Ok(report) => {
            let wrong = program.outcome.expect.iter().any(|(name, want)| {
                let got = prepared.device.download::<u32>(prepared.buffers[name]);
                got[..want.len()] != want[..]
            });
            let mut kinds: Vec<_> = report.warnings.iter().map(|warning| warning.fault.kind.to_string()).collect();
            kinds.dedup();
            let warnings = if kinds.is_empty() { String::new() } else { format!("; warning {}", kinds.join(", ")) };
            format!("{}{warnings}", if wrong { "wrong memory" } else { "right" })
        }
    }
}

/// All programs of `tests`, by folder and name.
fn programs() -> HashMap<PathBuf, Program> {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let mut programs = HashMap::new();
    for folder in ["pass", "fail"] {
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
                let [machine, default, strict] = ["machine", "default", "strict"].map(|level| verdict(found, level));
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
fn verdicts_are_the_same_on_every_schedule() {
    let programs = programs();
    let seeds = (1..=20).map(|seed| format!("seed:{seed}"));
    let schedules: Vec<String> = ["fair".into(), "worst".into()].into_iter().chain(seeds).collect();
    for line in facts() {
        let Line::Shown { program: name, .. } = line else { continue };
        let program = &programs[&PathBuf::from(&name)];
        let first = verdict(program, "default");
        for schedule in program.outcome.schedules.as_ref().unwrap_or(&schedules) {
            assert_eq!(verdict_on(program, "default", Some(schedule.clone())), first, "{name} on {schedule}");
        }
    }
}

#[test]
fn an_option_lets_allocations_of_a_pair_wait_for_each_other() {
    let mut program = programs()[Path::new("fail/pair_freed_before_the_peer_allocates")].clone();
    program.launch.alloc_rendezvous = true;
    assert_eq!(verdict(&program, "default"), "right");
}
