//! One memory-mapped safetensors file. This module knows no names of models.
//!
//! This module checks the header itself and takes only types and serializer from the `safetensors` crate. The crate
//! keeps the last of two tensors with one name, does not name the tensor whose sizes are wrong, and adds offsets
//! without an overflow check. Format: <https://github.com/huggingface/safetensors#format>.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::fs::Metadata;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use memmap2::Mmap;
use safetensors::Dtype;
use safetensors::tensor::TensorInfo;
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};

use crate::signals::Guarded;
use nvfp4_core::Error;
use nvfp4_core::files::{foreign_kind, open_regular};

/// Number of bytes before the header; they hold its length as a little-endian u64.
pub(super) const LENGTH_BYTES: usize = 8;

/// Maximum length of a safetensors header, in bytes.
pub(super) const MAX_HEADER_BYTES: usize = 100_000_000;

/// Header key that is not a tensor.
const METADATA: &str = "__metadata__";

const _: () = assert!(cfg!(target_endian = "little"), "tensors are little-endian and are read in place");

/// A tensor in a mapped file.
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    /// Type of the elements.
    pub dtype: Dtype,
    /// Sizes, outermost first.
    pub shape: &'a [usize],
    /// Bytes, row-major and little-endian; not always aligned for `dtype`.
    pub data: &'a [u8],
}

impl<'a> Tensor<'a> {
    /// Returns the elements as numbers of type `T`, in place if they are aligned.
    ///
    /// # Panics
    /// Panics if the length is not a multiple of the size of `T`.
    pub fn numbers<T: bytemuck::AnyBitPattern + bytemuck::NoUninit>(self) -> Cow<'a, [T]> {
        match bytemuck::try_cast_slice(self.data) {
            Ok(numbers) => Cow::Borrowed(numbers),
            Err(_) => Cow::Owned(bytemuck::allocation::pod_collect_to_vec(self.data)),
        }
    }
}

/// A mapped safetensors file with a checked header. Tensors fill the space from the end of the header to the end of the
/// file without gaps, and each has the length that its shape requires.
#[derive(Debug)]
pub struct TensorFile {
    mapped: Mapped,
    data_start: usize,
    metadata: Option<HashMap<String, String>>,
    tensors: BTreeMap<String, TensorInfo>,
}

impl TensorFile {
    /// Maps a file and checks its header.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read or is not a valid safetensors file.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let mapped = Mapped::open(path, "a safetensors file")?;
        let (data_start, header) = mapped.parsed(parse)?;
        let (metadata, tensors) = (header.metadata, header.tensors);
        Ok(Self { mapped, data_start, metadata, tensors })
    }

    /// Checks that the file has not changed since it was opened. Call it after reading tensors and before using results
    /// computed from them.
    ///
    /// # Errors
    /// Returns an error if the file was changed or truncated, or a page could not be read.
    pub fn check_unchanged(&self) -> Result<(), Error> {
        self.mapped.check_unchanged()
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        self.mapped.path()
    }

    /// Strings that the writer put into the header beside the tensors.
    pub fn metadata(&self) -> Option<&HashMap<String, String>> {
        self.metadata.as_ref()
    }

    /// Returns a tensor by name, or `None` if the file lacks it.
    pub fn tensor(&self, name: &str) -> Option<Tensor<'_>> {
        self.tensors.get(name).map(|info| self.view(info))
    }

    /// All tensors, in the order of their names.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, Tensor<'_>)> {
        self.tensors.iter().map(|(name, info)| (&name[..], self.view(info)))
    }

    /// Releases the memory of the pages read so far. Tensors stay valid: a later access reads the file again.
    pub fn release(&self) {
        self.mapped.release();
    }

    /// Like [`TensorFile::release`], for a part of a tensor.
    pub(super) fn release_part(&self, data: &[u8]) {
        self.mapped.release_part(data);
    }

    fn view<'a>(&'a self, info: &'a TensorInfo) -> Tensor<'a> {
        let (start, end) = info.data_offsets;
        Tensor { dtype: info.dtype, shape: &info.shape, data: &self.mapped.bytes()[self.data_start..][start..end] }
    }
}

