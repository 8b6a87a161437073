//! Shapes by name: built-in shapes, and shapes of a JSON file.
//!
//! A file contains one entry or a list of entries; `FILE.json#NAME` selects an entry of a list:
//!
//! ```json
//! {"name": "mine", "op": "gated", "groups": [[80, 4096, 7168], [0, 4096, 7168]]}
//! ```
//!
//! Each group is `[M, N, K]`.

use std::path::Path;
use std::sync::LazyLock;

use serde::Deserialize;

use crate::error::Error;
use crate::files::read_bounded;
use crate::generate::Generator;
use crate::problem::{Group, GroupedProblem, Op, TokenDtype};

/// A problem in a file of shapes: its sizes, and published figures for it.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shape {
    /// Name of the shape; empty if the file gives no name.
    #[serde(default)]
    pub name: String,
    /// Operation.
    pub op: Op,
    /// Sizes of the groups.
    pub groups: Vec<Group>,
    /// Default generator of inputs.
    #[serde(default)]
    pub input: Generator,
    /// Speed of light on a B200 according to the organizers of the kernel competition, in µs.
    pub b200_light_us: Option<f64>,
    /// Time of the fastest public kernel on a B200, in µs (repository gau-nernst/gpu-mode-kernels).
    pub b200_best_public_us: Option<f64>,
    /// Free-form note.
    #[serde(default, rename = "note")]
    _note: serde::de::IgnoredAny,
}

impl Shape {
    /// Returns the problem of this shape.
    ///
    /// # Errors
    /// Returns the errors of [`GroupedProblem::new`].
    pub fn problem(&self, out_dtype: TokenDtype) -> Result<GroupedProblem, Error> {
        GroupedProblem::new(self.op, out_dtype, self.groups.clone())
    }
}

impl<'de> Deserialize<'de> for Group {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let [m, n, k] = Deserialize::deserialize(deserializer)?;
        Ok(Self { m, n, k })
    }
}

/// Returns the built-in shapes: shapes of the GPU MODE × NVIDIA NVFP4 kernel competition (`dual-*`, `group-*`), the
/// gated operation on the competition's grouped shapes (`moe-*`), and shapes with few tokens per expert (`decode-*`).
pub fn builtin() -> &'static [Shape] {
    static SHAPES: LazyLock<Vec<Shape>> =
        LazyLock::new(|| parse(include_str!("shapes.json")).expect("a test parses all built-in shapes"));
    &SHAPES
}

/// Returns the shape that `NAME`, `FILE.json` or `FILE.json#NAME` refers to.
///
/// # Errors
/// Returns an error if the shape or the file does not exist, or the file does not have this form.
pub fn find(spec: &str) -> Result<Shape, Error> {
    find_named(spec, "shape", builtin(), |shape| &shape.name, parse)
}

/// Returns the entry that `NAME`, `FILE.json` or `FILE.json#NAME` refers to: a built-in entry, or an entry of a file
/// that `parse` reads.
pub(crate) fn find_named<T: Clone>(
    spec: &str,
    what: &str,
    builtin: &[T],
    name_of: fn(&T) -> &str,
    parse: fn(&str) -> Result<Vec<T>, Error>,
) -> Result<T, Error> {
    if let Some(found) = builtin.iter().find(|thing| name_of(thing) == spec) {
        return Ok(found.clone());
    }
    let (path, name) = spec.split_once('#').map_or((spec, None), |(path, name)| (path, Some(name)));
    if !path.ends_with(".json") {
        let names: Vec<_> = builtin.iter().map(name_of).collect();
        let known = names.join(", ");
        return Err(Error::Invalid(format!("{what} `{spec}` is neither a .json file nor one of {known}")));
    }
    let things = parse(&read_text(Path::new(path))?).map_err(|error| error.at(path))?;
    let pick = || match (name, things.as_slice()) {
        (None, [thing]) => Ok(thing.clone()),
        (None, things) => {
            Err(Error::Invalid(format!("the file contains {} {what}s; select one with {path}#NAME", things.len())))
        }
        (Some(name), things) => things
            .iter()
            .find(|thing| name_of(thing) == name)
            .cloned()
            .ok_or_else(|| Error::Invalid(format!("the file contains no {what} named `{name}`"))),
    };
    pick().map_err(|error| error.at(path))
}

