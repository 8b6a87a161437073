//! Runs every program of `tests/pass` and `tests/fail`. A program begins with `//!` lines that hold one JSON object:
//! a launch file's fields (without `ptx`), and
//!
//! * `expect`: buffers and the u32 words they hold afterwards (`tests/pass`);
//! * `fault`: the kind of fault (`tests/fail`). Its mended twin has the same name in `tests/pass`.
//!
//! * `schedules`: those that show the fault, where not all do.
//!
//! Every schedule must give the same answer. The report or fault of the fair one is kept beside the program;
//! `BLESS=1 cargo test` rewrites it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use ptx_emulator::launch_json::LaunchFile;
use ptx_emulator::{Fault, FaultKind, Report};
use serde_json::Value;

const SCHEDULES: [&str; 5] = ["fair", "worst", "seed:1", "seed:2", "seed:3"];

struct Program {
    path: PathBuf,
    text: String,
    launch: LaunchFile,
    expect: BTreeMap<String, Vec<u32>>,
    fault: Option<String>,
    schedules: Vec<String>,
}

fn programs(folder: &str) -> Vec<Program> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(folder);
    let mut paths: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
    paths.retain(|p| p.extension().is_some_and(|e| e == "ptx"));
    paths.sort();
    paths.into_iter().map(read).collect()
}

fn read(path: PathBuf) -> Program {
    let text = std::fs::read_to_string(&path).unwrap();
    let header: String = text.lines().map_while(|l| l.strip_prefix("//!")).collect();
    let mut header: Value = serde_json::from_str(&header).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let fields = header.as_object_mut().unwrap();
    let expect = fields.remove("expect").map(|v| serde_json::from_value(v).unwrap()).unwrap_or_default();
    let fault = fields.remove("fault").map(|v| serde_json::from_value(v).unwrap());
    let schedules = fields.remove("schedules").map(|v| serde_json::from_value(v).unwrap());
    let schedules = schedules.unwrap_or_else(|| SCHEDULES.map(String::from).to_vec());
    let launch = serde_json::from_value(header).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    Program { path, text, launch, expect, fault, schedules }
}

impl Program {
    fn run(&self, schedule: &str) -> Result<Report, Fault> {
        let mut launch = self.launch.clone();
        launch.schedule = Some(schedule.into());
        let at = || format!("{} on schedule {schedule}", self.path.display());
        let prepared = launch.prepare_with(&self.text, self.path.parent().unwrap());
        let mut prepared = prepared.unwrap_or_else(|e| panic!("{}: {e:#}", at()));
        let report = prepared.run()?;
        for (name, want) in &self.expect {
            let got = prepared.device.download::<u32>(prepared.buffers[name]);
            assert_eq!(got[..want.len()], want[..], "{}: buffer `{name}`", at());
        }
        Ok(report)
    }

    fn golden(&self, extension: &str, text: &str) {
        let path = self.path.with_extension(extension);
        if std::env::var_os("BLESS").is_some() {
            std::fs::write(&path, text).unwrap();
        }
        let want = std::fs::read_to_string(&path).unwrap_or_default();
        assert_eq!(text.trim_end(), want.trim_end(), "{}: run with BLESS=1 if this is right", path.display());
    }
}

#[test]
fn correct_programs_pass_on_every_schedule() {
    for program in programs("pass") {
        for schedule in SCHEDULES {
            match program.run(schedule) {
                Ok(report) if schedule == "fair" => program.golden("report", &report.to_string()),
                Ok(_) => {}
                Err(fault) => panic!("{} on schedule {schedule}: {fault}", program.path.display()),
            }
        }
    }
}

#[test]
fn faulty_programs_fail_on_every_schedule() {
    for program in programs("fail") {
        for schedule in &program.schedules {
            match program.run(schedule) {
                Ok(_) => panic!("{} on schedule {schedule}: no fault", program.path.display()),
                Err(fault) => {
                    let at = program.path.display();
                    assert_eq!(Some(fault.kind.to_string()), program.fault, "{at} on schedule {schedule}: {fault}");
                    if schedule == "fair" {
                        program.golden("fault", &fault.to_string());
                    }
                }
            }
        }
    }
}

#[test]
fn every_faulty_program_has_a_mended_twin() {
    let pass: Vec<_> = programs("pass").iter().map(|p| p.path.file_name().unwrap().to_owned()).collect();
    for program in programs("fail") {
        let name = program.path.file_name().unwrap();
        assert!(pass.iter().any(|p| p == name), "tests/pass/{} is missing", name.display());
    }
}

#[test]
fn the_same_seed_gives_the_same_report() {
    for program in programs("pass") {
        assert_eq!(program.run("seed:7").unwrap(), program.run("seed:7").unwrap(), "{}", program.path.display());
    }
}

#[test]
fn the_number_of_threads_changes_nothing() {
    for program in programs("pass") {
        let run = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| program.run("seed:5").unwrap())
        };
        assert_eq!(run(1), run(4), "{}", program.path.display());
    }
}

#[test]
fn unsupported_is_no_fault_of_the_kernel() {
    for program in programs("fail").iter().filter(|p| p.fault.as_deref() == Some("unsupported")) {
        let fault = program.run("fair").unwrap_err();
        assert!(fault.kind == FaultKind::Unsupported && fault.to_string().starts_with("unsupported: "));
    }
}
