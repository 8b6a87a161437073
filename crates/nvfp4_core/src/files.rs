//! Opens and reads small foreign files: only regular files, and only up to a maximum length.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use crate::error::Error;

/// Opens a regular file for reading.
///
/// # Errors
/// Returns an error if the file cannot be opened, or is a pipe, a device or a folder; the message asks for `expected`.
pub fn open_regular(path: &Path, expected: &str) -> Result<File, Error> {
    let io = |error| Error::io(path, error);
    // Checked before opening, because opening a named pipe would wait for its writer.
    if !std::fs::metadata(path).map_err(io)?.is_file() {
        return Err(Error::Invalid(format!("not a regular file; give {expected}")).at(path.display()));
    }
    File::open(path).map_err(io)
}

/// Reads a regular file of up to `max` bytes.
///
/// # Errors
/// Returns the errors of [`open_regular`], and an error if the file is longer.
pub fn read_bounded(path: &Path, max: usize, expected: &str) -> Result<Vec<u8>, Error> {
    let io = |error| Error::io(path, error);
    let file = open_regular(path, expected)?;
    let too_long =
        || Error::Invalid(format!("the file is longer than {max} bytes; give {expected}")).at(path.display());
    let length = file.metadata().map_err(io)?.len();
    if length > max as u64 {
        return Err(too_long());
    }
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(length as usize).map_err(|_| io(std::io::ErrorKind::OutOfMemory.into()))?;
    // Files of /proc report a length of 0, and other files may grow.
    file.take(max as u64 + 1).read_to_end(&mut bytes).map_err(io)?;
    if bytes.len() > max { Err(too_long()) } else { Ok(bytes) }
}

/// Recognizes a foreign file by its first bytes; returns its kind and a remedy. Call it only for invalid files: a valid
/// safetensors file begins with a number that can equal these bytes.
pub fn foreign_kind(beginning: &[u8]) -> Option<&'static str> {
    const KINDS: [(&[u8], &str); 7] = [
        (
            b"version https://git-lfs.github.com/",
            "the file is a Git-LFS pointer; run `git lfs pull` to get its content",
        ),
        (b"GGUF", "the file is a GGUF file of llama.cpp; give the safetensors files of the model"),
        (
            b"PK\x03\x04",
            "the file is a zip archive, like PyTorch's .bin and .pt files; give the safetensors files of the model",
        ),
        (b"\x28\xb5\x2f\xfd", "the file is a zstd archive; unpack it"),
        (b"\x89HDF", "the file is an HDF5 file; give the safetensors files of the model"),
        (b"<!DOCTYPE", "the file is a web page, possibly a failed download; download it again"),
        (b"<html", "the file is a web page, possibly a failed download; download it again"),
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
        assert!(
            read_bounded(&path, 4, "a file").unwrap_err().to_string().ends_with("longer than 4 bytes; give a file")
        );
        for path in [folder.path(), Path::new("/dev/zero"), Path::new("/dev/null")] {
            let message = read_bounded(path, 5, "a file").unwrap_err().to_string();
            assert!(message.ends_with("not a regular file; give a file"), "{message}");
        }
        assert!(matches!(read_bounded(&folder.path().join("no"), 5, "a file"), Err(Error::Io { .. })));
    }
}
