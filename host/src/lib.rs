//! Mixture-of-experts and linear layers with 4-bit (NVFP4) weights: formats, an exact oracle, backends and checkpoints.
//!
//! Prepare a layer's weights once, then run steps of tokens on them; every output element can be checked:
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
//! - [`format::Matrix`] is an NVFP4 tensor: [`quantize`] converts numbers, [`checkpoint`] reads a model, [`generate`]
//!   generates it from a seed.
//! - [`problem::Weights`] and [`problem::Step`] are the checked inputs of a layer and of one forward pass; a value of
//!   these types is always a valid problem.
//! - A [`backend`] computes an [`Output`]: `cpu` on any machine, `cuda` on a GPU, `emulated` with the GPU's kernels on
//!   the CPU.
//! - [`oracle`] computes the exact result, and [`compare`] compares an output with it.
//! - [`moe`] is a whole MoE layer, from hidden states to hidden states: inputs, reference and comparison.
//! - [`linear`] is a linear layer: inputs, reference and comparison.
//! - [`fp8`] defines the result for FP8 tokens, in both layers. [`fp4`] defines the result of an MoE layer for NVFP4
//!   tokens.
//! - [`router`] turns a router's logits into experts and weights.
//! - `selftest` tests the kernels of a GPU (feature `cuda`).
//! - [`plan`] counts bytes, operations and tiles; [`shape`] defines named sizes.
//!
//! Features: `cuda` and `emulated` add those backends, `cli` the command `nvfp4`.

pub mod backend;
#[cfg(feature = "cuda")]
pub mod selftest;

pub use nvfp4_checkpoint as checkpoint;
pub use nvfp4_core::{
    Error, Output, bias, compare, files, format, fp4, fp8, generate, linear, moe, oracle, printable, problem, quantize,
    quantized, router, shape, transform,
};

/// The GPU kernels as the host sees them.
#[cfg(feature = "kernels")]
pub mod kernels {
    pub use nvfp4_kernels::{GroupedKernel, Subject, explain, linear, moe, ptx, ptx_for, router};
}

/// Planning: pure functions of a problem's sizes; and the words that describe how a step is computed.
pub mod plan {
    pub use nvfp4_core::plan::{roofline, tile};
    #[cfg(feature = "kernels")]
    pub use nvfp4_kernels::variant;
}

/// The programs of the book, as documentation tests.
#[cfg(doctest)]
mod documents {
    #[doc = include_str!("../../docs/book/src/start/rust.md")]
    struct Rust;
    #[doc = include_str!("../../docs/book/src/concepts/format.md")]
    struct Format;
    #[doc = include_str!("../../docs/book/src/concepts/tokens.md")]
    struct Tokens;
}
