//! The ways in which a machine has no CUDA device that can be used.

use crate::record::Failure;

/// Why no CUDA device can be used here.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Unavailable {
    /// The machine has no driver library, or the loader cannot open it.
    #[error("the driver library cannot be opened ({reason})")]
    LibraryNotFound {
        /// The file name asked of the loader.
        library: &'static str,
        /// What the loader said.
        reason: String,
    },
    /// The library lacks a function that every driver since CUDA 11.4 has.
    #[error("{library} has no {symbol}: it is older than CUDA 11.4, update the NVIDIA driver")]
    MissingSymbol {
        /// The file name asked of the loader.
        library: &'static str,
        /// The first function missed.
        symbol: &'static str,
    },
    /// The library is there and does not start.
    #[error("the driver does not start, {call}: {0}", call = .0.call)]
    NotStarting(Failure),
    /// The driver works and has nothing to drive.
    #[error("the driver sees no device (CUDA_VISIBLE_DEVICES can hide them)")]
    NoDevice,
}
