//! Broken PTX: instructions left out or changed, so that a kernel without faults means something.

use nvfp4::Error;
use nvfp4::backend::emulated::Fault;

/// A change of all instructions of an entry that begin alike, one at a time.
pub struct Sabotage {
    /// How the instruction begins, but for its predicate.
    pub instruction: &'static str,
    /// What stands in its place.
    pub changed: &'static str,
    /// How many of them there are at least.
    pub least: usize,
    /// How many may be changed without a fault, since a later one makes up for them.
    pub spare: usize,
}

impl Sabotage {
    /// Leaves instructions out.
    pub const fn leave_out(instruction: &'static str, least: usize) -> Self {
        Self { instruction, changed: "", least, spare: 0 }
    }

    /// Makes waits for barriers return at once.
    pub const fn do_not_wait(least: usize) -> Self {
        Self { changed: "setp.eq.u32 p, 0, 0;", ..Self::leave_out("mbarrier.try_wait", least) }
    }

    /// As before, but so many of them do no harm.
    pub const fn spare(self, spare: usize) -> Self {
        Self { spare, ..self }
    }
}

/// The lines of an entry that begin with this, each with its number in the text.
pub fn lines_of<'p>(ptx: &'p str, entry: &str, instruction: &str) -> Vec<(usize, &'p str)> {
    let entry = format!(".entry {entry}(");
    let lines = ptx.lines().enumerate().skip_while(|(_, line)| !line.contains(&entry));
    let lines = lines.take_while(|(_, line)| !line.contains("// -- End function"));
    lines.filter(|(_, line)| line.trim_start().starts_with(instruction)).collect()
}

/// The text with some lines changed.
pub fn changed(ptx: &str, changes: &[(usize, &str)]) -> String {
    let mut lines: Vec<_> = ptx.lines().collect();
    for &(line, changed) in changes {
        lines[line] = changed;
    }
    lines.join("\n")
}

/// The fault that stopped a launch.
pub fn fault_of<T>(result: Result<T, Error>) -> Option<Fault> {
    result.err().map(|error| error.fault().unwrap_or_else(|| panic!("{error}")).clone())
}

/// Checks that every sabotage of an entry makes a fault. `run` runs a text.
pub fn check_sabotages(ptx: &str, entry: &str, sabotages: &[Sabotage], run: impl Fn(&str) -> Option<Fault>) {
    assert_eq!(run(ptx), None, "the text as it is");
    let mut unnoticed = Vec::new();
    for &Sabotage { instruction, changed: text, least, spare } in sabotages {
        let lines = lines_of(ptx, entry, instruction);
        assert!(lines.len() >= least, "{} of {instruction}", lines.len());
        let found: Vec<_> = lines.iter().filter(|(line, _)| run(&changed(ptx, &[(*line, text)])).is_none()).collect();
        if found.len() > spare {
            unnoticed.extend(found.into_iter().copied());
        }
    }
    assert!(unnoticed.is_empty(), "may be left out in {entry}: {unnoticed:#?}");
}
