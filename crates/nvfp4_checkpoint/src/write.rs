//! Writes safetensors files: a file appears complete or not at all.

use std::collections::{BTreeMap, HashMap};
use std::io::Write;
use std::path::Path;

use safetensors::tensor::{Metadata, TensorInfo};

use super::Dtype;
use super::file::{LENGTH_BYTES, MAX_HEADER_BYTES, byte_count};
use super::partial::{PartialFile, PartialFolder};
use nvfp4_core::Error;
use nvfp4_core::Output;
use nvfp4_core::problem::{GroupedProblem, TokenDtype};

/// A safetensors file being written: first the header, which needs all types and shapes, then the tensors in any order.
#[derive(Debug)]
pub struct TensorWriter {
    file: PartialFile,
    /// Start and length in bytes of each tensor that is not written yet.
    missing: BTreeMap<String, (u64, usize)>,
}

impl TensorWriter {
    /// Creates a file for these tensors under a temporary name beside `path`, and writes its header.
    /// [`TensorWriter::finish`] renames it to `path`; dropping the writer removes it.
    ///
    /// # Errors
    /// Returns an error if the folder or the file cannot be written, two tensors share a name, or sizes overflow.
    pub fn create(
        path: &Path,
        metadata: Option<HashMap<String, String>>,
        tensors: Vec<(String, Dtype, Vec<usize>)>,
    ) -> Result<Self, Error> {
        Self::begin(path, metadata, tensors, || PartialFile::create(path))
    }

    /// Like [`TensorWriter::create`], in a folder that is being written.
    ///
    /// # Errors
    /// Returns the errors of [`TensorWriter::create`].
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
        // Larger types come first, so that every tensor is aligned for its type.
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
        let header = Metadata::new(metadata, infos).expect("the offsets are contiguous");
        let mut header = serde_json::to_vec(&header).expect("a header of strings and numbers is valid JSON");
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

    /// Names and lengths in bytes of the tensors that are not written yet.
    pub fn missing(&self) -> impl Iterator<Item = (&str, usize)> {
        self.missing.iter().map(|(name, &(_, bytes))| (&name[..], bytes))
    }

    /// Writes the bytes of a tensor, row-major and little-endian.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    ///
    /// # Panics
    /// Panics if no unwritten tensor has this name and length.
    pub fn write(&mut self, name: &str, bytes: &[u8]) -> Result<(), Error> {
        let place = self.place(name);
        assert_eq!(bytes.len(), place.bytes, "bytes of {name}");
        self.write_part(&place, 0, bytes)
    }

    /// Removes a tensor from the list of unwritten tensors; the caller writes it in parts.
    ///
    /// # Panics
    /// Panics if no unwritten tensor has this name.
    pub(super) fn place(&mut self, name: &str) -> Place {
        let (start, bytes) = self.missing.remove(name).unwrap_or_else(|| panic!("no unwritten tensor is named {name}"));
        Place { start, bytes }
    }

    /// Writes bytes of a tensor, starting at its byte `at`; callable from any thread.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    ///
    /// # Panics
    /// Panics if the bytes exceed the end of the tensor.
    pub(super) fn write_part(&self, place: &Place, at: usize, bytes: &[u8]) -> Result<(), Error> {
        assert!(at + bytes.len() <= place.bytes, "the bytes exceed the end of the tensor");
        self.file.write_at(bytes, place.start + at as u64)
    }

    /// Renames the file to its final path, and replaces an existing file.
    ///
    /// # Errors
    /// Returns an error if the file cannot be renamed.
    ///
    /// # Panics
    /// Panics if a tensor is not written.
    pub fn finish(self) -> Result<(), Error> {
        assert!(self.missing.is_empty(), "tensors not written: {:?}", self.missing.keys());
        self.file.finish()
    }
}

/// Refuses to overwrite an input file.
///
/// # Errors
/// [`Error::Invalid`] if `out` refers to one of `inputs`, under any name.
pub fn refuse_input<'a>(out: &Path, inputs: impl IntoIterator<Item = &'a Path>) -> Result<(), Error> {
    // A path that does not exist cannot be an input.
    let Ok(target) = out.canonicalize() else { return Ok(()) };
    if inputs.into_iter().any(|input| input.canonicalize().is_ok_and(|input| input == target)) {
        return Err(Error::Invalid("the output is also an input; give another output path".into()).at(out.display()));
    }
    Ok(())
}

