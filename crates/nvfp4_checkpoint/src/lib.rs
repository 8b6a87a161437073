//! Model files: maps safetensors files, reads NVFP4 weights and writes results. This module knows no backend.
//!
//! | type | content |
//! |---|---|
//! | [`TensorFile`] | one file |
//! | [`Checkpoint`] | all files of a model |
//! | [`QuantizedWeight`] | one NVFP4 weight, in either published [`Format`] |
//! | [`Layer`] | the experts of a layer |
//! | [`LayerTensors`] | the tensors of a decoder layer that are used and left |
//! | [`HiddenStates`] | 16-bit tokens of a whole layer |
//! | [`MoeLayer`] | an MoE layer with its router |
//!
//! ```no_run
//! use nvfp4_checkpoint::{Activations, Checkpoint};
//! use nvfp4_core::problem::{Op, TokenDtype, Step};
//!
//! let checkpoint = Checkpoint::open("DeepSeek-R1-NVFP4".as_ref())?;
//! let layer = checkpoint.layer(3, Op::Gated)?;
//! let tokens = Activations::open("tokens.safetensors".as_ref())?.quantize(&layer.input_scales)?;
//! let step = Step::new(&layer.weights, tokens, TokenDtype::F16)?;
//! # Ok::<_, nvfp4_core::Error>(())
//! ```

mod activations;
mod around;
mod block;
mod comparison;
mod convert;
mod doctor;
mod feed_forward;
mod file;
mod floats;
mod fused;
mod gguf;
mod hidden;
mod input_scales;
mod inspect;
mod layer;
mod layer_tensors;
mod linear;
mod model_config;
mod moe;
mod names;
mod partial;
mod projection;
mod quantized;
mod router;
mod signals;
mod source;
mod token_transform;
mod usage;
mod write;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};

pub use activations::Activations;
pub use around::{Around, Norm, Steps};
pub use comparison::{ComparedWeight, Comparison, Difference, Errors};
pub use convert::{
    Calibration, Conversion, Converted, Dequantization, Exact, Experts, Form, Left, Options, Recorded, Reform, Written,
};
pub use doctor::{Effect, Engine, Examination, Finding, RULES, Rule};
pub use feed_forward::FeedForward;
pub use file::{Tensor, TensorFile};
pub use gguf::{FromGguf, ToGguf};
pub use hidden::HiddenStates;
pub use inspect::{Inspection, OtherWeight, Problem, Range, Weight};
pub use layer::Layer;
pub use layer_tensors::LayerTensors;
pub use linear::ScaledLinear;
pub use moe::MoeLayer;
pub use names::{natural, without_expert};
pub use partial::{check_file, check_folder, leftovers};
pub use projection::Projection;
pub use quantized::{Format, QuantizedWeight};
pub use router::LayerRouter;
pub use safetensors::Dtype;
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};
pub use signals::handle_signals;
pub use usage::Usage;
pub use write::{OutputFile, TensorWriter, refuse_input};

use nvfp4_core::Error;
use nvfp4_core::files::{foreign_kind, read_bounded};

/// Name of the file that lists the shards of a model.
pub const INDEX_NAME: &str = "model.safetensors.index.json";

/// Ending of the names of index files, whatever the model is called.
const INDEX_ENDING: &str = ".safetensors.index.json";

/// Upper limit for the size of an index; an index of 200,000 tensors has about 30 MB.
const MAX_INDEX_BYTES: usize = 100_000_000;

/// The opened files of a model.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    files: Vec<TensorFile>,
    /// Index into `files` of the file that holds each tensor.
    file_of: BTreeMap<String, usize>,
    /// Part of the model whose layers are read, such as `talker`; `None`: the only part that has the layer.
    stack: Option<String>,
}

/// The JSON of an index file.
#[derive(serde::Deserialize)]
struct Index {
    weight_map: WeightMap,
}

/// File name of the shard of each tensor.
struct WeightMap(BTreeMap<String, String>);

impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = WeightMap;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object of tensors and their files")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<WeightMap, A::Error> {
                let mut shards = BTreeMap::new();
                while let Some((name, shard)) = map.next_entry::<String, String>()? {
                    // JSON would let the second entry win.
                    if shards.insert(name.clone(), shard).is_some() {
                        return Err(A::Error::custom(format!("tensor {name} is listed twice")));
                    }
                }
                Ok(WeightMap(shards))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

