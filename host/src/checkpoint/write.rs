//! Safetensors files, written whole or not at all.

use std::collections::{BTreeMap, HashMap};
use std::io::Write;
use std::path::Path;

use safetensors::tensor::{Metadata, TensorInfo};

use super::Dtype;
use super::file::{LENGTH_BYTES, MAX_HEADER_BYTES, byte_count};
use super::partial::{PartialFile, PartialFolder};
use crate::error::Error;
use crate::output::Output;
use crate::problem::{GroupedProblem, TokenDtype};

/// A safetensors file being written: first its header, for which all types and shapes are known, then the tensors in
/// any order.
#[derive(Debug)]
pub struct TensorWriter {
    file: PartialFile,
    /// Bytes of each tensor that is still to be written.
    missing: BTreeMap<String, (u64, usize)>,
}

impl TensorWriter {
    /// Creates a file of these tensors, under a temporary name beside `path`, with its header. On drop it vanishes;
    /// [`TensorWriter::finish`] gives it its name.
    ///
    /// # Errors
    /// If the folder or the file cannot be written, two tensors share a name, or sizes overflow.
    pub fn create(
        path: &Path,
        metadata: Option<HashMap<String, String>>,
        tensors: Vec<(String, Dtype, Vec<usize>)>,
    ) -> Result<Self, Error> {
        Self::begin(path, metadata, tensors, || PartialFile::create(path))
    }

    /// As [`TensorWriter::create`], in a folder that is not complete either.
    ///
    /// # Errors
    /// Likewise.
    pub(super) fn create_in(
        folder: &mut PartialFolder,
        name: &Path,
        metadata: Option<HashMap<String, String>>,
        tensors: Vec<(String, Dtype, Vec<usize>)>,
    ) -> Result<Self, Error> {
        Self::begin(name, metadata, tensors, || folder.create_file(name))
    }

    fn begin(
        path: &Path,
        metadata: Option<HashMap<String, String>>,
        mut tensors: Vec<(String, Dtype, Vec<usize>)>,
        create: impl FnOnce() -> Result<PartialFile, Error>,
    ) -> Result<Self, Error> {
        // Larger types first, so that every tensor is aligned for its type.
        tensors.sort_by(|(name, dtype, _), (other_name, other, _)| other.cmp(dtype).then_with(|| name.cmp(other_name)));
        let mut end = 0usize;
        let mut infos = Vec::with_capacity(tensors.len());
        let mut missing = BTreeMap::new();
        for (name, dtype, shape) in tensors {
            let at = |error: Error| error.at(super::place(path, &name));
            let start = end;
            let bytes = byte_count(dtype, &shape).ok_or_else(|| at(Error::TooLarge))?;
            end = start.checked_add(bytes).ok_or_else(|| at(Error::TooLarge))?;
            if missing.insert(name.clone(), (start as u64, bytes)).is_some() {
                return Err(at(Error::Invalid("two tensors would have this name; rename one".into())));
            }
            infos.push((name, TensorInfo { dtype, shape, data_offsets: (start, end) }));
        }
        let header = Metadata::new(metadata, infos).expect("offsets that were just counted");
        let mut header = serde_json::to_vec(&header).expect("strings and numbers");
        header.resize(header.len().next_multiple_of(LENGTH_BYTES), b' ');
        if header.len() > MAX_HEADER_BYTES {
            return Err(Error::TooLarge.at(path.display()));
        }
        let data_start = (LENGTH_BYTES + header.len()) as u64;
        for (start, _) in missing.values_mut() {
            *start += data_start;
        }
        let mut file = create()?;
        file.write(|file| {
            file.write_all(&(header.len() as u64).to_le_bytes())?;
            file.write_all(&header)?;
            file.set_len(data_start + end as u64)
        })?;
        Ok(Self { file, missing })
    }

    /// The tensors that are still to be written, with their bytes.
    pub fn missing(&self) -> impl Iterator<Item = (&str, usize)> {
        self.missing.iter().map(|(name, &(_, bytes))| (&name[..], bytes))
    }

    /// Writes the bytes of a tensor, row-major and little-endian.
    ///
    /// # Errors
    /// If the file cannot be written.
    ///
    /// # Panics
    /// If no tensor of this name and length is still to be written.
    pub fn write(&mut self, name: &str, bytes: &[u8]) -> Result<(), Error> {
        let place = self.place(name);
        assert_eq!(bytes.len(), place.bytes, "bytes of {name}");
        self.write_part(&place, 0, bytes)
    }

    /// Takes a tensor from those that are still to be written, to write it in parts.
    ///
    /// # Panics
    /// If no tensor of this name is still to be written.
    pub(super) fn place(&mut self, name: &str) -> Place {
        let (start, bytes) = self.missing.remove(name).unwrap_or_else(|| panic!("{name} is not to be written"));
        Place { start, bytes }
    }

