//! One memory-mapped safetensors file. Knows no names of models.
//!
//! The header is checked here rather than by the `safetensors` crate (whose types and serializer are used): the crate
//! takes the last of two tensors of one name, does not say which tensor's sizes are wrong, and adds offsets unchecked.
//! Format: <https://github.com/huggingface/safetensors#format>.

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

use crate::error::Error;
use crate::files::{foreign_kind, open_regular};
use crate::signals::Guarded;

/// Bytes in front of the header that hold its length, a little-endian u64.
pub(super) const LENGTH_BYTES: usize = 8;

/// The longest header that a safetensors file may have.
pub(super) const MAX_HEADER_BYTES: usize = 100_000_000;

/// The key of the header that is not a tensor.
const METADATA: &str = "__metadata__";

const _: () = assert!(cfg!(target_endian = "little"), "tensors are read in place, and they are little-endian");

/// A tensor in a mapped file.
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its sizes, outermost first.
    pub shape: &'a [usize],
    /// Its bytes, row-major and little-endian; not always aligned for its type.
    pub data: &'a [u8],
}

impl<'a> Tensor<'a> {
    /// Its elements as numbers of the type `T`, in place where they are aligned.
    ///
    /// # Panics
    /// If the bytes are no whole number of elements.
    pub fn numbers<T: bytemuck::AnyBitPattern + bytemuck::NoUninit>(self) -> Cow<'a, [T]> {
        match bytemuck::try_cast_slice(self.data) {
            Ok(numbers) => Cow::Borrowed(numbers),
            Err(_) => Cow::Owned(bytemuck::allocation::pod_collect_to_vec(self.data)),
        }
    }
}

/// A safetensors file, mapped into memory and its header checked: tensors follow one another without gaps from the end
/// of the header to the end of the file, each with the bytes that its shape asks for.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    /// Before the map, so that it is dropped before.
    guard: Guarded,
    map: Mmap,
    /// To see whether the file changes. Not the open file: models have hundreds, and processes may have fewer.
    opened: Stamp,
    data_start: usize,
    metadata: Option<HashMap<String, String>>,
    tensors: BTreeMap<String, TensorInfo>,
}

impl TensorFile {
    /// Maps a file and checks its header.
    ///
    /// # Errors
    /// If it cannot be read or is no valid safetensors file.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let io = |error| Error::io(path, error);
        let file = open_regular(path, "a safetensors file")?;
        let opened = Stamp::of(&file.metadata().map_err(io)?);
        // SAFETY: the map is read-only. It is assumed, as every reader of mapped models does, that nothing changes the file
        // while it is open. Programs that replace files by renaming (ours do) keep to that. Bytes that change all the same
        // are numbers that change: no index or length is ever read from the map a second time, and `check_unchanged` finds
        // it. A page that the file no longer has raises SIGBUS; `signals.rs` makes it read as zeros.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        let guard = Guarded::new(&map);
        let parsed = parse(&map);
        let (data_start, header) = match (parsed, unchanged(path, &opened, &guard)) {
            (_, Err(error)) | (Err(error), Ok(())) => return Err(error.at(path.display())),
            (Ok(parsed), Ok(())) => parsed,
        };
        let (metadata, tensors) = (header.metadata, header.tensors);
        Ok(Self { path: path.to_owned(), guard, map, opened, data_start, metadata, tensors })
    }

    /// Checks that the file is still what it was when it was opened. To be asked after its tensors were read and before
    /// anything that was made of them is believed.
    ///
    /// # Errors
    /// If it was changed or cut off since, or a page of it could not be read.
    pub fn check_unchanged(&self) -> Result<(), Error> {
        unchanged(&self.path, &self.opened, &self.guard).map_err(|error| error.at(self.path.display()))
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The strings that its writer put into the header beside the tensors.
    pub fn metadata(&self) -> Option<&HashMap<String, String>> {
        self.metadata.as_ref()
    }

    /// A tensor, if the file has it.
    pub fn tensor(&self, name: &str) -> Option<Tensor<'_>> {
        self.tensors.get(name).map(|info| self.view(info))
    }

    /// All tensors in order of their names.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, Tensor<'_>)> {
        self.tensors.iter().map(|(name, info)| (&name[..], self.view(info)))
    }

    /// Lets go of the memory that holds what was read so far. The tensors stay as they are: what is read again comes from
    /// the file again.
    pub fn release(&self) {
        #[cfg(unix)]
        {
            // SAFETY: the pages are a read-only view of a file that is assumed not to change (see `open`), so those that
            // are read back hold the same bytes.
            let advised = unsafe { self.map.unchecked_advise(memmap2::UncheckedAdvice::DontNeed) };
            // Without the advice the system frees pages when it must.
            drop(advised);
        }
    }

    /// As [`TensorFile::release`], for a part of a tensor.
    pub(super) fn release_part(&self, data: &[u8]) {
        #[cfg(unix)]
        {
            let offset = (data.as_ptr() as usize).wrapping_sub(self.map.as_ptr() as usize);
            if offset <= self.map.len() && data.len() <= self.map.len() - offset {
                // SAFETY: as in `release`.
                let advised =
                    unsafe { self.map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, offset, data.len()) };
                drop(advised);
            }
        }
        #[cfg(not(unix))]
        let _ = data;
    }

    fn view<'a>(&'a self, info: &'a TensorInfo) -> Tensor<'a> {
        let (start, end) = info.data_offsets;
        Tensor { dtype: info.dtype, shape: &info.shape, data: &self.map[self.data_start..][start..end] }
    }
}

