//! Reads GGUF files, versions 2 and 3.
//!
//! Sources: the GGUF specification (`docs/gguf.md` of the ggml repository), and for NVFP4 the package `gguf` 0.19
//! (`quants.py`, class `NVFP4`) and llama.cpp's `block_nvfp4`.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use crate::Dtype;
use crate::file::Mapped;
use nvfp4_core::Error;
use nvfp4_core::files::foreign_kind;

/// First bytes of a GGUF file.
const MAGIC: &[u8] = b"GGUF";

/// Upper limits for the numbers of entries and tensors; larger numbers come from broken files.
const MAX_ENTRIES: u64 = 1 << 16;
const MAX_TENSORS: u64 = 1 << 20;

/// Alignment of tensors in bytes, unless the file says otherwise.
const ALIGNMENT: usize = 32;

/// Maximum depth of nested arrays.
const MAX_DEPTH: usize = 4;

/// Type of a GGUF tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Floats, with the equal type of safetensors.
    Floats(Dtype),
    /// NVFP4.
    Nvfp4,
    /// Another type, by number.
    Other(u32),
}

impl Kind {
    /// Number of the type NVFP4 in GGUF.
    pub(super) const NVFP4: u32 = 40;

    fn of(number: u32) -> Self {
        match number {
            0 => Self::Floats(Dtype::F32),
            1 => Self::Floats(Dtype::F16),
            30 => Self::Floats(Dtype::BF16),
            Self::NVFP4 => Self::Nvfp4,
            other => Self::Other(other),
        }
    }

    /// Number in the file.
    pub(super) fn number(self) -> u32 {
        match self {
            Self::Floats(Dtype::F16) => 1,
            Self::Floats(Dtype::BF16) => 30,
            Self::Floats(_) => 0,
            Self::Nvfp4 => Self::NVFP4,
            Self::Other(number) => number,
        }
    }
}

/// A tensor of a GGUF file.
#[derive(Clone, Debug)]
pub(super) struct GgufTensor {
    pub kind: Kind,
    /// Sizes, outermost first, as in safetensors. The file stores them in the other order.
    pub shape: Vec<usize>,
    /// Place in the file. For types of unknown size, up to the next tensor.
    place: Range<usize>,
}

/// A mapped GGUF file with a checked header.
#[derive(Debug)]
pub(super) struct GgufFile {
    mapped: Mapped,
    header: Header,
}

/// Header of a file.
#[derive(Debug)]
struct Header {
    tensors: BTreeMap<String, GgufTensor>,
    /// Texts and numbers of the metadata; arrays are skipped.
    texts: BTreeMap<String, String>,
    numbers: BTreeMap<String, u64>,
    /// Bytes of all metadata, and the number of entries.
    metadata: Range<usize>,
    entries: u64,
    /// Place of the value of `general.file_type`.
    file_type: Option<usize>,
    alignment: usize,
}

impl GgufFile {
    /// Maps a file and checks its header.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read or is not a valid GGUF file.
    pub(super) fn open(path: &Path) -> Result<Self, Error> {
        let mapped = Mapped::open(path, "a GGUF file")?;
        let header = mapped.parsed(parse)?;
        Ok(Self { mapped, header })
    }

    /// The mapped file.
    pub(super) fn mapped(&self) -> &Mapped {
        &self.mapped
    }

    /// All tensors by name.
    pub(super) fn tensors(&self) -> &BTreeMap<String, GgufTensor> {
        &self.header.tensors
    }

    /// Bytes of a tensor.
    pub(super) fn data(&self, tensor: &GgufTensor) -> &[u8] {
        &self.mapped.bytes()[tensor.place.clone()]
    }

    /// Returns the numbers of a vector of f32, or `None` if the tensor is missing or of another type.
    pub(super) fn vector(&self, name: &str) -> Option<Vec<f32>> {
        let tensor = self.header.tensors.get(name).filter(|tensor| tensor.kind == Kind::Floats(Dtype::F32))?;
        Some(self.data(tensor).as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
    }

    /// Returns a text of the metadata.
    pub(super) fn text(&self, key: &str) -> Option<&str> {
        self.header.texts.get(key).map(String::as_str)
    }

    /// Returns a number of the metadata.
    pub(super) fn number(&self, key: &str) -> Option<usize> {
        usize::try_from(*self.header.numbers.get(key)?).ok()
    }

    /// Returns the bytes of all metadata with another file type, and the number of entries.
    pub(super) fn metadata(&self, file_type: u32) -> (Vec<u8>, u64) {
        let mut bytes = self.mapped.bytes()[self.header.metadata.clone()].to_vec();
        if let Some(place) = self.header.file_type {
            let place = place - self.header.metadata.start;
            bytes[place..place + 4].copy_from_slice(&file_type.to_le_bytes());
        }
        (bytes, self.header.entries)
    }

    /// Alignment of tensors in bytes.
    pub(super) fn alignment(&self) -> usize {
        self.header.alignment
    }
}

/// Position in a file.
struct Reader<'f> {
    file: &'f [u8],
    at: usize,
}

