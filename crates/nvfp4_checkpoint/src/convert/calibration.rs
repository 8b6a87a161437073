//! Largest magnitudes of the activations that modules read; input scales are computed from them.
//!
//! A calibration file is safetensors or JSON:
//!
//! | file | entry | content |
//! |---|---|---|
//! | safetensors | `M` or `M.input`, f32, f16 or bf16 `[…, K]` | activations |
//! | safetensors | `M.input_amax`, `M.input_quantizer._amax` (ModelOpt), or any tensor of one number | largest
//! magnitude |
//! | JSON | object of names and numbers | largest magnitudes |
//!
//! `M` is a module, in which `*` stands for any characters. `M` can also be the block or the experts around projections
//! that read the same activations: `model.layers.3.mlp` for its gate and up. `hidden` is the default for such
//! projections; it is also the name in the activations of `nvfp4 run`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::{Map, Value};

use crate::file::TensorFile;
use crate::floats::{DTYPES, Floats};
use crate::names::merged_with;
use crate::place;
use nvfp4_core::Error;
use nvfp4_core::files::read_bounded;

/// Maximum size of a JSON file, in bytes.
const MAX_BYTES: usize = 256 << 20;

/// Tokens of a layer, and the number of tokens per expert: the names in the activations of `nvfp4 run`.
const HIDDEN: &str = "hidden";
const GROUP_SIZES: &str = "group_sizes";

/// Suffixes that may follow a module's name.
const ENDINGS: [&str; 4] = [".input_quantizer._amax", ".input_amax", ".input_quantizer.amax", ".input"];

/// Largest magnitudes of activations, by the module that reads them.
#[derive(Debug, Default)]
pub struct Calibration {
    exact: BTreeMap<String, Entry>,
    patterns: Vec<(String, Entry)>,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    amax: f32,
    /// K of the activations; `None` if only the magnitude was given.
    k: Option<usize>,
}

