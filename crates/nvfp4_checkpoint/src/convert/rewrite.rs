//! Writes a model anew: files of the same names, in which some tensors are replaced, some are dropped, and all others are
//! copied bit for bit; their index; and the files beside the weights.
//!
//! All names, types and shapes of the result are known before any number is read. So headers are written first, then
//! tensor after tensor in parts.

use std::collections::{BTreeMap, HashMap};
use std::io::Write;
use std::path::Path;

use super::config::Others;
use super::place::{file_name, is_one_file};
use super::written::Written;
use crate::file::{Tensor, TensorFile};
use crate::partial::{PartialFolder, check_file, check_folder};
use crate::write::{TensorWriter, refuse_input};
use crate::{Checkpoint, Dtype, INDEX_NAME, place};
use nvfp4_core::Error;
use nvfp4_core::files::open_regular;

/// Number of bytes copied at once.
const COPIED_AT_ONCE: usize = 16 << 20;

/// Name, type and shape of a tensor.
pub(super) type TensorLayout = (String, Dtype, Vec<usize>);

/// What happens to a tensor of the input.
pub(super) enum Fate {
    /// The tensor is copied bit for bit.
    Copied,
    /// The tensor is not in the output: it belonged to the old form of a replaced tensor.
    Dropped,
    /// These tensors take its place.
    Replaced(Vec<TensorLayout>),
}

/// Receives the tensors that were written.
pub(super) type Done<'d> = &'d mut dyn FnMut(Written<'_>);

/// A change of a model.
pub(super) trait Rewrite {
    /// Returns what happens to a tensor.
    fn fate(&self, name: &str) -> Fate;

    /// Writes the tensors that replace a tensor.
    fn replace(
        &self,
        file: &TensorFile,
        name: &str,
        tensor: Tensor<'_>,
        writer: &mut TensorWriter,
        done: Done<'_>,
    ) -> Result<(), Error>;

    /// Names and contents of the configurations of the new model.
    fn configurations(&self) -> Vec<(&'static str, String)>;
}

/// Returns the bytes of all tensors of the model, which are read to write it anew.
pub(super) fn bytes(checkpoint: &Checkpoint) -> usize {
    checkpoint.files().iter().flat_map(TensorFile::tensors).map(|(_, tensor)| tensor.data.len()).sum()
}

/// Checks that the result can be written to `out`.
pub(super) fn check_target(checkpoint: &Checkpoint, out: &Path) -> Result<(), Error> {
    refuse_input(out, checkpoint.paths())?;
    if is_one_file(checkpoint) { check_file(out) } else { check_folder(out) }
}

/// Writes the model: one file if a file was opened. Otherwise a folder with files of the same names, their index, the
/// configurations and the small files of the model. `out` stays absent or unchanged until everything is written.
pub(super) fn write(
    checkpoint: &Checkpoint,
    others: &Others,
    change: &impl Rewrite,
    out: &Path,
    done: Done<'_>,
) -> Result<(), Error> {
    check_target(checkpoint, out)?;
    if let [file] = checkpoint.files()
        && is_one_file(checkpoint)
    {
        let create = |metadata, layout| TensorWriter::create(out, metadata, layout);
        return write_file(checkpoint, file, change, create, done).map(drop);
    }
    let mut folder = PartialFolder::create(out)?;
    let mut weight_map = BTreeMap::new();
    let mut total_size = 0;
    for file in checkpoint.files() {
        let name = file_name(file.path());
        let create = |metadata, layout| TensorWriter::create_in(&mut folder, name, metadata, layout);
        for (tensor, bytes) in write_file(checkpoint, file, change, create, done)? {
            if let Some(other) = weight_map.insert(tensor.clone(), name.display().to_string()) {
                let what =
                    format!("the output would contain two tensors of this name, also in {other}; rename one of them");
                return Err(Error::Invalid(what).at(place(name, &tensor)));
            }
            total_size += bytes;
        }
    }
    let mut write = |name: &Path, contents: &[u8]| -> Result<(), Error> {
        let mut file = folder.create_file(name)?;
        file.write(|file| file.write_all(contents))?;
        file.finish()
    };
    if checkpoint.files().len() > 1 {
        let index = serde_json::json!({"metadata": {"total_size": total_size}, "weight_map": weight_map});
        write(Path::new(INDEX_NAME), format!("{index:#}\n").as_bytes())?;
    }
    for (name, contents) in change.configurations() {
        write(Path::new(name), contents.as_bytes())?;
    }
    for path in &others.copied {
        let mut from = open_regular(path, "a model's folder")?;
        let mut file = folder.create_file(file_name(path))?;
        file.write(|file| std::io::copy(&mut from, file).map(drop))?;
        file.finish()?;
    }
    folder.finish()
}

/// Writes one file; returns the names and bytes of its tensors.
fn write_file(
    checkpoint: &Checkpoint,
    file: &TensorFile,
    change: &impl Rewrite,
    create: impl FnOnce(Option<HashMap<String, String>>, Vec<TensorLayout>) -> Result<TensorWriter, Error>,
    done: Done<'_>,
) -> Result<Vec<(String, usize)>, Error> {
    let mut layout = Vec::new();
    for (name, tensor) in file.tensors() {
        match change.fate(name) {
            Fate::Copied => layout.push((name.to_owned(), tensor.dtype, tensor.shape.to_vec())),
            Fate::Dropped => {}
            Fate::Replaced(tensors) => layout.extend(tensors),
        }
    }
    let mut writer = create(file.metadata().cloned(), layout)?;
    let contents = writer.missing().map(|(name, bytes)| (name.to_owned(), bytes)).collect();
    for (name, tensor) in file.tensors() {
        match change.fate(name) {
            // Its numbers are written with the weight that they belong to.
            Fate::Dropped => {
                done(Written::Dropped { name, bytes: tensor.data.len() });
                continue;
            }
            Fate::Replaced(_) => change
                .replace(file, name, tensor, &mut writer, done)
                .map_err(|error| error.at(place(file.path(), name)))?,
            Fate::Copied => {
                copy(file, tensor, name, &mut writer)?;
                done(Written::Copied { name, bytes: tensor.data.len() });
            }
        }
        file.release();
    }
    checkpoint.check_unchanged()?;
    writer.finish()?;
    Ok(contents)
}

/// Copies a tensor unchanged.
fn copy(file: &TensorFile, tensor: Tensor<'_>, name: &str, writer: &mut TensorWriter) -> Result<(), Error> {
    let at = writer.place(name);
    for (index, bytes) in tensor.data.chunks(COPIED_AT_ONCE).enumerate() {
        writer.write_part(&at, index * COPIED_AT_ONCE, bytes)?;
        file.release_part(bytes);
    }
    Ok(())
}