impl<'f> Reader<'f> {
    fn bytes(&mut self, count: usize) -> Result<&'f [u8], Error> {
        let truncated = || invalid("the file is truncated within its header");
        let bytes = self.file.get(self.at..).and_then(|rest| rest.get(..count)).ok_or_else(truncated)?;
        self.at += count;
        Ok(bytes)
    }

    fn u32(&mut self) -> Result<u32, Error> {
        Ok(u32::from_le_bytes(self.bytes(4)?.try_into().expect("four bytes")))
    }

    fn u64(&mut self) -> Result<u64, Error> {
        Ok(u64::from_le_bytes(self.bytes(8)?.try_into().expect("eight bytes")))
    }

    fn size(&mut self) -> Result<usize, Error> {
        usize::try_from(self.u64()?).map_err(|_| Error::TooLarge)
    }

    fn text(&mut self) -> Result<String, Error> {
        let length = self.size()?;
        let text = std::str::from_utf8(self.bytes(length)?).map_err(|_| invalid("a name or text is not UTF-8"))?;
        Ok(text.to_owned())
    }

    /// Reads past a value of the metadata; returns its number if it is an unsigned integer or not negative.
    fn value(&mut self, kind: u32, depth: usize) -> Result<Option<u64>, Error> {
        let number = |bytes: &[u8], signed: bool| {
            let number = bytes.iter().rev().fold(0u64, |number, byte| number << 8 | u64::from(*byte));
            let is_negative = signed && bytes.last().is_some_and(|byte| byte & 0x80 != 0);
            (!is_negative).then_some(number)
        };
        match kind {
            0 | 7 => Ok(number(self.bytes(1)?, false)),
            1 => Ok(number(self.bytes(1)?, true)),
            2 => Ok(number(self.bytes(2)?, false)),
            3 => Ok(number(self.bytes(2)?, true)),
            4 => Ok(number(self.bytes(4)?, false)),
            5 => Ok(number(self.bytes(4)?, true)),
            6 => self.bytes(4).map(|_| None),
            8 => self.text().map(|_| None),
            9 => {
                let (of, count) = (self.u32()?, self.u64()?);
                if depth == MAX_DEPTH {
                    return Err(invalid("arrays are nested too deeply"));
                }
                for _ in 0..count {
                    // Each element takes at least a byte, so the loop ends with the file.
                    self.value(of, depth + 1)?;
                }
                Ok(None)
            }
            10 => Ok(number(self.bytes(8)?, false)),
            11 => Ok(number(self.bytes(8)?, true)),
            12 => self.bytes(8).map(|_| None),
            other => Err(invalid(&format!("unknown type {other} of metadata"))),
        }
    }
}

fn invalid(what: &str) -> Error {
    Error::Invalid(format!("not a valid GGUF file: {what}; download or export it again"))
}

/// Reads and checks the header.
fn parse(file: &[u8]) -> Result<Header, Error> {
    let mut reader = Reader { file, at: 0 };
    if reader.bytes(MAGIC.len()).ok() != Some(MAGIC) {
        let foreign = foreign_kind(file).map(|kind| Error::Invalid(kind.into()));
        return Err(foreign.unwrap_or_else(|| invalid("it does not begin with GGUF")));
    }
    match reader.u32()? {
        2 | 3 => {}
        other => return Err(invalid(&format!("its version is {other}; versions 2 and 3 are known"))),
    }
    let (tensors, entries) = (reader.u64()?, reader.u64()?);
    if tensors > MAX_TENSORS || entries > MAX_ENTRIES {
        return Err(invalid(&format!("it claims {tensors} tensors and {entries} entries of metadata")));
    }
    let (mut texts, mut numbers, mut file_type) = (BTreeMap::new(), BTreeMap::new(), None);
    let start = reader.at;
    for _ in 0..entries {
        let (key, kind) = (reader.text()?, reader.u32()?);
        if kind == 8 {
            texts.insert(key, reader.text()?);
            continue;
        }
        if (&key[..], kind) == ("general.file_type", 4) {
            file_type = Some(reader.at);
        }
        if let Some(number) = reader.value(kind, 0)? {
            numbers.insert(key, number);
        }
    }
    let metadata = start..reader.at;
    let alignment = numbers.get("general.alignment").map_or(Ok(ALIGNMENT), |&number| usize::try_from(number));
    let alignment = alignment.ok().filter(|alignment| alignment.is_power_of_two() && *alignment <= 1 << 16);
    let alignment = alignment.ok_or_else(|| invalid("general.alignment is not a power of two up to 65536"))?;
    let infos = read_infos(&mut reader, tensors)?;
    let tensors = place_tensors(infos, reader.at.next_multiple_of(alignment), file.len())?;
    Ok(Header { tensors, texts, numbers, metadata, entries, file_type, alignment })
}

/// Name, type, shape and offset of a tensor.
type Info = (String, Kind, Vec<usize>, usize);

