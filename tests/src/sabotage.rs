//! Tests with broken PTX: instructions are removed or changed, and each change must cause a fault. Only then does a
//! run without faults prove anything.

use nvfp4::Error;
use nvfp4::backend::emulated::Fault;

/// A change applied to each instruction of an entry that begins with some text, one at a time.
pub struct Sabotage {
    /// Beginning of the instruction, without its predicate.
    pub instruction: &'static str,
    /// Replacement text.
    pub changed: &'static str,
    /// Minimum number of matching instructions.
    pub least: usize,
    /// Number of instructions that may be changed without a fault, because a later instruction makes up for them.
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

    /// Allows `spare` of the changes to cause no fault.
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

/// Returns the fault that stopped a launch.
pub fn fault_of<T>(result: Result<T, Error>) -> Option<Fault> {
    result.err().map(|error| error.fault().unwrap_or_else(|| panic!("{error}")).clone())
}

/// Checks that every sabotage of an entry causes a fault. `run` runs a PTX text.
pub fn check_sabotages(ptx: &str, entry: &str, sabotages: &[Sabotage], run: impl Fn(&str) -> Option<Fault>) {
    assert_eq!(run(ptx), None, "the unchanged text must run without a fault");
    let mut unnoticed = Vec::new();
    for &Sabotage { instruction, changed: text, least, spare } in sabotages {
        let lines = lines_of(ptx, entry, instruction);
        assert!(lines.len() >= least, "found {} of `{instruction}`, expected at least {least}", lines.len());
        let found: Vec<_> = lines.iter().filter(|(line, _)| run(&changed(ptx, &[(*line, text)])).is_none()).collect();
        if found.len() > spare {
            unnoticed.extend(found.into_iter().copied());
        }
    }
    assert!(unnoticed.is_empty(), "changes of {entry} that caused no fault: {unnoticed:#?}");
}
