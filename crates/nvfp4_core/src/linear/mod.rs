//! A linear layer: one NVFP4 matrix and 16-bit tokens, for attention projections and dense blocks.
//!
//! ```text
//! out[t] = x[t]·Wᵀ + bias
//! ```
//!
//! Tokens `[M, K]` and the output `[M, N]` are f16 or bf16. W is `[N, K]` with a global scale. Products are exact and
//! are summed in f32. The sum is multiplied by the global scale and the bias is added, both in f32; then the result is
//! rounded to the token type. A value too large for the type becomes an infinity. Every device sums the columns of K in
//! the same order for any number of tokens, so the bits of a token do not depend on the rest of the batch.
//!
//! [`LinearWeights`] and [`LinearStep`] are checked when they are constructed, so every value of these types is valid.

pub mod compare;
pub mod generate;
mod problem;

pub use problem::{LinearInputs, LinearOutput, LinearSizes, LinearStep, LinearWeights};
