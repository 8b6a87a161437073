//! Documents in the repository that a command writes, whole or between two marks: renewed, or compared.

use std::fs;

use anyhow::{Context, ensure};

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
    ensure!(read(path)? == text, "{path} is not what `{command}` makes of the present state: run it, look, commit");
    Ok(())
}

/// Writes or compares what stands between the lines `<!-- begin NAME -->` and `<!-- end NAME -->` of a document.
pub fn section(path: &str, name: &str, text: &str, mode: Mode, command: &str) -> anyhow::Result<()> {
    let old = read(path)?;
    let (begin, end) = (format!("<!-- begin {name} -->\n"), format!("<!-- end {name} -->\n"));
    let parts = old.split_once(&begin).and_then(|(before, rest)| Some((before, rest.split_once(&end)?)));
    let (before, (present, after)) = parts.with_context(|| format!("{path} lacks the marks of the section {name}"))?;
    if mode == Mode::Write {
        return write(path, &format!("{before}{begin}{text}{end}{after}"));
    }
    ensure!(
        present == text,
        "the section {name} of {path} is not what `{command}` makes of the present state: run it, look, commit"
    );
    Ok(())
}

/// A document's text.
pub fn read(path: &str) -> anyhow::Result<String> {
    fs::read_to_string(crate::workspace().join(path)).with_context(|| format!("cannot read {path}"))
}

fn write(path: &str, text: &str) -> anyhow::Result<()> {
    fs::write(crate::workspace().join(path), text).with_context(|| format!("cannot write {path}"))
}
