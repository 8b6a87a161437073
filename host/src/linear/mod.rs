//! A linear layer: one NVFP4 matrix with tokens of 16 bits, as attention projections and dense blocks have them.
//!
//! ```text
//! out[t] = x[t]·Wᵀ + bias
//! ```
//!
//! Tokens `[M, K]` and the output `[M, N]` are f16 or bf16; W is `[N, K]` with a global scale. Products are exact and summed in
//! f32. The sum times the global scale is f32, and so is what the bias makes of it; then it is rounded to the tokens' type. What
//! is too large for the type becomes an infinity. Every device sums the columns of K in the same order, however many tokens there
//! are. So a token's bits do not depend on the rest of the batch.
//!
//! [`LinearWeights`] and [`LinearStep`] are checked when they are made; whoever holds one holds valid inputs.
//!
//! ```
//! use nvfp4::backend::{Backend, cpu::Cpu};
//! use nvfp4::linear::{LinearInputs, LinearOutput, LinearStep, LinearWeights, compare::compare};
//! use nvfp4::problem::TokenDtype;
//! use nvfp4::quantize::quantize;
//!
//! let numbers: Vec<f32> = (0..32 * 64).map(|i| (i % 13) as f32 / 50.0 - 0.1).collect();
//! let weights = LinearWeights::new(TokenDtype::Bf16, quantize(&numbers, 32, 64)?)?;
//! let mut layer = Cpu::new().prepare_linear(&weights)?;
//! let x = vec![0x3F80; 3 * 64]; // three tokens of ones, as bits of bf16
//! let step = LinearStep::new(&weights, LinearInputs { tokens: 3, x: x.into(), stride: 64 })?;
//! let mut output = LinearOutput::new(&step);
//! layer.execute(&step, &mut output)?;
//! assert!(compare(&weights, &step, &output).mismatches == 0);
//! # Ok::<_, nvfp4::Error>(())
//! ```

pub mod compare;
pub mod generate;
mod problem;

pub(crate) use problem::no_nvfp4_tokens;
pub use problem::{LinearInputs, LinearOutput, LinearSizes, LinearStep, LinearWeights};