/// A file that is mapped read-only.
#[derive(Debug)]
pub(super) struct Mapped {
    path: PathBuf,
    /// Declared before the map, so that it is dropped first.
    guard: Guarded,
    map: Mmap,
    /// File identity for change detection. The file itself is not kept open: a model can have more files than a process
    /// may open.
    opened: Stamp,
}

impl Mapped {
    /// Maps a file; `what` names its kind, for messages.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read.
    pub(super) fn open(path: &Path, what: &'static str) -> Result<Self, Error> {
        let io = |error| Error::io(path, error);
        let file = open_regular(path, what)?;
        let opened = Stamp::of(&file.metadata().map_err(io)?);
        // SAFETY: the map is read-only. Like every reader of mapped models, this code assumes that nothing changes the
        // file while it is mapped; programs that replace files by renaming comply. If bytes change nevertheless, only
        // numbers change: no index or length is read from the map twice, and `check_unchanged` detects it. Access to a
        // page that was cut off raises SIGBUS; `signals.rs` makes this page read as zeros.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        let guard = Guarded::new(&map);
        Ok(Self { path: path.to_owned(), guard, map, opened })
    }

    /// Parses the file. A change of the file is reported in place of an error that it could have caused.
    ///
    /// # Errors
    /// Returns the error of `parse`, or of [`Mapped::check_unchanged`].
    pub(super) fn parsed<T>(&self, parse: impl FnOnce(&[u8]) -> Result<T, Error>) -> Result<T, Error> {
        let parsed = parse(&self.map);
        self.check_unchanged()?;
        parsed.map_err(|error| error.at(self.path.display()))
    }

    /// Checks that the file has not changed since it was opened.
    ///
    /// # Errors
    /// Returns an error if the file was changed or truncated, or a page could not be read.
    pub(super) fn check_unchanged(&self) -> Result<(), Error> {
        unchanged(&self.path, &self.opened, &self.guard).map_err(|error| error.at(self.path.display()))
    }

    /// Path of the file.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Content of the file.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Releases the memory of the pages read so far. Slices stay valid: a later access reads the file again.
    pub(super) fn release(&self) {
        #[cfg(unix)]
        {
            // SAFETY: the map is a read-only view of a file that is assumed not to change (see `open`), so pages that
            // are read again hold the same bytes.
            let advised = unsafe { self.map.unchecked_advise(memmap2::UncheckedAdvice::DontNeed) };
            // If the advice fails, the system frees the pages when it needs memory.
            drop(advised);
        }
    }

    /// Like [`Mapped::release`], for a part of a tensor.
    pub(super) fn release_part(&self, data: &[u8]) {
        #[cfg(unix)]
        {
            let offset = (data.as_ptr() as usize).wrapping_sub(self.map.as_ptr() as usize);
            if offset <= self.map.len() && data.len() <= self.map.len() - offset {
                // SAFETY: the map is a read-only view of a file that is assumed not to change (see `open`), so pages
                // that are read again hold the same bytes.
                let advised =
                    unsafe { self.map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, offset, data.len()) };
                drop(advised);
            }
        }
        #[cfg(not(unix))]
        let _ = data;
    }
}

/// Properties of a file that differ after a change.
#[derive(Debug, PartialEq)]
struct Stamp {
    /// Device and inode, where the platform has them.
    identity: Option<[u64; 2]>,
    bytes: u64,
    modified: Option<SystemTime>,
}

impl Stamp {
    fn of(metadata: &Metadata) -> Self {
        #[cfg(unix)]
        let identity = {
            use std::os::unix::fs::MetadataExt;
            Some([metadata.dev(), metadata.ino()])
        };
        #[cfg(not(unix))]
        let identity = None;
        Self { identity, bytes: metadata.len(), modified: metadata.modified().ok() }
    }
}

