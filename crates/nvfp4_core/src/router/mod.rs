//! Routers: from the router projection's logits `[T, E]` to the chosen experts of each token and their weights, `[T,
//! k]`.
//!
//! The engine computes the projection. The rules, to the bit:
//!
//! * Logits are f32, f16 or bf16, and are exact in f32. Experts are compared by f32 numbers: by the logit, or with
//!   biases by `score + bias`; [`Score`] defines the scores. Of two equal experts the lower number comes first, and -0
//!   equals 0.
//! * Softmax is monotone, so experts are compared by logits, even if two probabilities would round to the same number.
//! * NaN ranks below every number. A token with a NaN logit still gets distinct experts, but all its weights are NaN.
//!   Equal infinite logits have equal weights.
//! * The ids and weights of a token depend only on its logits, and every device gives the same bits: the f32 additions,
//!   multiplications and divisions have a fixed order. [`compare`] checks the weights in f64.

pub mod compare;
mod rule;
mod select;

use std::borrow::Cow;

use crate::error::Error;
use crate::problem::{MAX_EXPERTS, MAX_TOP_K, TokenDtype};

pub use rule::{GroupScore, Rule, Score, Table};
pub use select::route_token;
pub use select::{route, route_with_ids};

/// Rule that chooses and weights experts: the usual rules by name, or any [`Rule`].
#[derive(Clone, Debug, PartialEq)]
pub enum Scoring {
    /// Softmax over all experts, then the k largest (Qwen3, Mixtral, OLMoE: `norm_topk_prob`).
    Softmax {
        /// Whether the weights are divided by their sum, so that they sum to 1, as with [`Scoring::TopKSoftmax`].
        renormalize: bool,
    },
    /// The k largest logits, then softmax over these logits (gpt-oss).
    TopKSoftmax,
    /// The largest logit; its sigmoid is the weight, and multiplies the layer's input (Llama 4). k is 1.
    SigmoidTop1,
    /// Sigmoids, groups and biases (DeepSeek-V3, "Auxiliary-Loss-Free Load Balancing", 2412.19437). Groups are compared
    /// by the sum of their two largest scores `σ(logit) + bias`, then the experts of the best groups by their scores.
    /// The weight is σ(logit), without bias.
    SigmoidGroups {
        /// One finite bias per expert.
        bias: Vec<f32>,
        /// Number of groups of consecutive experts, all of the same size; 1: no groups.
        groups: usize,
        /// Number of groups that are kept for each token.
        top_groups: usize,
        /// Whether weights are divided by their sum plus 1e-20.
        renormalize: bool,
        /// Factor of the final weights (`routed_scaling_factor`).
        scale: f32,
    },
    /// Any other rule.
    Rule(Rule),
}

/// A router with checked sizes.
#[derive(Clone, Debug, PartialEq)]
pub struct Router {
    experts: usize,
    top_k: usize,
    scoring: Scoring,
    /// The scoring as a rule.
    rule: Rule,
}

impl Router {
    /// Creates a router that gives each token `top_k` of `experts` experts.
    ///
    /// # Errors
    /// Returns an error if a size is out of range (1024 experts, 32 per token), groups are unequal or too small, a number
    /// is not finite, or a table names an expert that does not exist.
    pub fn new(experts: usize, top_k: usize, scoring: Scoring) -> Result<Self, Error> {
        within("experts", experts, MAX_EXPERTS)?;
        within("top_k", top_k, experts.min(MAX_TOP_K))?;
        if scoring == Scoring::SigmoidTop1 {
            within("top_k of sigmoid top-1", top_k, 1)?;
        }
        if let Scoring::SigmoidGroups { bias, .. } = &scoring
            && bias.len() != experts
        {
            return Err(Error::Mismatch { what: "biases of the router", got: bias.len(), expected: experts });
        }
        let rule = Rule::of(&scoring, experts);
        rule.check(experts, top_k)?;
        Ok(Self { experts, top_k, scoring, rule })
    }

    /// Number of experts E.
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// Number of experts per token k.
    pub fn top_k(&self) -> usize {
        self.top_k
    }

    /// Rule that chooses and weights experts.
    pub fn scoring(&self) -> &Scoring {
        &self.scoring
    }

