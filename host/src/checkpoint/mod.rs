//! Model files: memory-mapped safetensors in, NVFP4 weights out, and results back to disk. Knows no backend.
//!
//! [`TensorFile`] is one file and [`Checkpoint`] all the files of a model; [`Quantized`] is a weight in either of the
//! [`Format`]s that models are published in, [`Layer`] the experts of a layer.

mod activations;
mod convert;
mod file;
mod floats;
mod inspect;
mod layer;
mod quantized;
mod write;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

pub use activations::Activations;
pub use convert::{Conversion, Written};
pub use file::{Tensor, TensorFile};
pub use floats::Loss;
pub use inspect::{Inspection, Range, Weight};
pub use layer::Layer;
pub use quantized::{Format, Quantized};
pub use safetensors::Dtype;
pub use write::{OutputFile, TensorWriter};

use crate::error::Error;

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
            Ok(Sources::Files(paths)) => checkpoint.add_files(&paths, &mut errors),
            Ok(Sources::Index(path)) => match read_index(&path) {
                Ok(index) => checkpoint.add_shards(&path, &index, &mut errors),
                Err(error) => errors.push(error),
            },
            Err(error) => errors.push(error),
        }
        (checkpoint, errors)
    }

    fn add_files(&mut self, paths: &[PathBuf], errors: &mut Vec<Error>) {
        for path in paths {
            let file = match TensorFile::open(path) {
                Ok(file) => file,
                Err(error) => {
                    errors.push(error);
                    continue;
                }
            };
            for (name, _) in file.tensors() {
                if let Some(other) = self.file_of.insert(name.to_owned(), self.files.len()) {
                    let other = self.files[other].path().display();
                    let what = format!("it is in {other} too; remove one of the files");
                    errors.push(Error::Invalid(what).at(place(path, name)));
                }
            }
            self.files.push(file);
        }
    }

    fn add_shards(&mut self, index_path: &Path, index: &Index, errors: &mut Vec<Error>) {
        let folder = index_path.parent().unwrap_or(Path::new(""));
        let mut shards = BTreeSet::new();
        for shard in index.weight_map.values() {
            let mut parts = Path::new(shard).components();
            if let (Some(Component::Normal(name)), None) = (parts.next(), parts.next()) {
                shards.insert(folder.join(name));
            } else {
                let what = format!("shard {shard:?} is not a file beside the index; download the model again");
                errors.push(Error::Invalid(what).at(index_path.display()));
            }
        }
        let shards: Vec<PathBuf> = shards.into_iter().collect();
        self.add_files(&shards, errors);
        for (name, shard) in &index.weight_map {
            let shard = folder.join(shard);
            // Of a shard that could not be opened, that was said.
            let opened = self.files.iter().find(|file| file.path() == shard);
            if opened.is_some_and(|file| file.tensor(name).is_none()) {
                let remedy = format!("{} says it is there: download both again", index_path.display());
                errors.push(Error::Missing { name: format!("tensor {name:?}"), remedy }.at(shard.display()));
            }
        }
    }

    /// What was opened.
    pub fn path(&self) -> &Path {
        &self.path
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
