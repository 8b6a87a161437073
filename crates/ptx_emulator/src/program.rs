//! A PTX file that says itself how it is launched and what must come of it. It begins with `//!` lines that hold one
//! JSON object: a launch file's fields (without `ptx`), and those of [`Program`] that are no part of a launch.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Deserialize;
use serde_json::Value;

use crate::launch_json::{LaunchFile, Prepared};

/// Such a file.
#[derive(Clone, Debug)]
pub struct Program {
    /// Where it was read.
    pub path: PathBuf,
    /// The PTX, its head included.
    pub text: String,
    /// The launch.
    pub launch: LaunchFile,
    /// What else the head says.
    pub outcome: Outcome,
}

/// What must come of a program.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Outcome {
    /// The u32 words that buffers begin with afterwards.
    #[serde(default)]
    pub expect: BTreeMap<String, Vec<u32>>,
    /// Buffers that hold objects whose bytes are the device's own, such as a tensor map.
    #[serde(default)]
    pub opaque: Vec<String>,
    /// The kind of fault, in kebab-case.
    pub fault: Option<String>,
    /// The schedules that show the fault, where not all do.
    pub schedules: Option<Vec<String>>,
}

impl Outcome {
    const FIELDS: [&str; 4] = ["expect", "opaque", "fault", "schedules"];
}

impl Program {
    /// Reads a file.
    pub fn read(path: &Path) -> Result<Program> {
        Program::try_read(path).with_context(|| path.display().to_string())
    }

    fn try_read(path: &Path) -> Result<Program> {
        let text = std::fs::read_to_string(path)?;
        let head: String = text.lines().map_while(|line| line.strip_prefix("//!")).collect();
        let head: serde_json::Map<String, Value> = serde_json::from_str(&head)?;
        let (outcome, launch) = head.into_iter().partition(|(name, _)| Outcome::FIELDS.contains(&name.as_str()));
        Ok(Program {
            path: path.to_owned(),
            launch: serde_json::from_value(Value::Object(launch))?,
            outcome: serde_json::from_value(Value::Object(outcome))?,
            text,
        })
    }

    /// Reads every `.ptx` file of a folder, by name.
    pub fn read_all(folder: &Path) -> Result<Vec<Program>> {
        let entries = std::fs::read_dir(folder).with_context(|| folder.display().to_string())?;
        let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
        paths.retain(|path| path.extension().is_some_and(|extension| extension == "ptx"));
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