impl Checkpoint {
    /// Opens a safetensors file, a directory of safetensors files, or the index of a sharded model
    /// (`*.safetensors.index.json`). If a directory has an index, the index decides which files are read.
    ///
    /// # Errors
    /// Returns the first fault of the files, their headers or the index.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let (checkpoint, errors) = Self::survey(path);
        errors.into_iter().next().map_or(Ok(checkpoint), Err)
    }

    /// Opens every file that can be opened, and returns all faults.
    pub fn survey(path: &Path) -> (Self, Vec<Error>) {
        let mut errors = Vec::new();
        let mut checkpoint = Self { path: path.to_owned(), files: Vec::new(), file_of: BTreeMap::new(), stack: None };
        match sources(path) {
            Ok(Sources::Files(paths)) => paths.iter().for_each(|path| _ = checkpoint.add_file(path, &mut errors)),
            Ok(Sources::Index(path)) => match read_index(&path) {
                Ok(index) => checkpoint.add_shards(&path, &index, &mut errors),
                Err(error) => errors.push(error),
            },
            Err(error) => errors.push(error),
        }
        (checkpoint, errors)
    }

    /// Opens a file and registers its tensors; returns the index of the file in `files`.
    fn add_file(&mut self, path: &Path, errors: &mut Vec<Error>) -> Option<usize> {
        let file = TensorFile::open(path).map_err(|error| errors.push(error)).ok()?;
        for (name, _) in file.tensors() {
            if let Some(other) = self.file_of.insert(name.to_owned(), self.files.len()) {
                let other = self.files[other].path().display();
                let what = format!("this tensor is also in {other}; remove one of the files");
                errors.push(Error::Invalid(what).at(place(path, name)));
            }
        }
        self.files.push(file);
        Some(self.files.len() - 1)
    }

    fn add_shards(&mut self, index_path: &Path, index: &Index, errors: &mut Vec<Error>) {
        let folder = index_path.parent().unwrap_or(Path::new(""));
        if index.weight_map.0.is_empty() {
            let what = "the index lists no tensors; download it again";
            errors.push(Error::Invalid(what.into()).at(index_path.display()));
        }
        let mut shards: BTreeMap<&str, Option<usize>> =
            index.weight_map.0.values().map(|shard| (&shard[..], None)).collect();
        for (shard, file) in &mut shards {
            if is_file_name(shard) {
                *file = self.add_file(&folder.join(shard), errors);
            } else {
                let what =
                    format!("shard {shard:?} is not a file name in the folder of the index; download the model again");
                errors.push(Error::Invalid(what).at(index_path.display()));
            }
        }
        for (name, shard) in &index.weight_map.0 {
            // The failure to open the shard is already reported.
            let Some(file) = shards[&shard[..]].map(|file| &self.files[file]) else { continue };
            if file.tensor(name).is_none() {
                let remedy = format!("{} lists it; download both files again", index_path.display());
                errors.push(Error::Missing { name: format!("tensor {name:?}"), remedy }.at(file.path().display()));
            }
        }
    }

    /// Reads layers of one part of a model with several stacks of layers, such as `talker`: layers whose names have this
    /// segment before `layers`.
    ///
    /// # Errors
    /// Returns an error if no layer has this segment in its name.
    pub fn in_stack(mut self, stack: &str) -> Result<Self, Error> {
        let stacks: BTreeSet<&str> = self.names().filter_map(names::layer_of).map(|(before, _)| before).collect();
        if !stacks.iter().any(|before| before.split('.').any(|segment| segment == stack)) {
            let remedy = format!("the model has layers of {}", stacks.into_iter().collect::<Vec<_>>().join(", "));
            let missing = Error::Missing { name: format!("a stack of layers named {stack:?}"), remedy };
            return Err(missing.at(self.path.display()));
        }
        self.stack = Some(stack.to_owned());
        Ok(self)
    }

    /// Returns `true` if layers of the stack with this name are read.
    fn is_in_stack(&self, before_layer: &str) -> bool {
        self.stack.as_ref().is_none_or(|stack| before_layer.split('.').any(|segment| segment == stack))
    }

    /// Returns the safetensors files in the folder that the index does not list, such as draft layers in a file of their
    /// own, or the same weights by other names; empty if there is no index.
    pub fn files_outside_the_index(&self) -> Vec<PathBuf> {
        let Some(folder) = self.files.first().and_then(|file| file.path().parent()) else { return Vec::new() };
        if self.files.iter().any(|file| file.path() == self.path) {
            return Vec::new();
        }
        let read: BTreeSet<&Path> = self.files.iter().map(TensorFile::path).collect();
        let is_other = |path: &PathBuf| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.ends_with(".safetensors") && !name.starts_with('.') && !read.contains(&**path)
        };
        let entries = std::fs::read_dir(folder).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()));
        let mut others: Vec<_> = entries.filter(is_other).collect();
        others.sort();
        others
    }

    /// Checks that no file has changed since it was opened, with [`TensorFile::check_unchanged`].
    ///
    /// # Errors
    /// Returns an error for the first file that changed.
    pub fn check_unchanged(&self) -> Result<(), Error> {
        self.files.iter().try_for_each(TensorFile::check_unchanged)
    }

    /// Path that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Path that was opened, followed by the path of every file.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        std::iter::once(&*self.path).chain(self.files.iter().map(TensorFile::path))
    }

    /// Files of the model.
    pub fn files(&self) -> &[TensorFile] {
        &self.files
    }

    /// Returns a tensor by name, or `None` if no file has it.
    pub fn tensor(&self, name: &str) -> Option<Tensor<'_>> {
        self.files[*self.file_of.get(name)?].tensor(name)
    }

    /// Names of all tensors, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.file_of.keys().map(String::as_str)
    }

    /// Names that begin with `prefix`, in order.
    pub fn names_under(&self, prefix: &str) -> impl Iterator<Item = &str> {
        let from = self.file_of.range::<str, _>((std::ops::Bound::Included(prefix), std::ops::Bound::Unbounded));
        from.map(|(name, _)| name.as_str()).take_while(move |name| name.starts_with(prefix))
    }

    /// Returns the file of a tensor that exists.
    fn file_with(&self, name: &str) -> &TensorFile {
        &self.files[self.file_of[name]]
    }

    /// Returns the file and the name of a tensor, for messages.
    fn place(&self, name: &str) -> String {
        let path = self.file_of.get(name).map_or(&*self.path, |&file| self.files[file].path());
        place(path, name)
    }
}