fn unchanged(path: &Path, opened: &Stamp, guard: &Guarded) -> Result<(), Error> {
    // A file that was removed or replaced by another file stays mapped and unchanged.
    let now = std::fs::metadata(path).map(|metadata| Stamp::of(&metadata));
    let now = now.ok().filter(|now| now.identity == opened.identity);
    let what = match now {
        Some(now) if now.bytes < opened.bytes => "the file was truncated while it was read",
        Some(now) if now != *opened => "the file was changed while it was read",
        _ if guard.is_broken() => "a part of the file could not be read from the disk",
        _ => return Ok(()),
    };
    Err(Error::Invalid(format!("{what}; run the command again when the file is complete")))
}

/// JSON of the header. Tensor names are unique; nothing else is checked.
struct Header {
    metadata: Option<HashMap<String, String>>,
    tensors: BTreeMap<String, TensorInfo>,
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Header;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut header = Header { metadata: None, tensors: BTreeMap::new() };
                while let Some(name) = map.next_key::<String>()? {
                    if name == METADATA {
                        header.metadata = map.next_value()?;
                        continue;
                    }
                    let info = map.next_value().map_err(|error| A::Error::custom(format!("tensor {name}: {error}")))?;
                    if header.tensors.insert(name.clone(), info).is_some() {
                        return Err(A::Error::custom(format!("tensor {name} is listed twice")));
                    }
                }
                Ok(header)
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

/// Reads and checks the header of a file; returns the offset of the data and the header.
fn parse(file: &[u8]) -> Result<(usize, Header), Error> {
    parse_header(file).map_err(|error| foreign_kind(file).map_or(error, |kind| Error::Invalid(kind.into())))
}

fn parse_header(file: &[u8]) -> Result<(usize, Header), Error> {
    let truncated = || Error::Safetensors("the file is truncated within its header".into());
    let (length, rest) = file.split_first_chunk::<LENGTH_BYTES>().ok_or_else(truncated)?;
    let length = usize::try_from(u64::from_le_bytes(*length)).unwrap_or(usize::MAX);
    if length > MAX_HEADER_BYTES {
        let what = format!("its header claims {length} bytes, more than the limit of {MAX_HEADER_BYTES}");
        return Err(Error::Safetensors(what));
    }
    let (json, data) = rest.split_at_checked(length).ok_or_else(truncated)?;
    let header: Header =
        serde_json::from_slice(json).map_err(|error| Error::Safetensors(format!("its header: {error}")))?;
    check_layout(&header.tensors, data.len()).map_err(Error::Safetensors)?;
    Ok((LENGTH_BYTES + length, header))
}

fn check_layout(tensors: &BTreeMap<String, TensorInfo>, data_bytes: usize) -> Result<(), String> {
    let mut in_order: Vec<_> = tensors.iter().collect();
    in_order.sort_by_key(|(_, info)| info.data_offsets);
    let mut position = 0;
    for (name, info) in in_order {
        if name.chars().any(char::is_control) {
            return Err(format!("the name of tensor {name} contains control characters"));
        }
        let (start, end) = info.data_offsets;
        if start != position || end < start {
            return Err(format!("tensor {name} is at bytes {start} to {end}, but must start at byte {position}"));
        }
        if end > data_bytes {
            return Err(format!(
                "tensor {name} ends at byte {end}, but the file has {data_bytes} bytes of data: it is truncated"
            ));
        }
        if byte_count(info.dtype, &info.shape) != Some(end - start) {
            return Err(format!(
                "tensor {name} has {} bytes, which do not match {} {:?}",
                end - start,
                info.dtype,
                info.shape
            ));
        }
        position = end;
    }
    if position != data_bytes {
        return Err(format!("{} bytes follow the last tensor", data_bytes - position));
    }
    Ok(())
}

/// Returns the number of bytes of a tensor; `None` if it overflows or is not a whole number.
pub(super) fn byte_count(dtype: Dtype, shape: &[usize]) -> Option<usize> {
    let elements = shape.iter().try_fold(1usize, |product, &size| product.checked_mul(size))?;
    let bits = elements.checked_mul(dtype.bitsize())?;
    bits.is_multiple_of(8).then_some(bits / 8)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(header: &str, data: usize) -> Vec<u8> {
        [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &vec![0; data]].concat()
    }

    fn refusal(header: &str, data: usize) -> String {
        parse(&file(header, data)).err().expect("refused").to_string()
    }

    #[test]
    fn a_valid_header_is_read() {
        let header = r#"{"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[2],"data_offsets":[3,11]},
            "a":{"dtype":"U8","shape":[3,1],"data_offsets":[0,3]},"empty":{"dtype":"U8","shape":[0],"data_offsets":[11,11]}}"#;
        let (start, parsed) = parse(&file(header, 11)).ok().unwrap();
        assert_eq!(start, 8 + header.len());
        assert_eq!(parsed.tensors["b"].data_offsets, (3, 11));
        assert_eq!(parsed.metadata.unwrap()["format"], "pt");
        assert!(parse(&file("{}  ", 0)).is_ok());
    }

