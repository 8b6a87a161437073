//! Model files: memory-mapped safetensors in, NVFP4 weights out, and results back to disk. Knows no backend.
//!
//! [`TensorFile`] is one file and [`Checkpoint`] all the files of a model; [`Quantized`] is a weight in either of the
//! [`Format`]s that models are published in, [`Layer`] the experts of a layer.
//!
//! ```no_run
//! use nvfp4::checkpoint::{Activations, Checkpoint};
//! use nvfp4::problem::{Op, OutDtype, Step};
//!
//! let checkpoint = Checkpoint::open("DeepSeek-R1-NVFP4".as_ref())?;
//! let layer = checkpoint.layer(3, Op::Gated)?;
//! let tokens = Activations::open("tokens.safetensors".as_ref())?.quantize(&layer.input_scales)?;
//! let step = Step::new(&layer.weights, tokens, OutDtype::F16)?;
//! # Ok::<_, nvfp4::Error>(())
//! ```

mod activations;
mod convert;
mod file;
mod floats;
mod inspect;
mod layer;
mod names;
mod partial;
mod quantized;
mod source;
mod write;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

pub use activations::Activations;
pub use convert::{Calibration, Conversion, Converted, Left, Options, Written};
pub use file::{Tensor, TensorFile};
pub use inspect::{Inspection, Range, Weight};
pub use layer::Layer;
pub use names::{natural, without_expert};
pub use partial::{check_file, check_folder, leftovers};
pub use quantized::{Format, Quantized};
pub use safetensors::Dtype;
pub use write::{OutputFile, TensorWriter, refuse_input};

use crate::error::Error;
pub use crate::signals::handle_signals;

/// The name of the file that lists the shards of a model.
pub const INDEX_NAME: &str = "model.safetensors.index.json";

/// How the names of such files end, whatever the model is called.
const INDEX_ENDING: &str = ".safetensors.index.json";

/// The files of a model, opened.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    files: Vec<TensorFile>,
    /// Where each tensor is.
    file_of: BTreeMap<String, usize>,
}

/// The JSON of an index file.
#[derive(serde::Deserialize)]
struct Index {
    /// The shard of each tensor.
    weight_map: BTreeMap<String, String>,
}

impl Checkpoint {
    /// Opens a safetensors file, a directory of them, or the index of a sharded model (`*.safetensors.index.json`). In a
    /// directory an index goes before other files.
    ///
    /// # Errors
    /// The first thing that is wrong with the files, their headers or the index.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let (checkpoint, errors) = Self::survey(path);
        errors.into_iter().next().map_or(Ok(checkpoint), Err)
    }

    /// Opens what can be opened, and returns everything that is wrong.
    pub fn survey(path: &Path) -> (Self, Vec<Error>) {
        let mut errors = Vec::new();
        let mut checkpoint = Self { path: path.to_owned(), files: Vec::new(), file_of: BTreeMap::new() };
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

    /// Opens a file and notes its tensors; returns its place among the files.
    fn add_file(&mut self, path: &Path, errors: &mut Vec<Error>) -> Option<usize> {
        let file = TensorFile::open(path).map_err(|error| errors.push(error)).ok()?;
        for (name, _) in file.tensors() {
            if let Some(other) = self.file_of.insert(name.to_owned(), self.files.len()) {
                let other = self.files[other].path().display();
                let what = format!("it is in {other} too; remove one of the files");
                errors.push(Error::Invalid(what).at(place(path, name)));
            }
        }
        self.files.push(file);
        Some(self.files.len() - 1)
    }

    fn add_shards(&mut self, index_path: &Path, index: &Index, errors: &mut Vec<Error>) {
        let folder = index_path.parent().unwrap_or(Path::new(""));
        let mut shards: BTreeMap<&str, Option<usize>> =
            index.weight_map.values().map(|shard| (&shard[..], None)).collect();
        for (shard, file) in &mut shards {
            if is_file_name(shard) {
                *file = self.add_file(&folder.join(shard), errors);
            } else {
                let what = format!("shard {shard:?} is not a file beside the index; download the model again");
                errors.push(Error::Invalid(what).at(index_path.display()));
            }
        }
        for (name, shard) in &index.weight_map {
            // Of a shard that could not be opened, that was said.
            let Some(file) = shards[&shard[..]].map(|file| &self.files[file]) else { continue };
            if file.tensor(name).is_none() {
                let remedy = format!("{} says it is there: download both again", index_path.display());
                errors.push(Error::Missing { name: format!("tensor {name:?}"), remedy }.at(file.path().display()));
            }
        }
    }

    /// What was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What was opened, and every file of it.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        std::iter::once(&*self.path).chain(self.files.iter().map(TensorFile::path))
    }

    /// Its files.
    pub fn files(&self) -> &[TensorFile] {
        &self.files
    }

    /// A tensor, if one of the files has it.
    pub fn tensor(&self, name: &str) -> Option<Tensor<'_>> {
        self.files[*self.file_of.get(name)?].tensor(name)
    }

    /// The names of all tensors, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.file_of.keys().map(String::as_str)
    }

    /// The names that begin with `prefix`, in order.
    pub fn names_under(&self, prefix: &str) -> impl Iterator<Item = &str> {
        let from = self.file_of.range::<str, _>((std::ops::Bound::Included(prefix), std::ops::Bound::Unbounded));
        from.map(|(name, _)| name.as_str()).take_while(move |name| name.starts_with(prefix))
    }

    /// File and name of a tensor, for messages.
    fn place(&self, name: &str) -> String {
        let path = self.file_of.get(name).map_or(&*self.path, |&file| self.files[file].path());
        place(path, name)
    }
}

