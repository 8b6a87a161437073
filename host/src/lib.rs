//! NVFP4 grouped GEMM for mixture-of-experts models: formats, an exact oracle, backends, checkpoints.
//!
//! A layer's weights are prepared once; steps of tokens run on them, and every element can be checked:
//!
//! ```
//! use nvfp4::backend::{self, Backend, cpu::Cpu};
//! use nvfp4::compare::compare;
//! use nvfp4::generate::{self, Generator};
//! use nvfp4::oracle::Reference;
//! use nvfp4::problem::{Group, Op, TokenDtype, Step};
//! use nvfp4::Output;
//!
//! // Two experts, gate and up [32, 64] each; five tokens for the first, none for the second.
//! let sizes = [Group { m: 5, n: 32, k: 64 }, Group { m: 0, n: 32, k: 64 }];
//! let weights = generate::weights(Generator::Gaussian, Op::Gated, &sizes, 0)?;
//! let mut layer = Cpu::new().prepare(&weights)?;
//!
//! let tokens = generate::activations(Generator::Gaussian, &sizes, 0)?;
//! let step = Step::new(&weights, tokens, TokenDtype::F16)?;
//! let mut output = Output::new(step.problem());
//! let time = backend::run(layer.as_mut(), &step, &mut output)?;
//! assert!(compare(&output, &Reference::new(&weights, &step), &step).passed());
//! # let _ = time;
//! # Ok::<_, nvfp4::Error>(())
//! ```
//!
//! - A tensor is a [`format::Matrix`]: [`quantize`] makes it of numbers, [`checkpoint`] reads it from a model, [`generate`] makes it
//!   up from a seed.
//! - [`problem::Weights`] and [`problem::Step`] are the checked inputs of a layer and of one forward pass. Whoever holds one holds a
//!   valid problem.
//! - A [`backend`] computes an [`Output`]: `cpu` on any machine, `cuda` on a GPU, `emulated` with the GPU's kernels on the CPU.
//! - [`oracle`] says what is right to the last bit, [`compare`] whether the output is.
//! - [`moe`] is a whole MoE layer, from hidden states to hidden states: its inputs, its reference and its comparison.
//! - [`linear`] is a linear layer likewise.
//! - [`fp8`] says what either computes if its tokens are multiplied as FP8, and [`fp4`] what an MoE layer does if they are NVFP4.
//! - [`router`] makes of a router's logits the experts that tokens name, and their weights.
//! - `selftest` lets a card's kernels prove themselves there (feature `cuda`).
//! - [`plan`] counts bytes, operations and tiles; [`shape`] knows sizes by name.
//!
//! Features: `cuda` and `emulated` add those backends, `cli` the command `nvfp4`.

pub mod backend;
pub mod bias;
pub mod checkpoint;
pub mod compare;
mod error;
pub mod files;
pub mod format;
pub mod fp4;
pub mod fp8;
pub mod generate;
#[cfg(feature = "kernels")]
pub mod kernels;
pub mod linear;
pub mod moe;
pub mod oracle;
mod output;
pub mod plan;
pub mod problem;
pub mod quantize;
pub mod router;
#[cfg(feature = "cuda")]
pub mod selftest;
pub mod shape;
mod signals;

pub use error::{Error, printable};
pub use output::Output;

#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
