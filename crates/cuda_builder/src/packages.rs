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
    resolve: Resolve,
    workspace_root: PathBuf,
}

/// Graph of the packages.
#[derive(Deserialize)]
struct Resolve {
    nodes: Vec<Node>,
    /// The crate itself.
    root: Option<String>,
}

#[derive(Deserialize)]
struct Node {
    id: String,
    dependencies: Vec<String>,
}

/// A package of `cargo metadata`.
#[derive(Deserialize)]
pub(crate) struct Package {
    id: String,
    pub(crate) manifest_path: PathBuf,
    source: Option<String>,
    pub(crate) features: BTreeMap<String, Vec<String>>,
    pub(crate) metadata: Option<PackageMetadata>,
}

#[derive(Deserialize)]
pub(crate) struct PackageMetadata {
    pub(crate) kernels: Option<BTreeMap<String, Vec<String>>>,
}

/// The crate in a folder and its path dependencies.
pub(crate) struct Packages {
    pub(crate) local: Vec<Package>,
    /// `Cargo.lock` of the crate's workspace.
    pub(crate) lock: PathBuf,
}

/// Returns the crate in the folder `path` and its path dependencies.
pub(crate) fn packages(path: &Path) -> Result<Packages, Error> {
    let mut command = toolchain::cargo(path);
    command.args(["metadata", "--format-version=1", "--all-features", "--quiet"]);
    let json = toolchain::output(command, path)?;
    let metadata: Result<Metadata, _> = serde_json::from_slice(&json);
    let metadata = metadata.map_err(|error| Error::Table {
        manifest: path.join("Cargo.toml"),
        reason: format!("cargo metadata: {error}"),
    })?;
    // The crate's workspace may have other members.
    let dependencies =
        |id: &str| metadata.resolve.nodes.iter().find(|node| node.id == id).map(|node| &node.dependencies);
    let mut used: Vec<String> = metadata.resolve.root.into_iter().collect();
    let mut next = 0;
    while let Some(id) = used.get(next) {
        let new = dependencies(id).into_iter().flatten().filter(|id| !used.contains(id)).cloned().collect::<Vec<_>>();
        used.extend(new);
        next += 1;
    }
    // A package without a source is a local folder.
    let is_local = |package: &Package| package.source.is_none() && used.contains(&package.id);
    Ok(Packages {
        local: metadata.packages.into_iter().filter(is_local).collect(),
        lock: metadata.workspace_root.join("Cargo.lock"),
    })
}

/// Returns the common folder of the crate's packages. Paths relative to it are the same in every checkout.
pub(crate) fn common_root(path: &Path) -> Result<PathBuf, Error> {
    let mut root = path.to_owned();
    for package in packages(path)?.local {
        while !package.manifest_path.starts_with(&root) {
            root.pop();
        }
    }
    Ok(root)
}
