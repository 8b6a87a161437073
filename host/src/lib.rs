//! NVFP4 grouped GEMM for mixture-of-experts models: formats, an exact oracle, backends, checkpoints.
//!
//! Weights are prepared once for a layer, and steps of tokens run on them:
//!
//! 1. [`format::Matrix`] is a tensor; [`quantize`], [`checkpoint`] and [`generate`] make them.
//! 2. [`problem::Weights`] and [`problem::Step`] are the checked inputs of a layer and of one forward pass.
//! 3. [`backend`] computes an [`Output`]; [`oracle`] says what is right, [`compare`] whether it is.
//!
//! The repository's README has the ten lines that do all of this.

pub mod backend;
pub mod checkpoint;
pub mod compare;
mod error;
pub mod files;
pub mod format;
pub mod generate;
#[cfg(feature = "kernels")]
pub mod kernels;
pub mod oracle;
mod output;
pub mod plan;
pub mod problem;
pub mod quantize;
pub mod shape;
mod signals;

pub use error::{Error, printable};
pub use output::Output;

#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
