//! Bugs of public kernels that others have reported. `tests/reported.json` lists the reports. Most have a small program of
//! our own that does the same, in its mended form (`tests/reported/NAME.ptx`) and in its buggy form (`NAME_bug.json`, an
//! edit of the mended one). `tests/suspected.json` is a list of suspected faults. `tests/reported_gpu.json` records what a
//! GPU and compute-sanitizer made of the programs (`tests/reported_on_a_gpu.py`). The page `REPORTED.md` has all verdicts;
//! `BLESS=1 cargo test` rewrites it, and the faults beside the programs.

mod verdicts;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::{Path, PathBuf};

use ptx_emulator::program::Program;
use serde::Deserialize;
use verdicts::{cell, run, schedules};

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

const SUSPECTED: &str = "
## A list of suspected faults: tile-ai/tilelang#2644

The list names suspected faults of TileLang's code for `sm_100`, found by reading and confirmed by no GPU. A program of our own does what an item
describes. \"Confirmed\" means that it ends with a fault or with wrong memory at default on every schedule, and \"refuted\" that it ends with
right memory there. Neither is the verdict of a GPU. The text of the list was at hand in parts: more items may exist.

| item | what it says | machine | default | strict | mended | program | verdict |
|---|---|---|---|---|---|---|---|
";

const ON_A_GPU: &str = "
Each program ran 22 times without a tool, and once with each of racecheck, memcheck, synccheck and initcheck (`tests/reported_on_a_gpu.py`). Programs
for `sm_100` and later do not run there. \"hang\" means that a run did not end within 30 seconds, or 90 with a tool; the tool says nothing
then. A run on a GPU shows one order of events, so \"right\" does not mean that a program has no bug. Racecheck looks for hazards in shared
memory, not for the order of asynchronous copies, proxies and tensor cores.
";

/// What a GPU and the tools of compute-sanitizer made of the programs.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OnAGpu {
    gpu: String,
    #[serde(rename = "compute-sanitizer")]
    sanitizer: String,
    programs: BTreeMap<PathBuf, Ran>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Ran {
    /// Runs by verdict, or an error.
    gpu: BTreeMap<String, serde_json::Value>,
    /// Tools that report something or hang.
    tools: BTreeMap<String, Tool>,
}

/// Result of a tool.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Tool {
    #[serde(default)]
    findings: u32,
    first: Option<String>,
    hang: Option<u32>,
}

impl Ran {
    /// The runs without a tool.
    fn alone(&self) -> String {
        let of = |(verdict, number): (&String, &serde_json::Value)| match number {
            serde_json::Value::String(error) => error.trim_matches('"').to_owned(),
            _ if self.gpu.len() == 1 => verdict.clone(),
            number => format!("{verdict} {number}"),
        };
        self.gpu.iter().map(of).collect::<Vec<_>>().join(", ")
    }

    /// The tools with findings, each with its first finding.
    fn found(&self) -> Vec<String> {
        let found = self.tools.iter().filter(|(_, tool)| tool.findings > 0);
        let words = found.map(|(name, tool)| match tool.first.as_deref().unwrap_or_default() {
            // The rest has addresses of instructions, which say nothing without the machine code.
            race if race.starts_with("Race reported") => format!("{name}: race"),
            first => format!("{name}: `{first}`"),
        });
        words.collect()
    }

    /// The tools that hang although the program alone does not. `None`: no tool.
    fn hangs(&self) -> Option<String> {
        let is_hanging = |tool: &Tool| tool.hang.is_some() && !self.gpu.contains_key("hang");
        let hanging = self.tools.iter().filter(|(_, tool)| is_hanging(tool)).map(|(name, _)| format!("{name} hangs"));
        Some(hanging.collect::<Vec<_>>().join(", ")).filter(|hanging| !hanging.is_empty())
    }
}

/// The section on a GPU's verdicts. `found`: the buggy programs with a fault at default on every schedule.
fn on_a_gpu(found: &BTreeSet<PathBuf>) -> String {
    let OnAGpu { gpu, sanitizer, programs } = read("reported_gpu.json");
    let reports = reports().into_iter().filter(|report| !report.unreported);
    let pairs = reports.filter_map(|Report { report, programs: of, .. }| {
        let of = of.filter(|of| of.iter().all(|path| programs.contains_key(path)))?;
        Some((report, of))
    });
    let (mut rows, mut counts) = (String::new(), [0; 5]);
    for (report, [mended, buggy]) in pairs {
        let [of_mended, of_buggy] = [&mended, &buggy].map(|path| &programs[path]);
        let [alone, right] = [of_buggy, of_mended].map(Ran::alone);
        assert_eq!(right, "right", "{}", mended.display());
        let [mut of_tools, alarms] = [of_buggy, of_mended].map(Ran::found);
        let is_named = [found.contains(&buggy), !of_tools.is_empty(), !alarms.is_empty()];
        for (count, is) in counts.iter_mut().zip([true, alone == "right"].into_iter().chain(is_named)) {
            *count += usize::from(is);
        }
        of_tools.extend(of_buggy.hangs());
        let cell = |words: Vec<String>| if words.is_empty() { "–".to_owned() } else { words.join("; ") };
        let [buggy_tools, mended_tools] = [of_tools, alarms].map(cell);
        writeln!(rows, "| {report} | `{}` | {alone} | {buggy_tools} | {mended_tools} |", buggy.display()).unwrap();
    }
    let [all, right, emulator, tools, alarms] = counts;
    format!(
        "\n## On a GPU\n\n{gpu}; compute-sanitizer {sanitizer}.{ON_A_GPU}\n| reports with programs that the GPU runs | {all} |\n|---|---|\n\
         | the emulator has a fault at default on every schedule | {emulator} |\n\
         | a tool reports something | {tools} |\n\
         | the buggy program is right in all 22 runs | {right} |\n\
         | the mended program is right in all 22 runs | {all} |\n\
         | a tool reports something about the mended program | {alarms} |\n\n\
         | report | buggy program | alone | with a tool | mended program with a tool |\n|---|---|---|---|---|\n{rows}"
    )
}

