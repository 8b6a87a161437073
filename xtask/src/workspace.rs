//! Paths of the workspace.

use std::path::{Path, PathBuf};

/// Root of the workspace: the parent folder of xtask.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace")
}

/// Folder of the kernel crate.
pub fn kernels() -> PathBuf {
    root().join("kernels-gpu")
}

/// Folder of the workspace's build results.
pub fn target_dir() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from)
}
