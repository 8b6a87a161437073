//! [`KernelCrate`]: a crate of kernels. A table in its `Cargo.toml` lists the kernels to build.
//!
//! ```toml
//! [package.metadata.kernels]
//! gated_simt = ["sm_80"]          # the cargo feature `gated_simt`, compiled for sm_80
//! ```

use std::path::{Path, PathBuf};

use crate::{
    Arch, CudaBuilder, Error,
    arch::ptx_version,
    builder::build_all,
    packages::{Packages, packages},
};

/// A kernel module: a cargo feature of its crate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// Name of the module and of its feature.
    pub name: String,
    /// Architectures that it is compiled for.
    pub arches: Vec<Arch>,
}

/// Parses the name of an architecture that the builder compiles for, or returns the reason why not.
fn known(name: &str) -> Result<Arch, String> {
    let arch = name.parse::<Arch>().map_err(|error| error.to_string())?;
    ptx_version(arch).map(|_| arch).ok_or_else(|| Error::UnknownArch { arch }.to_string())
}

/// A PTX file built by [`KernelCrate::build`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Built {
    /// Name of the kernel module.
    pub kernel: String,
    /// Architecture of the PTX.
    pub arch: Arch,
    /// Path of the PTX: `<folder>/<kernel>.<arch>.ptx`.
    pub path: PathBuf,
}

/// A crate of kernels.
#[derive(Clone, Debug)]
pub struct KernelCrate {
    path: PathBuf,
    kernels: Vec<Kernel>,
    sources: Vec<PathBuf>,
}

impl KernelCrate {
    /// Reads the table `[package.metadata.kernels]` of the crate in the folder `path`.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref();
        let manifest = path.join("Cargo.toml");
        let manifest = manifest.canonicalize().map_err(|_| Error::NoCrate { path: path.to_owned() })?;
        let path = manifest.parent().expect("a file's path has a parent folder").to_owned();
        let table_error = |reason: String| Error::Table { manifest: manifest.clone(), reason };

        let Packages { local, lock } = packages(&path)?;
        let package = local.iter().find(|package| package.manifest_path == manifest);
        let package = package.ok_or_else(|| table_error("cargo does not list this package".to_owned()))?;
        let table = package.metadata.as_ref().and_then(|metadata| metadata.kernels.as_ref());
        let table = table.ok_or_else(|| {
            table_error("the table is missing; add it with a line such as `NAME = [\"sm_80\"]`".to_owned())
        })?;

        let mut kernels = Vec::new();
        for (name, arches) in table {
            if !package.features.contains_key(name) {
                return Err(table_error(format!(
                    "{name:?} is not a feature of the package; add `{name} = []` to [features]"
                )));
            }
            let arches = arches.iter().map(|arch| known(arch)).collect::<Result<_, String>>();
            let arches = arches.map_err(|reason| table_error(format!("{name}: {reason}")))?;
            kernels.push(Kernel { name: name.clone(), arches });
        }

        // cargo watches a folder recursively.
        let sources = local
            .iter()
            .flat_map(|package| [package.manifest_path.clone(), package.manifest_path.with_file_name("src")]);
        let sources = sources.chain([lock]).collect();
        Ok(Self { path, kernels, sources })
    }

    /// Returns the kernels of the table, sorted by name.
    pub fn kernels(&self) -> &[Kernel] {
        &self.kernels
    }

    /// Returns the paths that the PTX depends on: manifests and source folders of the crate and of its path
    /// dependencies.
    pub fn sources(&self) -> &[PathBuf] {
        &self.sources
    }

    /// Tells cargo to rerun the calling build script if a source changes.
    pub fn print_rerun_if_changed(&self) {
        for source in &self.sources {
            println!("cargo::rerun-if-changed={}", source.display());
        }
    }

    /// Compiles each kernel of `jobs` for its architecture into `folder`.
    pub fn build(&self, jobs: &[(&str, Arch)], folder: &Path) -> Result<Vec<Built>, Error> {
        let builders = jobs.iter().map(|(kernel, arch)| {
            CudaBuilder::new(&self.path)
                .arch(*arch)
                .build_args(&["--no-default-features", "--features", kernel])
                .copy_to(folder.join(format!("{kernel}.{arch}.ptx")))
        });
        let paths = build_all(&self.path, &builders.collect::<Vec<_>>())?;
        let built = jobs.iter().zip(paths);
        Ok(built.map(|(&(kernel, arch), path)| Built { kernel: kernel.to_owned(), arch, path }).collect())
    }

    /// Compiles every kernel for each of its architectures into `folder`.
    pub fn build_all(&self, folder: &Path) -> Result<Vec<Built>, Error> {
        let jobs = self.kernels.iter().flat_map(|kernel| kernel.arches.iter().map(|&arch| (&*kernel.name, arch)));
        self.build(&jobs.collect::<Vec<_>>(), folder)
    }
}
