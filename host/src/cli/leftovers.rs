//! Partial files of killed runs.

use std::path::Path;

/// Prints the partials that killed runs left beside the output path.
pub fn note_leftovers(path: &Path) {
    for left in nvfp4::checkpoint::leftovers(path) {
        let left = nvfp4::printable(&left.to_string_lossy());
        eprintln!("note: {left} is left over from a killed run; remove it");
    }
}
