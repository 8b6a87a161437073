//! PTX of the NVFP4 kernels, as packed files. `cargo xtask publish` writes them into its copy of the workspace, and the
//! build script of `nvfp4-kernels` reads them if they exist.

use std::hash::{DefaultHasher, Hasher};
use std::io::{self, Write};

/// Folder of the list and of the packed PTX. A checkout of the repository does not have the folder.
pub const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/ptx");

/// Name of the list in [`FOLDER`].
pub const LIST: &str = "list";

/// Level of Zstandard at which packing 230 MB of PTX takes seconds.
const LEVEL: i32 = 9;

/// Returns code in the format Zstandard (RFC 8878), and a hash of the code.
///
/// # Errors
/// Zstandard's errors.
pub fn pack(code: &[u8]) -> io::Result<(Vec<u8>, u64)> {
    let mut hasher = DefaultHasher::new();
    hasher.write(code);
    let mut encoder = zstd::Encoder::new(Vec::new(), LEVEL)?;
    encoder.long_distance_matching(true)?;
    encoder.write_all(code)?;
    Ok((encoder.finish()?, hasher.finish()))
}

/// Returns the code that [`pack`] packed.
///
/// # Errors
/// The bytes are not in the format Zstandard.
pub fn unpack(packed: &[u8]) -> io::Result<Vec<u8>> {
    zstd::decode_all(packed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_code_is_restored_and_identified_by_its_hash() {
        let code = b".version 8.7\n".repeat(1000);
        let (packed, hash) = pack(&code).unwrap();
        assert!(packed.len() < code.len() / 10);
        assert_eq!(unpack(&packed).unwrap(), code);
        assert_ne!(pack(&code[1..]).unwrap().1, hash);
        assert!(unpack(&code).is_err());
    }
}
