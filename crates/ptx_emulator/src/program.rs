//! PTX files that say how they are launched and what the result must be. Such a file begins with `//!` lines that hold
//! one JSON object: the fields of a launch file (without `ptx`) and those of [`Outcome`].
//!
//! A program may also be an edit of another ([`Edit`]): a JSON file that names the other, the changes, and the result.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use serde_json::Value;

use crate::launch_json::{LaunchFile, Prepared};

/// A program with its launch.
#[derive(Clone, Debug)]
pub struct Program {
    /// Where it was read.
    pub path: PathBuf,
    /// The PTX, its head included.
    pub text: String,
    /// The launch.
    pub launch: LaunchFile,
    /// What must come of it.
    pub outcome: Outcome,
    /// The program that it is an edit of.
    pub edited: Option<PathBuf>,
}

/// A program that is another with some changes.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Edit {
    /// The other program; relative to this file.
    pub of: PathBuf,
    /// What the changes do.
    pub what: String,
    /// Changes of the text.
    #[serde(default)]
    pub edits: Vec<Replacement>,
    /// Launch as [`LaunchConfig::strict`](crate::LaunchConfig::strict) says.
    #[serde(default)]
    pub strict: bool,
    /// As [`Outcome::fault`].
    pub fault: Option<String>,
    /// As [`Outcome::schedules`].
    pub schedules: Option<Vec<String>>,
}

/// Text that stands at one place of a program, and what stands there instead.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs, reason = "the names say it")]
pub struct Replacement {
    pub from: String,
    pub to: String,
}

/// What must come of a program.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Outcome {
    /// The u32 words that buffers begin with afterwards.
    #[serde(default)]
    pub expect: BTreeMap<String, Vec<u32>>,
    /// Buffers whose bytes differ between devices, such as a tensor map.
    #[serde(default)]
    pub opaque: Vec<String>,
    /// The kind of fault, in kebab-case.
    pub fault: Option<String>,
    /// The kinds of the warnings, in the order of their first places.
    #[serde(default)]
    pub warnings: Vec<String>,
    /// The schedules that show the fault, if not all do.
    pub schedules: Option<Vec<String>>,
}

impl Outcome {
    const FIELDS: [&str; 5] = ["expect", "opaque", "fault", "warnings", "schedules"];
}

impl Program {
    /// Reads a file.
    pub fn read(path: &Path) -> Result<Program> {
        Program::try_read(path).with_context(|| path.display().to_string())
    }

    fn try_read(path: &Path) -> Result<Program> {
        let text = std::fs::read_to_string(path)?;
        if path.extension().is_some_and(|extension| extension == "json") {
            let edit: Edit = serde_json::from_str(&text)?;
            let of = path.parent().unwrap_or("".as_ref()).join(&edit.of);
            return edit.apply(Program::read(&of)?, path);
        }
        let head: String = text.lines().map_while(|line| line.strip_prefix("//!")).collect();
        let head: serde_json::Map<String, Value> = serde_json::from_str(&head)?;
        let (outcome, launch) = head.into_iter().partition(|(name, _)| Outcome::FIELDS.contains(&name.as_str()));
        Ok(Program {
            path: path.to_owned(),
            launch: serde_json::from_value(Value::Object(launch))?,
            outcome: serde_json::from_value(Value::Object(outcome))?,
            text,
            edited: None,
        })
    }

    /// Reads every program of a folder, by name: the `.ptx` files, and the `.json` files that are edits.
    pub fn read_all(folder: &Path) -> Result<Vec<Program>> {
        let entries = std::fs::read_dir(folder).with_context(|| folder.display().to_string())?;
        let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
        paths.retain(|path| path.extension().is_some_and(|extension| extension == "ptx" || extension == "json"));
        paths.sort();
        paths.iter().map(|path| Program::read(path)).collect()
    }

    /// The file's name.
    pub fn name(&self) -> std::borrow::Cow<'_, str> {
        self.path.file_name().unwrap_or_default().to_string_lossy()
    }

    /// The folder of the file, which its paths are relative to.
    pub fn folder(&self) -> &Path {
        self.path.parent().unwrap_or("".as_ref())
    }

    /// Loads everything that the launch names.
    pub fn prepare(&self) -> Result<Prepared> {
        let prepared = self.launch.prepare_with(&self.text, self.folder());
        prepared.with_context(|| self.path.display().to_string())
    }
}

impl Edit {
    /// The program in `path` that is `program` with these changes.
    fn apply(self, program: Program, path: &Path) -> Result<Program> {
        let Program { mut text, mut launch, path: of, .. } = program;
        for Replacement { from, to } in &self.edits {
            ensure!(text.matches(from.as_str()).count() == 1, "{} has not exactly one {from:?}", of.display());
            text = text.replace(from, to);
        }
        launch.strict |= self.strict;
        let outcome = Outcome { fault: self.fault, schedules: self.schedules, ..Outcome::default() };
        Ok(Program { path: path.to_owned(), text, launch, outcome, edited: Some(of) })
    }
}
