//! NVFP4 without GPUs and model files: formats, problems with their validation, the exact oracle and the quantizer.
//!
//! [`format::Matrix`] is an NVFP4 tensor. [`problem`], [`moe`] and [`linear`] define the three operations, their checked
//! inputs, references and comparisons; [`router`] defines routing. [`fp8`] and [`fp4`] define the results for
//! quantized tokens. The library `nvfp4` computes these operations, and re-exports every module.

pub mod bias;
pub mod compare;
mod error;
pub mod files;
pub mod format;
pub mod fp4;
pub mod fp8;
pub mod generate;
pub mod linear;
pub mod moe;
pub mod oracle;
mod output;
pub mod plan;
pub mod problem;
pub mod quantize;
pub mod quantized;
pub mod router;
pub mod shape;
pub mod transform;

pub use error::{Error, printable};
pub use output::{Output, POISON};