impl Calibration {
    /// Reads a file of activations or of their largest magnitudes.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read, has no entries, or contains a negative, NaN or infinite magnitude.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let mut calibration = Self::default();
        if path.extension().is_some_and(|extension| extension == "json") {
            let bytes = read_bounded(path, MAX_BYTES, "a calibration")?;
            let what = |error| Error::Invalid(format!("expected a JSON object of names and magnitudes: {error}"));
            let json: Map<String, Value> =
                serde_json::from_slice(&bytes).map_err(|error| what(error).at(path.display()))?;
            for (name, value) in json {
                let wrong = || {
                    Error::Invalid(format!("{value} is not a magnitude; give a number of at least 0"))
                        .at(place(path, &name))
                };
                let amax = value.as_f64().ok_or_else(wrong)? as f32;
                calibration.add(&name, Entry { amax, k: None }).map_err(|error| error.at(place(path, &name)))?;
            }
        } else {
            let file = TensorFile::open(path)?;
            for (name, tensor) in file.tensors().filter(|(name, _)| *name != GROUP_SIZES) {
                let at = |error: Error| error.at(place(path, name));
                let numbers = Floats::of(tensor).ok_or_else(|| {
                    let remedy = "a calibration file must contain activations or their largest magnitudes";
                    at(Error::Dtype { got: tensor.dtype, expected: DTYPES.to_vec(), remedy })
                })?;
                let amax = numbers.amax().map_err(at)?;
                let count: usize = tensor.shape.iter().product();
                if count == 0 {
                    return Err(at(Error::Invalid("the tensor has no elements; remove it".into())));
                }
                let is_amax = ENDINGS[..3].iter().any(|ending| name.ends_with(ending)) || count == 1;
                let k = if is_amax { None } else { tensor.shape.last().copied() };
                calibration.add(name, Entry { amax, k }).map_err(at)?;
                file.release();
            }
            file.check_unchanged()?;
        }
        if calibration.exact.is_empty() && calibration.patterns.is_empty() {
            return Err(Error::Invalid("the file has no activations and no magnitudes".into()).at(path.display()));
        }
        Ok(calibration)
    }

    /// Adds activations of width `k` without their magnitude. Returns the name of the module or pattern.
    ///
    /// # Errors
    /// Returns an error if the module is listed twice.
    pub(super) fn add_width(&mut self, name: &str, k: usize) -> Result<String, Error> {
        self.add(name, Entry { amax: 0.0, k: Some(k) })?;
        Ok(module_of(name).to_owned())
    }

    fn add(&mut self, name: &str, entry: Entry) -> Result<(), Error> {
        if !(entry.amax >= 0.0 && entry.amax.is_finite()) {
            return Err(Error::Invalid(format!(
                "{} is not a magnitude; give a finite number of at least 0",
                entry.amax
            )));
        }
        let module = module_of(name);
        if module.contains('*') {
            self.patterns.push((module.to_owned(), entry));
        } else if self.exact.insert(module.to_owned(), entry).is_some() {
            return Err(Error::Invalid(format!("{module} is listed twice; remove one entry")));
        }
        Ok(())
    }

    /// Returns the largest magnitude that a module with this K reads; `None` if unknown.
    ///
    /// # Errors
    /// Returns an error if the activations given for the module have another width.
    pub(super) fn amax(&self, module: &str, k: usize) -> Result<Option<f32>, Error> {
        Ok(self.checked(module, k)?.map(|(_, entry)| entry.amax))
    }

    /// Returns the name of the entry for a module with this K; `None` if there is none.
    ///
    /// # Errors
    /// Returns an error if the activations given for the module have another width.
    pub(super) fn entry(&self, module: &str, k: usize) -> Result<Option<&str>, Error> {
        Ok(self.checked(module, k)?.map(|(name, _)| name))
    }

    fn checked(&self, module: &str, k: usize) -> Result<Option<(&str, Entry)>, Error> {
        let Some((name, entry)) = self.find(module) else { return Ok(None) };
        match entry.k {
            Some(got) if got != k && name == HIDDEN => Ok(None),
            Some(got) if got != k => {
                let error = Error::Mismatch { what: "width of the activations", got, expected: k };
                Err(error.at(name).at(module))
            }
            _ => Ok(Some((name, entry))),
        }
    }

    /// Returns the names of entries that give none of these modules its magnitude.
    pub(super) fn unused<'m>(&self, modules: impl Iterator<Item = &'m str>) -> Vec<&str> {
        let used: BTreeSet<&str> = modules.filter_map(|module| self.find(module)).map(|(name, _)| name).collect();
        let all = self.exact.keys().map(String::as_str).chain(self.patterns.iter().map(|(pattern, _)| &pattern[..]));
        all.filter(|name| !used.contains(name)).collect()
    }

    fn find(&self, module: &str) -> Option<(&str, Entry)> {
        if let Some(found) = self.named(module) {
            return Some(found);
        }
        // Entry for all experts of a layer: `experts.down_proj`.
        if let Some((before, rest)) = module.rsplit_once(".experts.")
            && let Some((_, projection)) = rest.split_once('.')
            && let Some(found) = self.named(&format!("{before}.experts.{projection}"))
        {
            return Some(found);
        }
        // Projections that engines merge read the input of their block.
        merged_with(module).next()?;
        let gate_up = module.rsplit_once('.').and_then(|(before, _)| self.named(&format!("{before}.gate_up_proj")));
        let fused = module.rsplit_once(".experts.").and_then(|(before, _)| {
            ["experts.gate_up_proj", "experts", ""].into_iter().find_map(|inner| {
                self.named(if inner.is_empty() { before.to_owned() } else { format!("{before}.{inner}") }.as_str())
            })
        });
        let block = || module.rsplit_once('.').and_then(|(before, _)| self.named(before));
        gate_up.or_else(block).or(fused).or_else(|| self.named(HIDDEN))
    }

    /// Returns the entry of this name; if several patterns match, the one with the largest magnitude.
    fn named(&self, name: &str) -> Option<(&str, Entry)> {
        if let Some((name, &entry)) = self.exact.get_key_value(name) {
            return Some((name, entry));
        }
        let matching = self.patterns.iter().filter(|(pattern, _)| matches(pattern, name));
        matching.max_by(|(_, a), (_, b)| a.amax.total_cmp(&b.amax)).map(|(name, entry)| (&name[..], *entry))
    }
}

