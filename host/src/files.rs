//! Opening and reading small files that others wrote: regular files only, and never more of them than expected.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use crate::error::Error;

/// Opens a regular file to read.
///
/// # Errors
/// If it cannot be opened, or is a pipe, a device or a folder: what `expected` says should be given.
pub fn open_regular(path: &Path, expected: &str) -> Result<File, Error> {
    let io = |error| Error::io(path, error);
    // Asked before opening, since opening a named pipe would wait for its writer.
    if !std::fs::metadata(path).map_err(io)?.is_file() {
        return Err(Error::Invalid(format!("not a regular file; give {expected}")).at(path.display()));
    }
    File::open(path).map_err(io)
}

/// Reads a regular file of at most `max` bytes.
///
/// # Errors
/// As [`open_regular`], and if it is longer.
pub fn read_bounded(path: &Path, max: usize, expected: &str) -> Result<Vec<u8>, Error> {
    let io = |error| Error::io(path, error);
    let file = open_regular(path, expected)?;
    let too_long = || Error::Invalid(format!("over {max} bytes; give {expected}")).at(path.display());
    let length = file.metadata().map_err(io)?.len();
    if length > max as u64 {
        return Err(too_long());
    }
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(length as usize).map_err(|_| io(std::io::ErrorKind::OutOfMemory.into()))?;
    // Files such as those of /proc say that they are empty, and others may grow.
    file.take(max as u64 + 1).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() > max { Err(too_long()) } else { Ok(bytes) }
}

/// What a file is that is not valid as what it was taken for, told from its first bytes, and what to do about it. A valid
/// safetensors file may begin with these too, since it begins with a number.
pub fn foreign_kind(beginning: &[u8]) -> Option<&'static str> {
    const KINDS: [(&[u8], &str); 7] = [
        (b"version https://git-lfs.github.com/", "a Git-LFS pointer, not the file itself; run `git lfs pull`"),
        (b"GGUF", "a GGUF file of llama.cpp; give the safetensors files of the model"),
        (b"PK\x03\x04", "a zip archive, as PyTorch's .bin and .pt files are; give the safetensors files of the model"),
        (b"\x28\xb5\x2f\xfd", "a zstd archive; unpack it"),
        (b"\x89HDF", "an HDF5 file; give the safetensors files of the model"),
        (b"<!DOCTYPE", "a web page, perhaps an error of the download; download it again"),
        (b"<html", "a web page, perhaps an error of the download; download it again"),
    ];
    KINDS.into_iter().find(|(magic, _)| beginning.starts_with(magic)).map(|(_, kind)| kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_regular_files_of_bounded_length_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        std::fs::write(&path, "12345").unwrap();
        assert_eq!(read_bounded(&path, 5, "a file").unwrap(), b"12345");
        assert!(read_bounded(&path, 4, "a file").unwrap_err().to_string().ends_with("over 4 bytes; give a file"));
        for path in [folder.path(), Path::new("/dev/zero"), Path::new("/dev/null")] {
            let message = read_bounded(path, 5, "a file").unwrap_err().to_string();
            assert!(message.ends_with("not a regular file; give a file"), "{message}");
        }
        assert!(matches!(read_bounded(&folder.path().join("no"), 5, "a file"), Err(Error::Io { .. })));
    }
}
