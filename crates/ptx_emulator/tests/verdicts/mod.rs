//! Verdicts on programs, for the pages that list facts and reports.

use std::collections::BTreeMap;

use ptx_emulator::program::Program;
use ptx_emulator::{Fault, Report};

/// The schedules of the pages.
pub fn schedules() -> impl Iterator<Item = String> {
    ["fair".into(), "worst".into()].into_iter().chain((1..=20).map(|seed| format!("seed:{seed}")))
}

/// Runs a program at a level on a schedule. The result says whether memory is right.
pub fn run(program: &Program, level: &str, schedule: String) -> Result<(Report, bool), Fault> {
    let mut program = program.clone();
    (program.launch.sanitize, program.launch.strict) = (level != "machine", level == "strict");
    program.launch.schedule = Some(schedule);
    let mut prepared = program.prepare().unwrap_or_else(|error| panic!("{}: {error:#}", program.path.display()));
    // With several threads, the order of racing clusters depends on timing.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    let report = pool.install(|| prepared.run())?;
    let is_right = program.outcome.expect.iter().all(|(name, want)| {
        let got = prepared.device.download::<u32>(prepared.buffers[name]);
        got[..want.len()] == want[..]
    });
    Ok((report, is_right))
}

/// The verdicts as a cell of a table.
pub fn cell(verdicts: &BTreeMap<String, usize>) -> String {
    match verdicts.len() {
        1 => verdicts.keys().next().cloned().unwrap_or_default(),
        _ => verdicts.iter().map(|(verdict, times)| format!("{verdict} {times}")).collect::<Vec<_>>().join(", "),
    }
}
