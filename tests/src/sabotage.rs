//! Tests with broken PTX: instructions are removed or changed, and each change must cause a fault. Only then does a
//! run without faults prove anything.

use nvfp4::Error;
use nvfp4::backend::emulated::{Fault, FaultKind};
use rayon::prelude::*;

use crate::{is_full, sampled};

/// Number of instructions of a kind that a reduced run removes, besides the spare ones.
const SAMPLE: usize = 1;

/// A change applied to each instruction of an entry that begins with some text, one at a time.
pub struct Sabotage {
    /// Beginning of the instruction, without its predicate.
    pub instruction: &'static str,
    /// Replacement text.
    pub changed: &'static str,
    /// Minimum number of matching instructions.
    pub least: usize,
    /// Number of instructions that can be changed unnoticed. The test says why.
    pub spare: usize,
}

impl Sabotage {
    /// Removes each instruction.
    pub const fn leave_out(instruction: &'static str, least: usize) -> Self {
        Self { instruction, changed: "", least, spare: 0 }
    }

    /// Makes each wait on an mbarrier return at once.
    pub const fn do_not_wait(least: usize) -> Self {
        Self { changed: "setp.eq.u32 p, 0, 0;", ..Self::leave_out("mbarrier.try_wait", least) }
    }

    /// Allows `spare` of the changes to stay unnoticed.
    pub const fn spare(self, spare: usize) -> Self {
        Self { spare, ..self }
    }
}

/// Returns the lines of an entry that begin with `instruction`, each with its line index in the text.
pub fn lines_of<'p>(ptx: &'p str, entry: &str, instruction: &str) -> Vec<(usize, &'p str)> {
    let entry = format!(".entry {entry}(");
    let lines = ptx.lines().enumerate().skip_while(|(_, line)| !line.contains(&entry));
    let lines = lines.take_while(|(_, line)| !line.contains("// -- End function"));
    lines.filter(|(_, line)| line.trim_start().starts_with(instruction)).collect()
}

/// Returns the text with the given lines replaced.
pub fn changed(ptx: &str, changes: &[(usize, &str)]) -> String {
    let mut lines: Vec<_> = ptx.lines().collect();
    for &(line, changed) in changes {
        lines[line] = changed;
    }
    lines.join("\n")
}

/// Returns the text with only those entries that `is_kept` accepts by name, which is parsed faster.
pub fn only_entries(ptx: &str, is_kept: impl Fn(&str) -> bool) -> String {
    let (mut lines, mut text) = (ptx.lines(), String::new());
    while let Some(line) = lines.next() {
        let name = line.strip_prefix(".visible .entry ").map(|name| name.trim_end_matches(['(', ')']));
        if name.is_some_and(|name| !is_kept(name)) {
            lines.find(|line| line.contains("// -- End function"));
            assert_eq!(lines.next(), Some("}"));
        } else {
            text.extend([line, "\n"]);
        }
    }
    text
}

/// `true` if a launch was stopped by a fault, or if its output is wrong.
pub fn is_found<T>(result: Result<T, Error>, is_wrong: impl FnOnce(T) -> bool) -> bool {
    match result {
        Ok(output) => is_wrong(output),
        Err(error) => {
            let fault = error.fault::<Fault>().unwrap_or_else(|| panic!("{error}"));
            assert_ne!(fault.kind, FaultKind::BadLaunch, "{fault}");
            true
        }
    }
}

/// Returns the fault that stopped a launch.
pub fn fault_of<T>(result: Result<T, Error>) -> Option<Fault> {
    result.err().map(|error| error.fault::<Fault>().unwrap_or_else(|| panic!("{error}")).clone())
}

/// Checks that every sabotage of an entry is found, except the spare ones, which must not be found. `is_found` runs a PTX text, and returns
/// `true` if a fault stops it or its output is wrong.
pub fn check_sabotages(ptx: &str, entry: &str, sabotages: &[Sabotage], is_found: impl Fn(&str) -> bool + Sync) {
    check(ptx, entry, sabotages, usize::MAX, is_found);
}

/// Like [`check_sabotages`], but tries only a sample of the instructions unless [`is_full`].
pub fn check_sampled_sabotages(ptx: &str, entry: &str, sabotages: &[Sabotage], is_found: impl Fn(&str) -> bool + Sync) {
    check(ptx, entry, sabotages, if is_full() { usize::MAX } else { SAMPLE }, is_found);
}

/// Tries up to `sample` instructions of a kind, besides the spare ones.
fn check(ptx: &str, entry: &str, sabotages: &[Sabotage], sample: usize, is_found: impl Fn(&str) -> bool + Sync) {
    assert!(!is_found(ptx), "{entry}: the unchanged text must run without a fault and be right");
    let mut wrong = Vec::new();
    for &Sabotage { instruction, changed: text, least, spare } in sabotages {
        let lines = lines_of(ptx, entry, instruction);
        assert!(lines.len() >= least, "found {} of `{instruction}`, expected at least {least}", lines.len());
        let tried = if lines.len() <= sample { lines.clone() } else { sampled(lines.clone(), sample + spare) };
        let is_whole = tried.len() == lines.len();
        let unnoticed: Vec<_> =
            tried.into_par_iter().filter(|(line, _)| !is_found(&changed(ptx, &[(*line, text)]))).collect();
        if unnoticed.len() > spare || is_whole && unnoticed.len() < spare {
            wrong.push(format!("`{instruction}`: {} unnoticed, {spare} allowed: {unnoticed:#?}", unnoticed.len()));
        }
    }
    assert!(wrong.is_empty(), "{entry}: {}", wrong.join("\n"));
}