/// What changes when a file does.
#[derive(Debug, PartialEq)]
struct Stamp {
    /// Its number on its device, where files have one.
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
    // What was removed or replaced by another file is mapped still, as it was.
    let now = std::fs::metadata(path).map(|metadata| Stamp::of(&metadata));
    let now = now.ok().filter(|now| now.identity == opened.identity);
    let what = match now {
        Some(now) if now.bytes < opened.bytes => "it was cut off while it was read",
        Some(now) if now != *opened => "it was changed while it was read",
        _ if guard.is_broken() => "a part of it could not be read from the disk",
        _ => return Ok(()),
    };
    Err(Error::Invalid(format!("{what}; begin again once it is complete")))
}

/// The header's JSON. Every tensor's name is its own; nothing else is checked.
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
                        return Err(A::Error::custom(format!("tensor {name} is there twice")));
                    }
                }
                Ok(header)
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

/// Reads and checks the header of a file; also returns where the data starts.
fn parse(file: &[u8]) -> Result<(usize, Header), Error> {
    parse_header(file).map_err(|error| foreign_kind(file).map_or(error, |kind| Error::Invalid(kind.into())))
}

fn parse_header(file: &[u8]) -> Result<(usize, Header), Error> {
    let truncated = || Error::Safetensors("it is cut off within its header".into());
    let (length, rest) = file.split_first_chunk::<LENGTH_BYTES>().ok_or_else(truncated)?;
    let length = usize::try_from(u64::from_le_bytes(*length)).unwrap_or(usize::MAX);
    if length > MAX_HEADER_BYTES {
        let what = format!("its header claims {length} bytes, over the limit of {MAX_HEADER_BYTES}");
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
            return Err(format!("the name of tensor {name} has control characters"));
        }
        let (start, end) = info.data_offsets;
        if start != position || end < start {
            return Err(format!("tensor {name} is at bytes {start} to {end}, expected from {position} on"));
        }
        if end > data_bytes {
            return Err(format!("tensor {name} ends at byte {end} of {data_bytes}: the file is cut off"));
        }
        if byte_count(info.dtype, &info.shape) != Some(end - start) {
            return Err(format!(
                "tensor {name} has {} bytes, not those of {} {:?}",
                end - start,
                info.dtype,
                info.shape
            ));
        }
        position = end;
    }
    if position != data_bytes {
        return Err(format!("{} bytes follow its last tensor", data_bytes - position));
    }
    Ok(())
}

/// Bytes of a tensor; `None` if they overflow, or the last byte is not full.
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
    fn hostile_headers_are_refused_with_the_tensor_named() {
        for (header, data, words) in [
            (r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#, 3, "tensor a ends at byte 4 of 3"),
            (r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#, 5, "1 bytes follow"),
            (r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[4,0]}}"#, 4, "tensor a is at bytes 4 to 0"),
            (r#"{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,4]}}"#, 4, "not those of F32 [4]"),
            (r#"{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,1]}}"#, 1, "not those of F4 [3]"),
            (r#"{"a":{"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]}}"#, 0, "not those of U8"),
            (r#"{"a":{"dtype":"U8","shape":[18446744073709551616],"data_offsets":[0,4]}}"#, 4, "tensor a: "),
            (r#"{"a":{"dtype":"F7","shape":[4],"data_offsets":[0,4]}}"#, 4, "tensor a: unknown variant"),
            (r#"{"a":{"dtype":"U8","shape":[-4],"data_offsets":[0,4]}}"#, 4, "tensor a: "),
            (r#"{"a\n\u001b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#, 4, "control characters"),
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
        assert!(refusal(twice, 4).contains("tensor a is there twice"));
        let overlap = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[2,6]}}"#;
        assert!(refusal(overlap, 6).contains("tensor b is at bytes 2 to 6, expected from 4 on"));
    }

    #[test]
    fn files_of_other_kinds_are_called_what_they_are() {
        for (bytes, words) in [
            (&b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"[..], "a Git-LFS pointer"),
            (b"GGUF\x03\0\0\0", "a GGUF file"),
            (b"PK\x03\x04\0\0\0\0\0", "a zip archive"),
            (b"<!DOCTYPE html>", "a web page"),
        ] {
            let message = parse(bytes).err().expect("refused").to_string();
            assert!(message.starts_with(words), "{message}");
        }
        // The length of this header is the number that a zip archive begins with.
        let mut valid = [&u64::from(u32::from_le_bytes(*b"PK\x03\x04")).to_le_bytes()[..], b"{}"].concat();
        valid.resize(8 + 0x0403_4B50, b' ');
        assert!(parse(&valid).is_ok());
    }

    #[test]
    fn lengths_that_no_file_has_allocate_nothing() {
        for length in [1, MAX_HEADER_BYTES as u64, MAX_HEADER_BYTES as u64 + 1, u64::MAX] {
            assert!(parse(&length.to_le_bytes()).is_err());
        }
        assert!(parse(&[0; 7]).is_err());
    }

    #[test]
    fn misaligned_numbers_are_copied_and_aligned_ones_are_not() {
        let buffer = [0u32, 1 << 8, 0];
        let bytes: &[u8] = bytemuck::cast_slice(&buffer);
        let tensor = |data| Tensor { dtype: Dtype::U32, shape: &[1], data };
        assert!(matches!(tensor(&bytes[4..8]).numbers::<u32>(), Cow::Borrowed([256])));
        assert!(matches!(tensor(&bytes[5..9]).numbers::<u32>(), Cow::Owned(n) if n == [1]));
    }
}
