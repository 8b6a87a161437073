//! Writes or checks generated documents of the repository, either whole files or the section between two marks.

use std::fs;

use anyhow::{Context, ensure};

use crate::workspace;

/// How a regenerated document is treated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Write the document.
    Write,
    /// Fail if the document would change.
    Check,
}

/// Writes or checks a whole document of the repository.
pub fn whole(path: &str, text: &str, mode: Mode, command: &str) -> anyhow::Result<()> {
    if mode == Mode::Write {
        return write(path, text);
    }
    ensure!(read(path)? == text, "{path} is out of date: run `{command}`, review the result and commit it");
    Ok(())
}

/// Writes or checks the section of a document between the lines `<!-- begin NAME -->` and `<!-- end NAME -->`.
pub fn section(path: &str, name: &str, text: &str, mode: Mode, command: &str) -> anyhow::Result<()> {
    let old = read(path)?;
    let new =
        replaced(&old, name, text).with_context(|| format!("{path} has no marks `begin {name}` and `end {name}`"))?;
    if mode == Mode::Write {
        return write(path, &new);
    }
    ensure!(old == new, "section {name} of {path} is out of date: run `{command}`, review the result and commit it");
    Ok(())
}

/// Returns the document with `text` between the marks of the section `name`. `None`: the marks are missing.
fn replaced(document: &str, name: &str, text: &str) -> Option<String> {
    let (begin, end) = (format!("<!-- begin {name} -->\n"), format!("<!-- end {name} -->\n"));
    let (before, rest) = document.split_once(&begin)?;
    let (_, after) = rest.split_once(&end)?;
    Some([before, &begin, text, &end, after].concat())
}

/// Reads a document.
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
    fn only_text_between_the_marks_changes() {
        let document = "a\n<!-- begin x -->\nold\n<!-- end x -->\nb\n";
        assert_eq!(replaced(document, "x", "new\n").unwrap(), document.replace("old", "new"));
        assert_eq!(replaced(document, "x", "old\n").unwrap(), document);
        assert_eq!(replaced(document, "y", "new\n"), None);
    }
}
