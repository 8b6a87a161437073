//! PTX files that state their launch and their expected result. Such files begin with `//!` lines that hold one JSON
//! object: the fields of a launch file (without `ptx`) and the fields of [`Outcome`].
//!
//! A program may also be an edit of another program ([`Edit`]): a JSON file with the other program's path, the changes
//! and the result.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use serde_json::Value;

use crate::launch_json::{LaunchFile, Prepared};

/// A program with its launch.
#[derive(Clone, Debug)]
pub struct Program {
    /// Path of the file.
    pub path: PathBuf,
    /// PTX text, including its `//!` lines.
    pub text: String,
    /// Launch of the program.
    pub launch: LaunchFile,
    /// Expected result.
    pub outcome: Outcome,
    /// Path of the original program, if this program is an edit.
    pub edited: Option<PathBuf>,
}

/// A program defined by changes to another program.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Edit {
    /// The other program; relative to this file.
    pub of: PathBuf,
    /// Description of the changes.
    pub what: String,
    /// Replacements in the text.
    #[serde(default)]
    pub edits: Vec<Replacement>,
    /// `true`: launch under [`LaunchConfig::strict`](crate::LaunchConfig::strict).
    #[serde(default)]
    pub strict: bool,
    /// Same as [`Outcome::expect`]. `None`: the expected buffers are the other program's.
    pub expect: Option<BTreeMap<String, Vec<u32>>>,
    /// Same as [`Outcome::fault`].
    pub fault: Option<String>,
    /// Same as [`Outcome::warnings`].
    #[serde(default)]
    pub warnings: Vec<String>,
    /// Same as [`Outcome::schedules`].
    pub schedules: Option<Vec<String>>,
}

/// A text that occurs once in a program, and its replacement.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs, reason = "the names say it")]
pub struct Replacement {
    pub from: String,
    pub to: String,
}

/// Expected result of a program.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Outcome {
    /// Expected u32 words at the start of each buffer after the launch.
    #[serde(default)]
    pub expect: BTreeMap<String, Vec<u32>>,
    /// Buffers whose bytes differ between devices, such as a tensor map.
    #[serde(default)]
    pub opaque: Vec<String>,
    /// Kind of the expected fault, in kebab-case.
    pub fault: Option<String>,
    /// Kinds of the expected warnings, in the order of their first places.
    #[serde(default)]
    pub warnings: Vec<String>,
    /// Schedules that show the fault. `None`: all schedules.
    pub schedules: Option<Vec<String>>,
}

impl Outcome {
    const FIELDS: [&str; 5] = ["expect", "opaque", "fault", "warnings", "schedules"];
}

impl Program {
    /// Reads a program from a file.
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

    /// Reads every program of a folder in the order of names: `.ptx` files, and `.json` files with edits.
    pub fn read_all(folder: &Path) -> Result<Vec<Program>> {
        let entries = std::fs::read_dir(folder).with_context(|| folder.display().to_string())?;
        let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
        paths.retain(|path| path.extension().is_some_and(|extension| extension == "ptx" || extension == "json"));
        paths.sort();
        paths.iter().map(|path| Program::read(path)).collect()
    }

    /// Name of the file.
    pub fn name(&self) -> std::borrow::Cow<'_, str> {
        self.path.file_name().unwrap_or_default().to_string_lossy()
    }

    /// Folder of the file. Paths in the file are relative to it.
    pub fn folder(&self) -> &Path {
        self.path.parent().unwrap_or("".as_ref())
    }

    /// Loads all files and buffers of the launch.
    pub fn prepare(&self) -> Result<Prepared> {
        let prepared = self.launch.prepare_with(&self.text, self.folder());
        prepared.with_context(|| self.path.display().to_string())
    }
}

impl Edit {
    /// Applies the changes to `program`. `path` is the path of the edit.
    fn apply(self, program: Program, path: &Path) -> Result<Program> {
        let Program { mut text, mut launch, path: of, outcome, .. } = program;
        for Replacement { from, to } in &self.edits {
            ensure!(
                text.matches(from.as_str()).count() == 1,
                "{}: expected exactly one occurrence of {from:?}",
                of.display()
            );
            text = text.replace(from, to);
        }
        launch.strict |= self.strict;
        let Edit { expect, fault, warnings, schedules, .. } = self;
        let expect = expect.unwrap_or(outcome.expect);
        let outcome = Outcome { expect, fault, warnings, schedules, ..Outcome::default() };
        Ok(Program { path: path.to_owned(), text, launch, outcome, edited: Some(of) })
    }
}
