//! Everything that can go wrong in a build.

use std::{io, path::PathBuf, process::ExitStatus};

use crate::{Arch, arches};

/// Why a build failed, and what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The crate to compile is not there.
    #[error("{}: no Cargo.toml there; pass the folder of the crate to compile", path.display())]
    NoCrate {
        /// The folder that was given.
        path: PathBuf,
    },
    /// A build was asked for without naming an architecture.
    #[error("no architecture to compile {} for; call `.arch(…)`", path.display())]
    NoArch {
        /// The crate.
        path: PathBuf,
    },
    /// An architecture that the builder does not compile for.
    #[error("{arch} is not an architecture that this builder knows; it knows {}", known())]
    UnknownArch {
        /// The architecture that was given.
        arch: Arch,
    },
    /// `[package.metadata.kernels]` does not say what to build.
    #[error("{}, [package.metadata.kernels]: {reason}", manifest.display())]
    Table {
        /// The `Cargo.toml`.
        manifest: PathBuf,
        /// What is wrong and what would be right.
        reason: String,
    },
    /// The toolchain lacks a component and rustup could not add it.
    #[error("the Rust toolchain in {} lacks {components}; run `rustup component add {components}`", sysroot.display())]
    MissingComponents {
        /// The toolchain.
        sysroot: PathBuf,
        /// What to add, separated by spaces.
        components: String,
    },
    /// A program could not be started.
    #[error("cannot run {program}; is it installed and on PATH?")]
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
        /// What it worked on.
        path: PathBuf,
        /// How it ended.
        status: ExitStatus,
        /// What it said, if that was not printed already.
        stderr: String,
    },
    /// The IR is not what this builder understands: another toolchain than the one it was written for.
    #[error("{}:{line}: unexpected LLVM IR, {reason}; build with the toolchain of rust-toolchain.toml", path.display())]
    Ir {
        /// The IR file.
        path: PathBuf,
        /// Its line, from 1.
        line: usize,
        /// What was expected there.
        reason: String,
    },
    /// A file could not be read or written.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: io::Error,
    },
}

impl Error {
    /// For `map_err`: an I/O error with what was tried on which file.
    pub(crate) fn io(action: &'static str, path: &std::path::Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { action, path: path.to_owned(), source }
    }
}

fn known() -> String {
    arches().map(|arch| arch.to_string()).collect::<Vec<_>>().join(", ")
}
