//! Bugs of public kernels that others have reported. `tests/reported.json` lists the reports. Most have a small program of
//! our own that does the same, in its mended form (`tests/reported/NAME.ptx`) and in its buggy form (`NAME_bug.json`, an
//! edit of the mended one). The page `REPORTED.md` lists the verdicts on both; `BLESS=1 cargo test` rewrites it, and the
//! faults beside the programs.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use ptx_emulator::Fault;
use ptx_emulator::program::Program;
use serde::Deserialize;

const HEAD: &str = "\
# Bugs that others have reported

Sixty public reports of bugs in kernels and in compilers of kernels, and one bug of a shipped tutorial that the emulator found and no card has
confirmed. A program of our own does what a report describes, with other sizes and other data; it is not the reported kernel. A test runs its
buggy form at each level, and its mended form at default, on 22 schedules: fair, worst and 20 seeds, unless a row says otherwise. \"right\" means
that the launch ends with the expected memory, and \"wrong memory\" that it ends with other memory and without a fault. Where schedules differ, the
number of schedules is given. The fault of the buggy form at default is stored beside each program of `tests/reported`.

What the numbers do not say:

- The reports were chosen by hand, most of them races and missing waits, which is what the emulator looks for. The share that is found is no
  estimate for bugs of other kinds.
- The list was fixed before the programs of `tests/reported` were written. Not all of it was new: some of these reports had been tried on the
  emulator before, and rows with programs of `tests/pass` and `tests/fail` use programs that are older than the list.
- Several reports have the same mechanism and so nearly the same program: a reduction's scratch that is used again, a wait for the previous grid
  that is missing, a proxy fence that is missing before a bulk store.
- A fault counts as found even if its name is not the reported symptom. The remarks say where that is so.
- Two mended programs were wrong when they were first run, one with a deadlock that the emulator named. They were corrected.
";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Report {
    report: String,
    bug: String,
    /// Mended and buggy program, relative to `tests`.
    programs: Option<[PathBuf; 2]>,
    /// Why no program exists.
    left: Option<String>,
    /// A remark on the verdict. It says why a bug is not found on every schedule at default.
    note: Option<String>,
    /// Runs on the fair schedule alone, because the program is slow.
    #[serde(default)]
    fair_only: bool,
    /// No schedule shows the bug, but `Device::explore` does: `tests/explore.rs` checks that.
    #[serde(default)]
    explored: bool,
    /// The bug is in the list although nobody has reported it. It is not counted.
    #[serde(default)]
    unreported: bool,
}

fn tests() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests")
}

fn reports() -> Vec<Report> {
    serde_json::from_str(&std::fs::read_to_string(tests().join("reported.json")).unwrap()).unwrap()
}

fn schedules() -> impl Iterator<Item = String> {
    ["fair".into(), "worst".into()].into_iter().chain((1..=20).map(|seed| format!("seed:{seed}")))
}

/// Runs a program at a level on a schedule. The result says whether memory is right.
fn run(program: &Program, level: &str, schedule: String) -> Result<bool, Fault> {
    let mut program = program.clone();
    (program.launch.sanitize, program.launch.strict) = (level != "machine", level == "strict");
    program.launch.schedule = Some(schedule);
    let mut prepared = program.prepare().unwrap_or_else(|error| panic!("{}: {error:#}", program.path.display()));
    // With several threads, the order of racing clusters depends on timing.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    pool.install(|| prepared.run())?;
    Ok(program.outcome.expect.iter().all(|(name, want)| {
        let got = prepared.device.download::<u32>(prepared.buffers[name]);
        got[..want.len()] == want[..]
    }))
}

/// Verdicts at a level, each with its number of schedules.
fn verdicts(program: &Program, level: &str, fair_only: bool) -> BTreeMap<String, usize> {
    let mut verdicts = BTreeMap::new();
    for schedule in schedules().take(if fair_only { 1 } else { usize::MAX }) {
        let verdict = match run(program, level, schedule) {
            Ok(true) => "right".to_owned(),
            Ok(false) => "wrong memory".to_owned(),
            Err(fault) => fault.kind.to_string(),
        };
        *verdicts.entry(verdict).or_default() += 1;
    }
    verdicts
}

