//! Where the workspace lies, and what cargo makes of it.

use std::path::{Path, PathBuf};

/// The workspace's root: xtask lies in it.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace")
}

/// The crate of kernels.
pub fn kernels() -> PathBuf {
    root().join("kernels-gpu")
}

/// Where the workspace's build results go.
pub fn target_dir() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from)
}