/// Returns `true` if `name` is a file name without folders or control characters.
fn is_file_name(name: &str) -> bool {
    Path::new(name).file_name() == Some(name.as_ref()) && !name.contains(char::is_control)
}

/// Joins file and tensor name, for messages.
fn place(path: &Path, name: &str) -> String {
    format!("{}: {name}", path.display())
}

/// Files that a path refers to.
enum Sources {
    Index(PathBuf),
    Files(Vec<PathBuf>),
}

fn sources(path: &Path) -> Result<Sources, Error> {
    let io = |error| Error::io(path, error);
    let metadata = match std::fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if is_hub_name(path) => {
            let name = path.to_string_lossy();
            let name = HUB_ADDRESSES.iter().find_map(|start| name.strip_prefix(start)).unwrap_or(&name);
            let what = format!(
                "{error}; if this is a model name on Hugging Face, download the model first (`hf download {name} --local-dir DIR`) \
                 and give the folder"
            );
            return Err(Error::Invalid(what).at(path.display()));
        }
        Err(error) => return Err(io(error)),
    };
    if !metadata.is_dir() {
        let is_index = path.extension().is_some_and(|extension| extension == "json");
        return Ok(if is_index { Sources::Index(path.to_owned()) } else { Sources::Files(vec![path.to_owned()]) });
    }
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(path).map_err(io)? {
        paths.push(entry.map_err(io)?.path());
    }
    paths.sort();
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let ending_in = |ending: &str| -> Vec<PathBuf> {
        // Names that begin with a dot are hidden: files of other programs, and partials of this library.
        let chosen = paths.iter().filter(|path| name(path).ends_with(ending) && !name(path).starts_with('.'));
        chosen.cloned().collect()
    };
    let mut indices = ending_in(INDEX_ENDING);
    match (indices.len(), path.join(INDEX_NAME)) {
        (0, _) => {}
        (1, _) => return Ok(Sources::Index(indices.remove(0))),
        (_, usual) if indices.contains(&usual) => return Ok(Sources::Index(usual)),
        (several, _) => {
            let what = format!("the folder has {several} files *{INDEX_ENDING}; give the path of one");
            return Err(Error::Invalid(what).at(path.display()));
        }
    }
    let files = ending_in(".safetensors");
    if files.is_empty() {
        let has = |ending: &str| !ending_in(ending).is_empty();
        let what = if has(".gguf") {
            "the folder has GGUF files (llama.cpp) and no *.safetensors file; give the safetensors files of the model"
        } else if has(".bin") || has(".pt") || has(".pth") {
            "the folder has PyTorch files and no *.safetensors file; convert them to safetensors first"
        } else if path.join("snapshots").is_dir() {
            "the folder has no *.safetensors file; it is a cache folder of Hugging Face: give a folder below its snapshots/"
        } else {
            "the folder has no *.safetensors file; give the directory or a file of a model"
        };
        return Err(Error::Invalid(what.into()).at(path.display()));
    }
    check_twice(&files, &name).map_err(|error| error.at(path.display()))?;
    check_shards(&files).map_err(|error| error.at(path.display()))?;
    Ok(Sources::Files(files))
}

