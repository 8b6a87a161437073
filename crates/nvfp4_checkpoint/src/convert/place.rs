//! Where a model lies: in one file, or in a folder.

use std::path::Path;

use crate::Checkpoint;

/// Whether a single file was opened, not a folder or an index.
pub(super) fn is_one_file(checkpoint: &Checkpoint) -> bool {
    matches!(checkpoint.files(), [file] if file.path() == checkpoint.path())
}

/// Returns the folder of a model.
pub(super) fn folder(checkpoint: &Checkpoint) -> &Path {
    let path = checkpoint.path();
    if path.is_dir() {
        return path;
    }
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Returns the file name of a path that was opened or listed.
pub(super) fn file_name(path: &Path) -> &Path {
    Path::new(path.file_name().expect("the path of a file"))
}
