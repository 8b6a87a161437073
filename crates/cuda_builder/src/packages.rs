//! The local packages that a crate is compiled from.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use serde::Deserialize;

use crate::{Error, toolchain};

/// The part of `cargo metadata` that is read.
#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

/// A package of `cargo metadata`.
#[derive(Deserialize)]
pub(crate) struct Package {
    pub(crate) manifest_path: PathBuf,
    source: Option<String>,
    pub(crate) features: BTreeMap<String, Vec<String>>,
    pub(crate) metadata: Option<PackageMetadata>,
}

#[derive(Deserialize)]
pub(crate) struct PackageMetadata {
    pub(crate) kernels: Option<BTreeMap<String, Vec<String>>>,
}

/// Returns the crate in the folder `path` and its path dependencies.
pub(crate) fn packages(path: &Path) -> Result<Vec<Package>, Error> {
    let mut command = toolchain::cargo(path);
    command.args(["metadata", "--format-version=1", "--all-features", "--quiet"]);
    let json = toolchain::output(command, path)?;
    let metadata: Result<Metadata, _> = serde_json::from_slice(&json);
    let metadata = metadata.map_err(|error| Error::Table {
        manifest: path.join("Cargo.toml"),
        reason: format!("cargo metadata: {error}"),
    })?;
    // A package without a source is a local folder.
    Ok(metadata.packages.into_iter().filter(|package| package.source.is_none()).collect())
}

/// Returns the common folder of the crate's packages. Paths relative to it are the same in every checkout.
pub(crate) fn common_root(path: &Path) -> Result<PathBuf, Error> {
    let mut root = path.to_owned();
    for package in packages(path)? {
        while !package.manifest_path.starts_with(&root) {
            root.pop();
        }
    }
    Ok(root)
}