/// An item of a list of suspected faults.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Suspected {
    item: String,
    says: String,
    /// Mended program, and the program that does what the item describes, relative to `tests`.
    programs: Option<[PathBuf; 2]>,
    verdict: String,
    #[serde(default)]
    note: String,
}

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

fn read<T: serde::de::DeserializeOwned>(name: &str) -> T {
    serde_json::from_str(&std::fs::read_to_string(tests().join(name)).unwrap()).unwrap()
}

fn reports() -> Vec<Report> {
    read("reported.json")
}

/// Verdicts at a level, each with its number of schedules.
fn verdicts(program: &Program, level: &str, schedules: impl Iterator<Item = String>) -> BTreeMap<String, usize> {
    let mut verdicts = BTreeMap::new();
    for schedule in schedules {
        let verdict = match run(program, level, schedule) {
            Ok((_, true)) => "right".to_owned(),
            Ok((_, false)) => "wrong memory".to_owned(),
            Err(fault) => fault.kind.to_string(),
        };
        *verdicts.entry(verdict).or_default() += 1;
    }
    verdicts
}

fn is_fault(verdict: &str) -> bool {
    !["right", "wrong memory"].contains(&verdict)
}

/// The section on the list of suspected faults.
fn suspected() -> String {
    let mut section = SUSPECTED.to_owned();
    for Suspected { item, says, programs, verdict, note } in read::<Vec<Suspected>>("suspected.json") {
        let (cells, name) = match programs {
            None => (["–"; 4].map(str::to_owned), "–".to_owned()),
            Some(programs) => {
                let [mended, suspect] = programs.each_ref().map(|path| Program::read(&tests().join(path)).unwrap());
                let levels = ["machine", "default", "strict"].map(|level| verdicts(&suspect, level, schedules()));
                let is_right = levels[1].keys().map(|verdict| verdict == "right").collect::<Vec<_>>();
                let right = verdicts(&mended, "default", schedules());
                assert!(is_right.iter().all(|&is_right| is_right == (verdict == "refuted")), "{item}: {verdict}?");
                let [machine, default, strict] = levels.each_ref().map(cell);
                ([machine, default, strict, cell(&right)], format!("`{}`", programs[1].display()))
            }
        };
        let [machine, default, strict, right] = cells;
        let verdict = if note.is_empty() { verdict } else { format!("{verdict}. {note}") };
        writeln!(section, "| {item} | {says} | {machine} | {default} | {strict} | {right} | {name} | {verdict} |")
            .unwrap();
    }
    section
}

fn page() -> String {
    let mut rows = String::new();
    let (mut left, mut notes) = (String::new(), String::new());
    let (mut run, mut found, mut somewhere, mut by_explore, mut stopped) = (0, BTreeSet::new(), 0, 0, 0);
    for Report { report, bug, programs, left: reason, note, fair_only, explored, unreported } in reports() {
        let Some(programs) = programs else {
            writeln!(left, "| {report} | {bug} | {} |", reason.expect("a report without programs says why")).unwrap();
            continue;
        };
        let [mended, buggy] = programs.each_ref().map(|path| Program::read(&tests().join(path)).unwrap());
        let most = if fair_only { 1 } else { usize::MAX };
        let [machine, default, strict] =
            ["machine", "default", "strict"].map(|level| verdicts(&buggy, level, schedules().take(most)));
        let right = verdicts(&mended, "default", schedules().take(most));
        assert!(
            default.keys().all(|verdict| is_fault(verdict)) || note.is_some(),
            "{report}: a note says why the bug is not found"
        );
        if let Some(note) = note {
            writeln!(notes, "| {report} | {bug} | {note} |").unwrap();
        }
        if !unreported {
            run += 1;
            if default.keys().all(|verdict| is_fault(verdict)) {
                found.insert(programs[1].clone());
            }
            let is_somewhere =
                [&machine, &default, &strict].iter().any(|each| each.keys().any(|verdict| is_fault(verdict)));
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
    writeln!(page, "| a fault at default on every schedule | {} |", found.len()).unwrap();
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
    page.push_str(&on_a_gpu(&found));
    page.push_str(&suspected());
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
