//! Runs every program of `tests/pass` and `tests/fail`. Each program of `tests/fail` has a corrected twin in
//! `tests/pass`: the program that it is an edit of, or the program with the same name.
//!
//! Every schedule must give the same result. The report or fault of the fair schedule is stored beside the program;
//! `BLESS=1 cargo test` rewrites it.

mod manual;

use std::path::Path;

use ptx_emulator::program::Program;
use ptx_emulator::{Fault, FaultKind, Report};

const SCHEDULES: [&str; 5] = ["fair", "worst", "seed:1", "seed:2", "seed:3"];

fn programs(folder: &str) -> Vec<Program> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(folder);
    Program::read_all(&folder).unwrap_or_else(|error| panic!("{error:#}"))
}

/// Runs a program on a schedule and checks its buffers.
fn run(program: &Program, schedule: &str) -> Result<Report, Fault> {
    let mut program = program.clone();
    program.launch.schedule = Some(schedule.into());
    let mut prepared = program.prepare().unwrap_or_else(|error| panic!("{error:#}"));
    let report = prepared.run()?;
    for (name, want) in &program.outcome.expect {
        let got = prepared.device.download::<u32>(prepared.buffers[name]);
        assert_eq!(got[..want.len()], want[..], "{} on schedule {schedule}: `{name}`", program.path.display());
    }
    Ok(report)
}

/// Like [`run`], on one thread. With several threads, the order of racing clusters depends on timing.
fn run_on_one_thread(program: &Program, schedule: &str) -> Result<Report, Fault> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    pool.install(|| run(program, schedule))
}

fn check_golden(program: &Program, extension: &str, text: &str) {
    let path = program.path.with_extension(extension);
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(&path, text).unwrap();
    }
    let want = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(text.trim_end(), want.trim_end(), "{}: run with BLESS=1 if this is right", path.display());
}

#[test]
fn correct_programs_pass_on_every_schedule() {
    for program in programs("pass") {
        for schedule in SCHEDULES {
            match run_on_one_thread(&program, schedule) {
                Ok(report) => {
                    let kinds: Vec<_> = report.warnings.iter().map(|warning| warning.fault.kind.to_string()).collect();
                    let (at, expected) = (program.path.display(), &program.outcome.warnings);
                    if schedule == "fair" {
                        assert_eq!(kinds, *expected, "{at}: {report}");
                        check_golden(&program, "report", &report.to_string());
                    }
                    // Another schedule may avoid the situation that the warning is about.
                    assert!(kinds.iter().all(|kind| expected.contains(kind)), "{at} on schedule {schedule}: {report}");
                }
                Err(fault) => panic!("{} on schedule {schedule}: {fault}", program.path.display()),
            }
        }
    }
}

/// Runs each feature's programs on every schedule; `tests/manual` derives the expected contents of memory.
macro_rules! features_follow_the_manual {
    ($($feature:ident)*) => {$(
        #[test]
        fn $feature() {
            for program in manual::$feature::programs() {
                for schedule in SCHEDULES {
                    if let Err(fault) = run(&program, schedule) {
                        panic!("{} on schedule {schedule}: {fault}\n{}", program.path.display(), program.text);
                    }
                }
            }
        }
    )*};
}

mod features_follow_the_manual {
    use super::*;

    features_follow_the_manual! {
        block_scales bulk_copies clusters cp_async dependent_launches fragments launch_control mbarriers multicast sparse
        tcgen05_copies tcgen05_mma tcgen05_pairs tcgen05_registers tensor_copies tensor_reductions tensormap_replace wgmma wmma
    }
}

#[test]
fn faulty_programs_fail_on_every_schedule() {
    for program in programs("fail") {
        let all = SCHEDULES.map(String::from).to_vec();
        for schedule in program.outcome.schedules.as_ref().unwrap_or(&all) {
            match run_on_one_thread(&program, schedule) {
                Ok(_) => panic!("{} on schedule {schedule}: no fault", program.path.display()),
                Err(fault) => {
                    let at = program.path.display();
                    assert_eq!(
                        Some(fault.kind.to_string()),
                        program.outcome.fault,
                        "{at} on schedule {schedule}: {fault}"
                    );
                    if schedule == "fair" {
                        check_golden(&program, "fault", &fault.to_string());
                    }
                }
            }
        }
    }
}

#[test]
fn every_faulty_program_has_a_corrected_twin() {
    let canonical = |path: &Path| path.canonicalize().unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let pass: Vec<_> = programs("pass").iter().map(|p| canonical(&p.path)).collect();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/pass");
    for program in programs("fail") {
        let twin = program.edited.unwrap_or_else(|| folder.join(program.path.file_name().unwrap()));
        assert!(pass.contains(&canonical(&twin)), "{} is not a program of tests/pass", twin.display());
    }
}

#[test]
fn every_fault_kind_has_a_failing_program() {
    let shown: Vec<_> = programs("fail").into_iter().filter_map(|program| program.outcome.fault).collect();
    let missing: Vec<_> = FaultKind::ALL.iter().filter(|kind| !shown.contains(&kind.to_string())).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn same_seed_gives_the_same_report() {
    for program in programs("pass") {
        assert_eq!(run(&program, "seed:7").unwrap(), run(&program, "seed:7").unwrap(), "{}", program.path.display());
    }
}

#[test]
fn number_of_threads_does_not_change_reports() {
    for program in programs("pass") {
        let report = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| run(&program, "seed:5").unwrap())
        };
        assert_eq!(report(1), report(4), "{}", program.path.display());
    }
}

#[test]
fn unsupported_instruction_is_not_a_kernel_fault() {
    for program in programs("fail").iter().filter(|p| p.outcome.fault.as_deref() == Some("unsupported")) {
        let fault = run(program, "fair").unwrap_err();
        assert!(fault.kind == FaultKind::Unsupported && fault.to_string().starts_with("unsupported: "));
    }
}