/// Position of a tensor in a file being written.
#[derive(Debug)]
pub(super) struct Place {
    start: u64,
    bytes: usize,
}

/// Name of the output tensor.
const OUTPUT: &str = "output";

/// A safetensors file for the output of a step: `output` `[T, N]` in f16 or bf16, with rows in the order of the tokens or
/// groups.
#[derive(Debug)]
pub struct OutputFile(TensorWriter);

impl OutputFile {
    /// Creates the file before the computation, so that an unusable path is reported early.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written, or the groups have different N.
    pub fn create(path: &Path, problem: &GroupedProblem) -> Result<Self, Error> {
        let n = problem.groups().first().map_or(0, |group| group.n);
        if let Some(other) = problem.groups().iter().find(|group| group.n != n) {
            let what = "N of a group (all groups of an output file must have the same N)";
            return Err(Error::Mismatch { what, got: other.n, expected: n }.at(path.display()));
        }
        let rows = problem.groups().iter().map(|group| group.m).sum();
        Self::of_rows(path, problem.out_dtype(), [rows, n])
    }

    /// Creates the file for an output `[T, N]` of a whole layer.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn of_rows(path: &Path, dtype: TokenDtype, sizes: [usize; 2]) -> Result<Self, Error> {
        let dtype = match dtype {
            TokenDtype::F16 => Dtype::F16,
            TokenDtype::Bf16 => Dtype::BF16,
        };
        TensorWriter::create(path, None, vec![(OUTPUT.into(), dtype, sizes.to_vec())]).map(Self)
    }

    /// Writes the output and renames the file to its final path.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    ///
    /// # Panics
    /// Panics if the output belongs to another problem.
    pub fn write(self, output: &Output) -> Result<(), Error> {
        self.write_bits(output.bits())
    }

    /// Writes the bits of all rows and renames the file to its final path.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    ///
    /// # Panics
    /// Panics if the number of elements differs from the file's sizes.
    pub fn write_bits(mut self, bits: &[u16]) -> Result<(), Error> {
        self.0.write(OUTPUT, bytemuck::cast_slice(bits))?;
        self.0.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TensorFile;

    #[test]
    fn tensors_written_in_any_order_are_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.safetensors");
        let tensors = vec![("b".into(), Dtype::U8, vec![3]), ("a".into(), Dtype::F32, vec![1, 2])];
        let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        let mut writer = TensorWriter::create(&path, Some(metadata.clone()), tensors).unwrap();
        writer.write("b", &[1, 2, 3]).unwrap();
        writer.write("a", bytemuck::cast_slice(&[0.5f32, 2.0])).unwrap();
        assert!(!path.exists(), "the file must not exist before it is complete");
        writer.finish().unwrap();
        let file = TensorFile::open(&path).unwrap();
        assert_eq!(file.metadata(), Some(&metadata));
        assert_eq!(file.tensor("b").unwrap().data, [1, 2, 3]);
        assert_eq!(*file.tensor("a").unwrap().numbers::<f32>(), [0.5, 2.0]);
    }

    #[test]
    fn dropped_writer_keeps_the_old_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.safetensors");
        std::fs::write(&path, "old").unwrap();
        drop(TensorWriter::create(&path, None, vec![("a".into(), Dtype::U8, vec![1])]).unwrap());
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn unwritable_paths_and_tensors_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let create = |path: &Path, names: &[&str]| {
            TensorWriter::create(path, None, names.iter().map(|&name| (name.into(), Dtype::U8, vec![1])).collect())
        };
        assert!(create(&folder.path().join("no/such/folder"), &["a"]).is_err());
        assert!(create(folder.path(), &["a"]).is_err(), "the path is a folder");
        assert!(create(Path::new("/dev/null"), &["a"]).is_err(), "the path is a device");
        assert!(create(Path::new(".."), &["a"]).is_err());
        assert!(create(&folder.path().join("x"), &["a", "a"]).is_err());
        let huge = vec![("a".into(), Dtype::F32, vec![usize::MAX, 2])];
        assert!(TensorWriter::create(&folder.path().join("x"), None, huge).is_err());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