/// Whether a string is a name without folders, fit to be printed.
fn is_file_name(name: &str) -> bool {
    Path::new(name).file_name() == Some(name.as_ref()) && !name.contains(char::is_control)
}

/// File and name of a tensor, for messages.
fn place(path: &Path, name: &str) -> String {
    format!("{}: {name}", path.display())
}

/// What a path stands for.
enum Sources {
    Index(PathBuf),
    Files(Vec<PathBuf>),
}

fn sources(path: &Path) -> Result<Sources, Error> {
    if !std::fs::metadata(path).map_err(|error| Error::io(path, error))?.is_dir() {
        let is_index = path.extension().is_some_and(|extension| extension == "json");
        return Ok(if is_index { Sources::Index(path.to_owned()) } else { Sources::Files(vec![path.to_owned()]) });
    }
    let ending_in = |ending: &str| -> Result<Vec<PathBuf>, Error> {
        let mut paths = Vec::new();
        for entry in std::fs::read_dir(path).map_err(|error| Error::io(path, error))? {
            let entry = entry.map_err(|error| Error::io(path, error))?;
            if entry.file_name().to_string_lossy().ends_with(ending) {
                paths.push(entry.path());
            }
        }
        paths.sort();
        Ok(paths)
    };
    let mut indices = ending_in(INDEX_ENDING)?;
    match (indices.len(), path.join(INDEX_NAME)) {
        (0, _) => {}
        (1, _) => return Ok(Sources::Index(indices.remove(0))),
        (_, usual) if indices.contains(&usual) => return Ok(Sources::Index(usual)),
        (several, _) => {
            let what = format!("it has {several} files *{INDEX_ENDING}; give the path of one");
            return Err(Error::Invalid(what).at(path.display()));
        }
    }
    let files = ending_in(".safetensors")?;
    if files.is_empty() {
        let what = "it has no *.safetensors file; give a model's directory or file";
        return Err(Error::Invalid(what.into()).at(path.display()));
    }
    Ok(Sources::Files(files))
}

fn read_index(path: &Path) -> Result<Index, Error> {
    let bytes = std::fs::read(path).map_err(|error| Error::io(path, error))?;
    let what = |error| Error::Invalid(format!("not an index of shards: {error}; download it again"));
    serde_json::from_slice(&bytes).map_err(|error| what(error).at(path.display()))
}