    /// Rule that chooses and weights experts, in its general form.
    pub fn rule(&self) -> &Rule {
        &self.rule
    }

    /// Biases added to the scores in comparisons; `None` if the rule has none.
    pub fn bias(&self) -> Option<&[f32]> {
        (!self.rule.bias.is_empty()).then_some(&self.rule.bias)
    }

    /// Whether the weights multiply a layer's input
    /// ([`MoeInputs::weights_on_input`](crate::moe::MoeInputs::weights_on_input)).
    pub fn weights_on_input(&self) -> bool {
        self.scoring == Scoring::SigmoidTop1
    }

    /// Checks the ids of `tokens` tokens: the rule's table needs one per token, other rules none.
    ///
    /// # Errors
    /// Returns an error if ids are missing or superfluous.
    pub fn check_token_ids(&self, tokens: usize, token_ids: &[i32]) -> Result<(), Error> {
        let expected = if self.rule.table.is_some() { tokens } else { 0 };
        if token_ids.len() != expected {
            let what = "token ids (one per token for a router with a table, otherwise none)";
            return Err(Error::Mismatch { what, got: token_ids.len(), expected });
        }
        Ok(())
    }
}

/// Checks a size of a router.
fn within(what: &str, got: usize, most: usize) -> Result<(), Error> {
    match got {
        got if (1..=most).contains(&got) => Ok(()),
        got => Err(Error::Invalid(format!("router: {what} = {got} must be from 1 to {most}"))),
    }
}

/// Type of logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitType {
    /// f32.
    F32,
    /// f16 or bf16.
    Token(TokenDtype),
}

/// Logits `[T, E]`, row-major without gaps.
#[derive(Clone, Debug)]
pub enum Logits<'a> {
    /// f32.
    F32(Cow<'a, [f32]>),
    /// Bits of f16.
    F16(Cow<'a, [u16]>),
    /// Bits of bf16.
    Bf16(Cow<'a, [u16]>),
}

impl Logits<'_> {
    /// Number of logits, T·E.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(numbers) => numbers.len(),
            Self::F16(bits) | Self::Bf16(bits) => bits.len(),
        }
    }

    /// Whether there are no logits.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Type of the logits.
    pub fn logit_type(&self) -> LogitType {
        match self {
            Self::F32(_) => LogitType::F32,
            Self::F16(_) => LogitType::Token(TokenDtype::F16),
            Self::Bf16(_) => LogitType::Token(TokenDtype::Bf16),
        }
    }

    /// Returns the number of tokens T for a router.
    ///
    /// # Errors
    /// Returns an error if the length is not a multiple of E, or ids and weights exceed a 32-bit index.
    pub fn tokens(&self, router: &Router) -> Result<usize, Error> {
        let tokens = self.len() / router.experts;
        if !self.len().is_multiple_of(router.experts) {
            let (got, expected) = (self.len(), (tokens + 1) * router.experts);
            return Err(Error::Mismatch { what: "logits (one per token and expert)", got, expected });
        }
        if tokens.checked_mul(router.top_k).is_none_or(|choices| choices >= i32::MAX as usize) {
            return Err(Error::TooLarge);
        }
        Ok(tokens)
    }

    /// Returns the logits as exact f32.
    pub fn numbers(&self) -> Cow<'_, [f32]> {
        let decoded = |dtype: TokenDtype, bits: &[u16]| bits.iter().map(|&bits| dtype.decode(bits) as f32).collect();
        match self {
            Self::F32(numbers) => Cow::Borrowed(numbers),
            Self::F16(bits) => decoded(TokenDtype::F16, bits),
            Self::Bf16(bits) => decoded(TokenDtype::Bf16, bits),
        }
    }

    /// Returns the bytes in memory order.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Self::F32(numbers) => bytemuck::cast_slice(numbers),
            Self::F16(bits) | Self::Bf16(bits) => bytemuck::cast_slice(bits),
        }
    }
}

/// Result of a router: `[T, k]` each, the best expert first.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Routes {
    /// Experts of each token. An id of -1 names no expert: a null expert was chosen ([`Rule::null_experts`]), whose
    /// weight stays, or the table does not have the token's id.
    pub ids: Vec<i32>,
    /// Weights of these experts.
    pub weights: Vec<f32>,
}

#[cfg(test)]
mod tests;