/// Prefixes of the addresses of models on Hugging Face.
const HUB_ADDRESSES: [&str; 2] = ["https://huggingface.co/", "hf://"];

/// Returns `true` if a path that does not exist looks like `organization/model` or like the address of a model.
fn is_hub_name(path: &Path) -> bool {
    let Some(text) = path.to_str() else { return false };
    if HUB_ADDRESSES.iter().any(|start| text.starts_with(start)) {
        return true;
    }
    let is_word = |word: &str| {
        let usual = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        word.starts_with(|c: char| c.is_ascii_alphanumeric()) && word.chars().all(usual)
    };
    let is_file = [".safetensors", ".json"].iter().any(|ending| text.ends_with(ending));
    !is_file
        && matches!(text.split('/').collect::<Vec<_>>()[..], [organization, model] if is_word(organization) && is_word(model))
}

/// Refuses a folder without an index that has the same weights twice: `consolidated*.safetensors` holds them by Mistral's
/// own names, the other files by transformers' names.
fn check_twice(files: &[PathBuf], name: &dyn Fn(&Path) -> String) -> Result<(), Error> {
    let (twins, others): (Vec<_>, Vec<_>) =
        files.iter().map(|path| name(path)).partition(|name| name.starts_with("consolidated"));
    match (twins.first(), others.first()) {
        (Some(twin), Some(other)) => Err(Error::Invalid(format!(
            "the folder has no index, and {twin} usually holds the same weights as {other}; give the path of one file, \
             or move one of them away"
        ))),
        _ => Ok(()),
    }
}

/// Checks that no shard is missing when files without an index are numbered `…-00001-of-00003.safetensors`.
fn check_shards(files: &[PathBuf]) -> Result<(), Error> {
    let mut series: BTreeMap<(String, usize), BTreeSet<usize>> = BTreeMap::new();
    for file in files {
        let stem = file.file_stem().unwrap_or_default().to_string_lossy();
        let numbers = stem.rsplit_once("-of-").and_then(|(start, count)| Some((start.rsplit_once('-')?, count)));
        let Some(((model, number), count)) = numbers else { continue };
        if let (Ok(number), Ok(count)) = (number.parse(), count.parse()) {
            series.entry((model.to_owned(), count)).or_default().insert(number);
        }
    }
    for ((model, count), numbers) in series {
        // The search for the first missing number ends after at most `numbers.len() + 1` steps.
        if let Some(missing) = (1..=count).find(|number| !numbers.contains(number)) {
            let name = format!("shard {missing} of {count} of {model}");
            return Err(Error::Missing { name, remedy: "download the model again".into() });
        }
    }
    Ok(())
}

fn read_index(path: &Path) -> Result<Index, Error> {
    let bytes = read_bounded(path, MAX_INDEX_BYTES, "the index of a model")?;
    let what = |error| match foreign_kind(&bytes) {
        Some(kind) => Error::Invalid(kind.into()),
        None => Error::Invalid(format!("not a valid index of shards: {error}; download it again")),
    };
    serde_json::from_slice(&bytes).map_err(|error: serde_json::Error| what(error).at(path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hugging_face_names_differ_from_paths() {
        for name in ["Qwen/Qwen3-30B-A3B", "nvidia/DeepSeek-R1-0528-FP4", "hf://a/b", "https://huggingface.co/a/b"] {
            assert!(is_hub_name(Path::new(name)), "{name}");
        }
        for path in ["model", "./model/x", "../x", "/a/b", "a/b/c", "a/b.safetensors", "a/", "~/x", ""] {
            assert!(!is_hub_name(Path::new(path)), "{path}");
        }
    }

    #[test]
    fn a_missing_shard_is_named() {
        let check = |names: &[&str]| check_shards(&names.iter().map(PathBuf::from).collect::<Vec<_>>());
        assert!(check(&["m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors", "extra.safetensors"]).is_ok());
        let error = check(&["m-00001-of-00003.safetensors", "m-00003-of-00003.safetensors"]).unwrap_err().to_string();
        assert!(error.starts_with("shard 2 of 3 of m is missing"), "{error}");
        assert!(
            check(&["a-of-3.safetensors", "-1-of-x.safetensors", "b-18446744073709551616-of-1.safetensors"]).is_ok()
        );
    }
}