    #[test]
    fn hostile_header_is_refused_and_its_tensor_named() {
        for (header, data, words) in [
            (
                r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#,
                3,
                "tensor a ends at byte 4, but the file has 3 bytes of data",
            ),
            (r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#, 5, "1 bytes follow"),
            (r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[4,0]}}"#, 4, "tensor a is at bytes 4 to 0"),
            (r#"{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,4]}}"#, 4, "which do not match F32 [4]"),
            (r#"{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,1]}}"#, 1, "which do not match F4 [3]"),
            (
                r#"{"a":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]}}"#,
                0,
                "which do not match U8",
            ),
            (r#"{"a":{"dtype":"U8","shape":[18446744073709551616],"data_offsets":[0,4]}}"#, 4, "tensor a: "),
            (r#"{"a":{"dtype":"F7","shape":[4],"data_offsets":[0,4]}}"#, 4, "tensor a: unknown variant"),
            (r#"{"a":{"dtype":"U8","shape":[-4],"data_offsets":[0,4]}}"#, 4, "tensor a: "),
            (r#"{"a\n\u001b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#, 4, "contains control characters"),
            (r#"["#, 0, "its header: "),
            ("\u{0}", 0, "its header: "),
        ] {
            let message = refusal(header, data);
            assert!(message.contains(words) && !message.contains('\n'), "{header}: {message}");
        }
    }

    #[test]
    fn tensors_that_share_a_name_or_bytes_are_refused() {
        let twice = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
        assert!(refusal(twice, 4).contains("tensor a is listed twice"));
        let overlap = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}"#;
        assert!(refusal(overlap, 6).contains("tensor b is at bytes 2 to 6, but must start at byte 4"));
    }

    #[test]
    fn foreign_file_kind_is_named() {
        for (bytes, words) in [
            (
                &b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"[..],
                "the file is a Git-LFS pointer",
            ),
            (b"GGUF\x03\0\0\0", "the file is a GGUF file"),
            (b"PK\x03\x04\0\0\0\0\0", "the file is a zip archive"),
            (b"<!DOCTYPE html>", "the file is a web page"),
        ] {
            let message = parse(bytes).err().expect("refused").to_string();
            assert!(message.starts_with(words), "{message}");
        }
        // The length of this header equals the first bytes of a zip archive.
        let mut valid = [&u64::from(u32::from_le_bytes(*b"PK\x03\x04")).to_le_bytes()[..], b"{}"].concat();
        valid.resize(8 + 0x0403_4B50, b' ');
        assert!(parse(&valid).is_ok());
    }

    #[test]
    fn impossible_lengths_allocate_nothing() {
        for length in [1, MAX_HEADER_BYTES as u64, MAX_HEADER_BYTES as u64 + 1, u64::MAX] {
            assert!(parse(&length.to_le_bytes()).is_err());
        }
        assert!(parse(&[0; 7]).is_err());
    }

    #[test]
    fn only_misaligned_numbers_are_copied() {
        let buffer = [0u32, 1 << 8, 0];
        let bytes: &[u8] = bytemuck::cast_slice(&buffer);
        let tensor = |data| Tensor { dtype: Dtype::U32, shape: &[1], data };
        assert!(matches!(tensor(&bytes[4..8]).numbers::<u32>(), Cow::Borrowed([256])));
        assert!(matches!(tensor(&bytes[5..9]).numbers::<u32>(), Cow::Owned(n) if n == [1]));
    }
}
