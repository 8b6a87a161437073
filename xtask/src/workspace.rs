//! Paths of the workspace.

use std::path::{Path, PathBuf};

use anyhow::Context;

/// Root of the workspace: the parent folder of xtask.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace")
}

/// Folder of the kernel crate.
pub fn kernels() -> PathBuf {
    root().join("kernels-gpu")
}

/// A kernel's first source file below `kernels-gpu/src`: `MECHANISM/KERNEL/mod.rs`, or `MECHANISM/KERNEL.rs`.
pub fn kernel_source(kernel: &str) -> anyhow::Result<PathBuf> {
    let source = kernels().join("src");
    let folders = source.read_dir().with_context(|| source.display().to_string())?.flatten();
    let mut files = folders.flat_map(|folder| {
        let folder = folder.path();
        [folder.join(kernel).join("mod.rs"), folder.join(format!("{kernel}.rs"))]
    });
    files.find(|file| file.exists()).with_context(|| format!("{}: no folder has the kernel {kernel}", source.display()))
}

/// The file that names the machine instructions of a kernel: `sass.toml` in its folder, or `KERNEL.sass.toml`.
pub fn kernel_sass(kernel: &str) -> anyhow::Result<PathBuf> {
    let source = kernel_source(kernel)?;
    let in_folder = source.ends_with("mod.rs");
    Ok(if in_folder { source.with_file_name("sass.toml") } else { source.with_extension("sass.toml") })
}

/// The folder of `kernels-gpu/src` and `crates/nvfp4_kernels/src` in which a kernel lies.
pub fn kernel_mechanism(kernel: &str) -> anyhow::Result<String> {
    let source = kernel_source(kernel)?;
    let below = source.strip_prefix(kernels().join("src"))?;
    let mechanism = below.iter().next().expect("a kernel lies in a folder");
    Ok(mechanism.to_string_lossy().into_owned())
}

/// Folder of the workspace's build results.
pub fn target_dir() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from)
}