fn read_infos(reader: &mut Reader<'_>, count: u64) -> Result<Vec<Info>, Error> {
    let mut infos = Vec::new();
    for _ in 0..count {
        let (name, dimensions) = (reader.text()?, reader.u32()?);
        if dimensions > 4 || name.chars().any(char::is_control) {
            return Err(invalid(&format!(
                "tensor {name} has {dimensions} dimensions; expected at most 4, and a name without control characters"
            )));
        }
        let mut shape = (0..dimensions).map(|_| reader.size()).collect::<Result<Vec<_>, _>>()?;
        if shape.contains(&0) {
            return Err(invalid(&format!("tensor {name} has no elements")));
        }
        shape.reverse();
        let kind = Kind::of(reader.u32()?);
        infos.push((name, kind, shape, reader.size()?));
    }
    Ok(infos)
}

/// Checks the places of all tensors.
fn place_tensors(infos: Vec<Info>, start: usize, end: usize) -> Result<BTreeMap<String, GgufTensor>, Error> {
    let mut offsets: Vec<usize> = infos.iter().map(|(_, _, _, offset)| *offset).collect();
    offsets.sort_unstable();
    let mut tensors = BTreeMap::new();
    for (name, kind, shape, offset) in infos {
        let wrong = |what: &str| invalid(&format!("tensor {name}: {what}"));
        let next = offsets[offsets.partition_point(|other| *other <= offset)..].first().copied();
        let begin = start.checked_add(offset).ok_or_else(|| wrong("its offset is too large"))?;
        let limit = next.and_then(|next| start.checked_add(next)).unwrap_or(end).min(end);
        let numbers =
            shape.iter().try_fold(1usize, |all, size| all.checked_mul(*size)).ok_or_else(|| wrong("too large"))?;
        let bytes = match kind {
            Kind::Floats(dtype) => numbers.checked_mul(dtype.bitsize() / 8),
            Kind::Nvfp4 if shape.last().is_some_and(|k| !k.is_multiple_of(SUPERBLOCK)) => {
                return Err(wrong("its rows are not a multiple of 64"));
            }
            Kind::Nvfp4 => Some(numbers / SUPERBLOCK * SUPERBLOCK_BYTES),
            Kind::Other(_) => limit.checked_sub(begin),
        };
        let stop = bytes.and_then(|bytes| begin.checked_add(bytes)).filter(|stop| *stop <= limit);
        let stop = stop.ok_or_else(|| wrong("it does not fit between its neighbors in the file"))?;
        if tensors.insert(name.clone(), GgufTensor { kind, shape, place: begin..stop }).is_some() {
            return Err(invalid(&format!("tensor {name} is listed twice")));
        }
    }
    Ok(tensors)
}

/// Number of values in a block of GGUF's NVFP4.
pub(super) const SUPERBLOCK: usize = 64;

/// Bytes of a superblock: four scales, then 32 bytes of values.
pub(super) const SUPERBLOCK_BYTES: usize = 36;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A file with a text, an array, a file type, and one tensor `[2, 3]` of f32.
    fn small() -> Vec<u8> {
        let text = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
        let mut file = [MAGIC, &3u32.to_le_bytes(), &1u64.to_le_bytes(), &3u64.to_le_bytes()].concat();
        file.extend([text("general.architecture"), 8u32.to_le_bytes().into(), text("llama")].concat());
        file.extend([text("general.file_type"), 4u32.to_le_bytes().into(), 1u32.to_le_bytes().into()].concat());
        let array = [9u32.to_le_bytes(), 1u32.to_le_bytes()].concat();
        file.extend([text("x"), array, 2u64.to_le_bytes().into(), vec![1, 2]].concat());
        file.extend([text("a"), 2u32.to_le_bytes().into()].concat());
        file.extend([3u64, 2].map(u64::to_le_bytes).concat());
        file.extend([&0u32.to_le_bytes()[..], &0u64.to_le_bytes()].concat());
        file.resize(file.len().next_multiple_of(ALIGNMENT), 0);
        file.extend((0..6).flat_map(|x| (x as f32).to_le_bytes()));
        file
    }

    #[test]
    fn small_file_is_read() {
        let header = parse(&small()).unwrap();
        let tensor = &header.tensors["a"];
        assert_eq!((&tensor.shape[..], tensor.kind), (&[2, 3][..], Kind::Floats(Dtype::F32)));
        assert_eq!(tensor.place.len(), 24);
        assert_eq!((header.texts["general.architecture"].as_str(), header.numbers["general.file_type"]), ("llama", 1));
    }

    #[test]
    fn tensor_without_elements_is_refused() {
        let mut file = small();
        let sizes = [3u64, 2].map(u64::to_le_bytes).concat();
        let place = file.windows(16).position(|bytes| bytes == sizes).unwrap();
        file[place] = 0;
        assert!(parse(&file).err().unwrap().to_string().contains("tensor a has no elements"));
    }

    #[test]
    fn truncated_files_are_refused() {
        let file = small();
        for length in 0..file.len() {
            assert!(parse(&file[..length]).is_err(), "{length}");
        }
    }

    proptest! {
        #[test]
        fn changed_bytes_never_panic(changes in prop::collection::vec((0usize..200, any::<u8>()), 1..6)) {
            let mut file = small();
            for (at, byte) in changes {
                let length = file.len();
                file[at % length] = byte;
            }
            _ = parse(&file);
        }
    }
}