/// Returns the module of an entry.
fn module_of(name: &str) -> &str {
    ENDINGS.iter().find_map(|ending| name.strip_suffix(ending)).unwrap_or(name)
}

/// Returns `true` if the pattern, in which `*` stands for any characters, matches the name.
fn matches(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = name.strip_prefix(first) else { return false };
    let Some(last) = parts.next_back() else { return rest.is_empty() };
    for part in parts {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn amax(entries: &[(&str, f32)], module: &str) -> Option<f32> {
        let mut calibration = Calibration::default();
        for &(name, amax) in entries {
            calibration.add(name, Entry { amax, k: None }).unwrap();
        }
        calibration.amax(module, 16).unwrap()
    }

    #[test]
    fn every_accepted_name_gives_a_module_its_magnitude() {
        let gate = "model.layers.3.mlp.experts.5.gate_proj";
        for name in [
            gate,
            "model.layers.3.mlp.experts.5.gate_proj.input_amax",
            "model.layers.3.mlp.experts.5.gate_proj.input_quantizer._amax",
            "model.layers.3.mlp.experts.gate_proj",
            "model.layers.3.mlp.experts.gate_up_proj",
            "model.layers.3.mlp.experts.5",
            "model.layers.3.mlp.experts",
            "model.layers.3.mlp.input",
            "model.layers.*.mlp.experts.*.gate_proj",
            "*",
        ] {
            assert_eq!(amax(&[(name, 2.0), ("other", 3.0)], gate), Some(2.0), "{name}");
        }
        // The input of a block is not the input of its last projection.
        let down = "model.layers.3.mlp.experts.5.down_proj";
        assert_eq!(amax(&[("model.layers.3.mlp", 2.0), ("model.layers.3.mlp.experts", 2.0)], down), None);
        assert_eq!(amax(&[("model.layers.3.mlp.experts.down_proj", 2.0)], down), Some(2.0));
        assert_eq!(amax(&[("a.self_attn", 2.0)], "a.self_attn.k_proj"), Some(2.0));
        assert_eq!(amax(&[("a.self_attn", 2.0)], "a.self_attn.o_proj"), None);
        assert_eq!(amax(&[("a.*", 2.0), ("a.b", 1.0), ("*.b", 3.0)], "a.b"), Some(1.0));
        assert_eq!(amax(&[("a.*", 2.0), ("*.b", 3.0)], "a.b"), Some(3.0));
        assert_eq!((amax(&[("hidden", 2.0)], gate), amax(&[("hidden", 2.0)], down)), (Some(2.0), None));
    }

    #[test]
    fn entry_without_a_module_is_reported_as_unused() {
        let mut calibration = Calibration::default();
        for name in ["a.down_proj", "b.down_proj", "*.gate_proj", "*.x"] {
            calibration.add(name, Entry { amax: 1.0, k: None }).unwrap();
        }
        assert_eq!(calibration.unused(["a.down_proj", "a.gate_proj"].into_iter()), ["b.down_proj", "*.x"]);
    }

    #[test]
    fn star_matches_any_characters() {
        for (pattern, name, expected) in [
            ("a*c", "abbc", true),
            ("a*c", "ac", true),
            ("a*c", "acb", false),
            ("a*a", "a", false),
            ("*b*", "abc", true),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
        }
    }

    #[test]
    fn invalid_magnitude_is_refused() {
        for bad in [-1.0, f32::NAN, f32::INFINITY] {
            assert!(Calibration::default().add("a", Entry { amax: bad, k: None }).is_err());
        }
        let mut twice = Calibration::default();
        twice.add("a", Entry { amax: 1.0, k: None }).unwrap();
        assert!(twice.add("a.input_amax", Entry { amax: 1.0, k: None }).is_err());
    }
}
