//! Documents in the repository that a command writes, whole or between two marks: renewed, or compared.

use std::fs;

use anyhow::{Context, ensure};

use crate::workspace;

/// What to do with a document that is made again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Write it.
    Write,
    /// Fail if it would change.
    Check,
}

/// Writes or compares a document of the repository.
pub fn whole(path: &str, text: &str, mode: Mode, command: &str) -> anyhow::Result<()> {
    if mode == Mode::Write {
        return write(path, text);
    }
    ensure!(read(path)? == text, "{path} is not what `{command}` makes of it now: run that, look, commit");
    Ok(())
}

/// Writes or compares a section of a document: what stands between the lines `<!-- begin NAME -->` and `<!-- end NAME -->`.
pub fn section(path: &str, name: &str, text: &str, mode: Mode, command: &str) -> anyhow::Result<()> {
    let old = read(path)?;
    let new = replaced(&old, name, text).with_context(|| format!("{path} lacks the marks of the section {name}"))?;
    if mode == Mode::Write {
        return write(path, &new);
    }
    ensure!(old == new, "the section {name} of {path} is not what `{command}` makes of it now: run that, look, commit");
    Ok(())
}

/// A document with another text between the marks of a section.
fn replaced(document: &str, name: &str, text: &str) -> Option<String> {
    let (begin, end) = (format!("<!-- begin {name} -->\n"), format!("<!-- end {name} -->\n"));
    let (before, rest) = document.split_once(&begin)?;
    let (_, after) = rest.split_once(&end)?;
    Some([before, &begin, text, &end, after].concat())
}

/// A document's text.
pub fn read(path: &str) -> anyhow::Result<String> {
    fs::read_to_string(workspace::root().join(path)).with_context(|| format!("cannot read {path}"))
}

fn write(path: &str, text: &str) -> anyhow::Result<()> {
    fs::write(workspace::root().join(path), text).with_context(|| format!("cannot write {path}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_between_the_marks_changes() {
        let document = "a\n<!-- begin x -->\nold\n<!-- end x -->\nb\n";
        assert_eq!(replaced(document, "x", "new\n").unwrap(), document.replace("old", "new"));
        assert_eq!(replaced(document, "x", "old\n").unwrap(), document);
        assert_eq!(replaced(document, "y", "new\n"), None);
    }
}
