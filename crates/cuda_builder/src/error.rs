//! Errors of a build.

use std::{io, path::PathBuf, process::ExitStatus};

use crate::{Arch, arches};

/// Why a build failed, and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The folder contains no crate.
    #[error("{}: found no Cargo.toml; pass the folder of the crate to compile", path.display())]
    NoCrate {
        /// The given folder.
        path: PathBuf,
    },
    /// No architecture was set.
    #[error("no architecture set for {}; call `.arch(…)`", path.display())]
    NoArch {
        /// The crate.
        path: PathBuf,
    },
    /// The builder does not support the architecture.
    #[error("unknown architecture {arch}; expected one of {}", known())]
    UnknownArch {
        /// The given architecture.
        arch: Arch,
    },
    /// The table `[package.metadata.kernels]` is invalid.
    #[error("{}, [package.metadata.kernels]: {reason}", manifest.display())]
    Table {
        /// Path of the `Cargo.toml`.
        manifest: PathBuf,
        /// The error and its remedy.
        reason: String,
    },
    /// The toolchain lacks a component and rustup could not add it.
    #[error("the Rust toolchain in {} lacks {components}; run `rustup component add {components}`", sysroot.display())]
    MissingComponents {
        /// Root folder of the toolchain.
        sysroot: PathBuf,
        /// Components to add, separated by spaces.
        components: String,
    },
    /// A program could not be started.
    #[error("cannot run {program}; install it and add it to PATH")]
    Spawn {
        /// The program.
        program: String,
        /// The operating system's reason.
        source: io::Error,
    },
    /// A program ran and failed.
    #[error("{program} failed on {} ({status}){}{stderr}", path.display(), if stderr.is_empty() { "; its messages are above" } else { ":\n" })]
    Failed {
        /// The program.
        program: String,
        /// The file or folder that it worked on.
        path: PathBuf,
        /// Exit status.
        status: ExitStatus,
        /// The program's messages. Empty: they were printed already.
        stderr: String,
    },
    /// The IR has an unexpected form, because it comes from another toolchain than the pinned one.
    #[error("{}:{line}: unexpected LLVM IR, {reason}; build with the toolchain of rust-toolchain.toml", path.display())]
    Ir {
        /// The IR file.
        path: PathBuf,
        /// Line number, from 1.
        line: usize,
        /// What was expected on the line.
        reason: String,
    },
    /// A file could not be read or written.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// The failed action.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: io::Error,
    },
}

impl Error {
    /// Returns a function for `map_err` that adds the action and the file to an I/O error.
    pub(crate) fn io(action: &'static str, path: &std::path::Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { action, path: path.to_owned(), source }
    }
}

fn known() -> String {
    arches().map(|arch| arch.to_string()).collect::<Vec<_>>().join(", ")
}