    /// Writes bytes of a tensor, from one of its bytes on; from any thread.
    ///
    /// # Errors
    /// If the file cannot be written.
    ///
    /// # Panics
    /// If they go past the end of the tensor.
    pub(super) fn write_part(&self, place: &Place, at: usize, bytes: &[u8]) -> Result<(), Error> {
        assert!(at + bytes.len() <= place.bytes, "bytes of the tensor");
        self.file.write_at(bytes, place.start + at as u64)
    }

    /// Puts the file in its place, over one that may be there.
    ///
    /// # Errors
    /// If it cannot be renamed.
    ///
    /// # Panics
    /// If a tensor was not written.
    pub fn finish(self) -> Result<(), Error> {
        assert!(self.missing.is_empty(), "not written: {:?}", self.missing.keys());
        self.file.finish()
    }
}

/// Refuses to write over a file that is read.
///
/// # Errors
/// [`Error::Invalid`] if `out` is one of `inputs`, by whatever name.
pub fn refuse_input<'a>(out: &Path, inputs: impl IntoIterator<Item = &'a Path>) -> Result<(), Error> {
    // What does not exist yet is nobody's input.
    let Ok(target) = out.canonicalize() else { return Ok(()) };
    if inputs.into_iter().any(|input| input.canonicalize().is_ok_and(|input| input == target)) {
        return Err(Error::Invalid("it is the input; give another name to write".into()).at(out.display()));
    }
    Ok(())
}

/// Where a tensor is in a file being written.
#[derive(Debug)]
pub(super) struct Place {
    start: u64,
    bytes: usize,
}

/// The name of the output's tensor.
const OUTPUT: &str = "output";

/// A safetensors file for the output of a step: `output` `[T, N]` in f16 or bf16, rows in the order of the groups.
#[derive(Debug)]
pub struct OutputFile(TensorWriter);

impl OutputFile {
    /// Creates the file, before the work, so that a path that cannot be written is known in time.
    ///
    /// # Errors
    /// If it cannot be written, or the groups do not share one N.
    pub fn create(path: &Path, problem: &GroupedProblem) -> Result<Self, Error> {
        let n = problem.groups().first().map_or(0, |group| group.n);
        if let Some(other) = problem.groups().iter().find(|group| group.n != n) {
            let what = "N of a group (an output file has one N for all)";
            return Err(Error::Mismatch { what, got: other.n, expected: n }.at(path.display()));
        }
        let rows = problem.groups().iter().map(|group| group.m).sum();
        let dtype = match problem.out_dtype() {
            TokenDtype::F16 => Dtype::F16,
            TokenDtype::Bf16 => Dtype::BF16,
        };
        TensorWriter::create(path, None, vec![(OUTPUT.into(), dtype, vec![rows, n])]).map(Self)
    }

    /// Writes the output and puts the file in its place.
    ///
    /// # Errors
    /// If the file cannot be written.
    ///
    /// # Panics
    /// If the output is of another problem.
    pub fn write(mut self, output: &Output) -> Result<(), Error> {
        self.0.write(OUTPUT, bytemuck::cast_slice(output.bits()))?;
        self.0.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::TensorFile;

    #[test]
    fn tensors_written_in_any_order_are_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.safetensors");
        let tensors = vec![("b".into(), Dtype::U8, vec![3]), ("a".into(), Dtype::F32, vec![1, 2])];
        let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        let mut writer = TensorWriter::create(&path, Some(metadata.clone()), tensors).unwrap();
        writer.write("b", &[1, 2, 3]).unwrap();
        writer.write("a", bytemuck::cast_slice(&[0.5f32, 2.0])).unwrap();
        assert!(!path.exists(), "it has no name before it is complete");
        writer.finish().unwrap();
        let file = TensorFile::open(&path).unwrap();
        assert_eq!(file.metadata(), Some(&metadata));
        assert_eq!(file.tensor("b").unwrap().data, [1, 2, 3]);
        assert_eq!(*file.tensor("a").unwrap().numbers::<f32>(), [0.5, 2.0]);
    }

    #[test]
    fn an_unfinished_file_leaves_the_old_one_and_no_rubbish() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.safetensors");
        std::fs::write(&path, "old").unwrap();
        drop(TensorWriter::create(&path, None, vec![("a".into(), Dtype::U8, vec![1])]).unwrap());
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn what_cannot_be_written_is_refused_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let create = |path: &Path, names: &[&str]| {
            TensorWriter::create(path, None, names.iter().map(|&name| (name.into(), Dtype::U8, vec![1])).collect())
        };
        assert!(create(&folder.path().join("no/such/folder"), &["a"]).is_err());
        assert!(create(folder.path(), &["a"]).is_err(), "a folder");
        assert!(create(Path::new("/dev/null"), &["a"]).is_err(), "a device");
        assert!(create(Path::new(".."), &["a"]).is_err());
        assert!(create(&folder.path().join("x"), &["a", "a"]).is_err());
        let huge = vec![("a".into(), Dtype::F32, vec![usize::MAX, 2])];
        assert!(TensorWriter::create(&folder.path().join("x"), None, huge).is_err());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
