//! An MoE layer: hidden states in, hidden states out.
//!
//! ```text
//! out[t] = Σⱼ w[t, j] · (silu(x[t]·gateᵀ) ∘ (x[t]·upᵀ))·downᵀ    with gate, up and down of the expert ids[t, j]
//! ```
//!
//! Another [`Activation`] may take the place of `silu(g) ∘ u`, and each projection may have biases ([`Biases`]). Tokens
//! are f16 or bf16, weights are NVFP4 with one global scale per matrix. The following rules define the output to the
//! bit:
//!
//! * A *choice* is a token together with one of the k experts that it names. A choice contributes nothing if the layer
//!   does not hold its expert: the id is out of range, or the expert map assigns it to another device. Every other
//!   choice is a *row* ([`Rows`]). A token that names an expert twice has two rows.
//! * A bias is added in f32 to the scaled product of a projection. The intermediate of a row is rounded to the token
//!   type, and so is the row's down projection. A value too large for the type becomes an infinity, which affects only
//!   its own token.
//! * The rows of a token are added in f32, starting from 0, in the order in which the token names its experts, with one
//!   fused multiply-add each. The shared expert's row is added last. The sum is rounded to the token type.
//! * With weights on the input (k = 1), the weight multiplies x in f32, the result is rounded to the token type, and
//!   rows are added with weight 1.
//! * Every device sums the columns of K in the same order for any number of tokens. The bits of a token therefore do
//!   not depend on the rest of the batch.
//!
//! [`MoeWeights`] and [`MoeStep`] are checked when they are constructed, so every value of these types is valid.

mod activation;
pub mod compare;
pub mod generate;
pub mod oracle;
mod output;
mod problem;
mod routing;
mod rows;
pub mod shape;

pub use activation::Activation;
pub use activation::{Form, Gate};
pub use output::{MoeOutput, QuantizedStages, Stages};
pub use problem::check_global_scale;
pub use problem::{Biases, ExpertTransforms, MoeExpert, MoeInputs, MoeSizes, MoeStep, MoeWeights};
pub use rows::{NO_ROW, Rows};
pub use shape::LayerShape;