fn cell(verdicts: &BTreeMap<String, usize>) -> String {
    match verdicts.len() {
        1 => verdicts.keys().next().cloned().unwrap_or_default(),
        _ => verdicts.iter().map(|(verdict, times)| format!("{verdict} {times}")).collect::<Vec<_>>().join(", "),
    }
}

fn page() -> String {
    let mut rows = String::new();
    let (mut left, mut notes) = (String::new(), String::new());
    let (mut run, mut found, mut somewhere, mut by_explore, mut stopped) = (0, 0, 0, 0, 0);
    for Report { report, bug, programs, left: reason, note, fair_only, explored, unreported } in reports() {
        let Some(programs) = programs else {
            writeln!(left, "| {report} | {bug} | {} |", reason.expect("a report without programs says why")).unwrap();
            continue;
        };
        let [mended, buggy] = programs.each_ref().map(|path| Program::read(&tests().join(path)).unwrap());
        let [machine, default, strict] =
            ["machine", "default", "strict"].map(|level| verdicts(&buggy, level, fair_only));
        let right = verdicts(&mended, "default", fair_only);
        let is_fault = |verdict: &String| !["right", "wrong memory"].contains(&verdict.as_str());
        assert!(default.keys().all(is_fault) || note.is_some(), "{report}: a note says why the bug is not found");
        if let Some(note) = note {
            writeln!(notes, "| {report} | {bug} | {note} |").unwrap();
        }
        if !unreported {
            run += 1;
            found += usize::from(default.keys().all(is_fault));
            let is_somewhere = [&machine, &default, &strict].iter().any(|each| each.keys().any(is_fault));
            somewhere += usize::from(is_somewhere);
            by_explore += usize::from(explored && !is_somewhere);
            stopped += usize::from(right.keys().any(|verdict| verdict != "right"));
        }
        let [machine, default, strict, right] = [machine, default, strict, right].map(|verdicts| cell(&verdicts));
        let bug = if fair_only { bug + " (the fair schedule alone)" } else { bug };
        writeln!(
            rows,
            "| {report} | {bug} | {machine} | {default} | {strict} | {right} | `{}` |",
            programs[1].display()
        )
        .unwrap();
    }
    let mut page = HEAD.to_owned();
    writeln!(page, "\n| reports | number |\n|---|---|").unwrap();
    writeln!(page, "| in the list | {} |", reports().iter().filter(|report| !report.unreported).count()).unwrap();
    writeln!(page, "| with programs | {run} |").unwrap();
    writeln!(page, "| a fault at default on every schedule | {found} |").unwrap();
    writeln!(page, "| a fault at some level on some schedule | {somewhere} |").unwrap();
    writeln!(page, "| found by `explore` in addition | {by_explore} |").unwrap();
    writeln!(page, "| found by a schedule or by `explore` | {} |", somewhere + by_explore).unwrap();
    writeln!(page, "| mended programs that are stopped or wrong at default | {stopped} |").unwrap();
    writeln!(page, "\n## Programs\n\n| report | bug | machine | default | strict | mended | buggy program |").unwrap();
    page.push_str("|---|---|---|---|---|---|---|\n");
    page.push_str(&rows);
    page.push_str("\n## Remarks\n\n| report | bug | remark |\n|---|---|---|\n");
    page.push_str(&notes);
    if !left.is_empty() {
        page.push_str("\n## Not run\n\n| report | bug | why |\n|---|---|---|\n");
        page.push_str(&left);
    }
    page
}

/// Compares a text with a file, or writes the file.
fn check(path: &Path, text: &str) {
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(path, text).unwrap();
    }
    let want = std::fs::read_to_string(path).unwrap_or_default();
    assert_eq!(text.trim_end(), want.trim_end(), "{}: run with BLESS=1 if this is right", path.display());
}

#[test]
fn page_has_the_verdict_on_every_report() {
    check(&Path::new(env!("CARGO_MANIFEST_DIR")).join("REPORTED.md"), &page());
}

#[test]
fn faults_are_named_as_before() {
    for [_, buggy] in reports().into_iter().filter_map(|report| report.programs) {
        let program = Program::read(&tests().join(&buggy)).unwrap();
        if !buggy.starts_with("reported") {
            continue;
        }
        let faults = schedules().filter_map(|schedule| run(&program, "default", schedule).err());
        let text = faults.map(|fault| fault.to_string()).next().unwrap_or_else(|| "no fault\n".into());
        check(&program.path.with_extension("fault"), &text);
    }
}
