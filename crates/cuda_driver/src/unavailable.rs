//! Reasons why a machine has no usable CUDA device.

use crate::record::Failure;

/// Why this machine has no usable CUDA device.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Unavailable {
    /// The machine has no driver library, or the loader cannot open it.
    #[error("cannot open the driver library ({reason})")]
    LibraryNotFound {
        /// File name passed to the loader.
        library: &'static str,
        /// The loader's message.
        reason: String,
    },
    /// The library lacks a function that every driver from CUDA 11.4 on has.
    #[error("{library} has no {symbol}, so it is older than CUDA 11.4; update the NVIDIA driver")]
    MissingSymbol {
        /// File name passed to the loader.
        library: &'static str,
        /// The first missing function.
        symbol: &'static str,
    },
    /// The library was opened but the driver does not initialize.
    #[error("the driver does not initialize, {call}: {0}", call = .0.call)]
    NotStarting(Failure),
    /// The driver works but reports no device.
    #[error("the driver reports no device; check CUDA_VISIBLE_DEVICES, which can hide devices")]
    NoDevice,
}
