//! NVFP4 grouped GEMM for mixture-of-experts models.

pub mod backend;
pub mod checkpoint;
pub mod compare;
mod error;
pub mod format;
pub mod generate;
pub mod oracle;
mod output;
pub mod plan;
pub mod problem;
pub mod quantize;
pub mod shape;

pub use error::Error;
pub use output::Output;
