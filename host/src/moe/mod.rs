//! An MoE layer: hidden states in, hidden states out.
//!
//! ```text
//! out[t] = Σⱼ w[t, j] · (silu(x[t]·gateᵀ) ∘ (x[t]·upᵀ))·downᵀ    with gate, up and down of the expert ids[t, j]
//! ```
//!
//! Instead of `silu(g) ∘ u` there may be another [`Activation`], and each projection may have biases ([`Biases`]). Tokens are f16
//! or bf16, weights NVFP4 with a global scale for each matrix. To the bit:
//!
//! * A *choice* is a token with one of the k experts that it names. A choice of an expert that the layer does not hold (an id
//!   out of range, or one that the expert map gives away) contributes nothing; every other one is a *row* ([`Rows`]). A token
//!   that names an expert twice has two rows.
//! * A bias is added in f32 to a projection's scaled product. The intermediate of a row is rounded to the tokens' type, and so is
//!   the row that the down projection makes of it. What is too large for the type becomes an infinity, and stays within its token.
//! * A token's rows are added up in f32, from 0, in the order in which it names its experts: one fused multiply-add each. The
//!   shared expert's comes last. The sum is rounded to the tokens' type.
//! * Weights on the input (k = 1) multiply x, in f32 with a rounding to the tokens' type, and the rows are added as they are.
//! * Every device sums the columns of K in the same order, however many tokens there are. So a token's bits do not depend on the
//!   rest of the batch.
//!
//! [`MoeWeights`] and [`MoeStep`] are checked when they are made; whoever holds one holds valid inputs.

mod activation;
pub mod compare;
pub mod generate;
pub mod oracle;
mod output;
mod problem;
mod rows;
pub mod shape;
#[cfg(test)]
mod tests;

pub use activation::Activation;
pub(crate) use activation::Gate;
pub use output::{MoeOutput, QuantizedStages, Stages};
pub(crate) use problem::check_global_scale;
pub use problem::{Biases, MoeExpert, MoeInputs, MoeSizes, MoeStep, MoeWeights};
pub use rows::{NO_ROW, Rows};
pub use shape::LayerShape;