/// Reads a file with one shape or a list of shapes.
///
/// # Errors
/// Returns an error if the file cannot be read, is not a regular file, is larger than 16 MiB, or does not have this
/// form.
pub fn read(path: &Path) -> Result<Vec<Shape>, Error> {
    parse(&read_text(path)?).map_err(|error| error.at(path.display()))
}

fn read_text(path: &Path) -> Result<String, Error> {
    const MAX_BYTES: usize = 16 << 20;
    let text = read_bounded(path, MAX_BYTES, "a file of shapes, which has a few lines")?;
    let not_text = |_| Error::Invalid("the file is not UTF-8 text; give a file of shapes".into()).at(path.display());
    String::from_utf8(text).map_err(not_text)
}

/// Parses one shape or a list of shapes from JSON text, and checks the sizes.
///
/// # Errors
/// Returns an error if the text does not have this form, or the sizes are not a valid problem.
pub fn parse(json: &str) -> Result<Vec<Shape>, Error> {
    let form = r#"a shape is {"name": …, "op": "gated" or "plain", "groups": [[M, N, K], …]}"#;
    let shapes: Vec<Shape> = parse_list(json, form)?;
    for shape in &shapes {
        shape.problem(TokenDtype::F16).map_err(|error| error.at(format_args!("shape `{}`", shape.name)))?;
    }
    Ok(shapes)
}

/// Parses one entry or a list of entries from JSON text; `form` describes an entry for messages.
pub(crate) fn parse_list<T: serde::de::DeserializeOwned>(json: &str, form: &str) -> Result<Vec<T>, Error> {
    let things = if json.trim_start().starts_with('[') {
        serde_json::from_str(json)
    } else {
        serde_json::from_str(json).map(|thing| vec![thing])
    };
    things.map_err(|error| Error::Invalid(format!("{error}; {form}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_built_in_shape_is_valid_and_found_by_its_name() {
        for shape in builtin() {
            assert_eq!(&find(&shape.name).unwrap(), shape);
        }
        for family in ["dual-test-", "dual-", "group-test-", "group-", "moe-"] {
            let numbers = builtin().iter().filter_map(|shape| shape.name.strip_prefix(family)?.parse::<usize>().ok());
            let numbers: Vec<_> = numbers.collect();
            assert!(!numbers.is_empty() && numbers.iter().copied().eq(1..=numbers.len()), "{family}{numbers:?}");
        }
    }

    #[test]
    fn invalid_shape_is_refused_with_a_remedy() {
        for (json, text) in [
            ("", "EOF"),
            ("[1]", "expected struct"),
            (r#"{"op": "gated"}"#, "missing field `groups`"),
            (r#"{"op": "fused", "groups": []}"#, "unknown variant `fused`"),
            (r#"{"op": "gated", "groups": [[1, 8]]}"#, "invalid length 2"),
            (r#"{"op": "gated", "groups": [[-1, 8, 16]]}"#, "invalid value"),
            (r#"{"op": "gated", "groups": [[1.5, 8, 16]]}"#, "invalid type"),
            (r#"{"op": "gated", "groups": [], "grops": 1}"#, "unknown field `grops`"),
            (r#"{"name": "x", "op": "gated", "groups": [[1, 8, 24]]}"#, "shape `x`: group 0: K = 24"),
            (
                r#"{"op": "plain", "groups": [[18446744073709551615, 8, 16]]}"#,
                "exceeds the address space of this machine",
            ),
        ] {
            let error = parse(json).unwrap_err().to_string();
            assert!(error.contains(text), "{json}: {error}");
        }
    }

    #[test]
    fn file_with_several_shapes_needs_a_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("shapes.json");
        let write = |text: &str| std::fs::write(&path, text).unwrap();
        let spec = |name: &str| format!("{}{name}", path.display());
        write(r#"[{"name": "a", "op": "plain", "groups": []}, {"name": "b", "op": "gated", "groups": [[1, 8, 16]]}]"#);
        assert_eq!(find(&spec("#b")).unwrap().op, Op::Gated);
        assert!(find(&spec("")).unwrap_err().to_string().ends_with("#NAME"));
        assert!(find(&spec("#c")).unwrap_err().to_string().contains("no shape named `c`"));
        write(r#"{"op": "plain", "groups": [[3, 8, 16]], "note": ["anything"]}"#);
        assert_eq!(find(&spec("")).unwrap().groups, [Group { m: 3, n: 8, k: 16 }]);
        assert!(matches!(find("nowhere.json"), Err(Error::Io { .. })));
        assert!(find("moe-5").unwrap_err().to_string().contains("moe-4, decode-1"));
    }
}
