//! Routers: from the logits of a router's projection, `[T, E]`, to the experts that each token names and their weights, `[T, k]`.
//!
//! The projection itself is the engine's. To the bit:
//!
//! * Logits are f32, f16 or bf16, and exact in f32. Experts are compared by scores in f32: logits; or, with biases, `σ(logit) + bias`,
//!   with σ as [`kernels_gpu::exp::sigmoid`] computes it. The lower of two equal experts comes first, and -0 equals 0.
//! * Softmax is monotone: experts are compared by logits, also where two probabilities would be rounded to one.
//! * A NaN is below every number. A token with a NaN among its logits is given different experts as any other, but all its weights
//!   are NaN. Of infinite logits, equal ones have equal weights.
//! * A token's ids and weights depend on its logits alone, and every device has the same bits: weights are f32 by additions,
//!   multiplications and divisions in a fixed order. [`compare`] checks them against f64.

pub mod compare;
mod select;

use std::borrow::Cow;

use kernels_gpu::router::abi::{MAX_EXPERTS, MAX_GROUPS, MAX_TOP_K};

use crate::error::Error;
use crate::problem::TokenDtype;

pub use select::route;
#[cfg(all(test, feature = "cuda"))]
pub(crate) use select::route_token;

/// How experts are chosen and weighted.
#[derive(Clone, Debug, PartialEq)]
pub enum Scoring {
    /// Softmax over all experts, then the k largest (Qwen3, Mixtral, OLMoE: `norm_topk_prob`).
    Softmax {
        /// Whether the weights are divided by their sum, so that they add up to 1. Then they are those of
        /// [`Scoring::TopKSoftmax`].
        renormalize: bool,
    },
    /// The k largest logits, then softmax over these (gpt-oss).
    TopKSoftmax,
    /// The largest logit, whose sigmoid is the weight, and multiplies the layer's input (Llama 4). k is 1.
    SigmoidTop1,
    /// Sigmoids, groups and biases (DeepSeek-V3, "Auxiliary-Loss-Free Load Balancing", 2412.19437). Groups are compared by the
    /// sum of their two largest scores `σ(logit) + bias`, then the experts of the best groups by their scores. A weight is
    /// σ(logit), without bias.
    SigmoidGroups {
        /// A finite number for each expert.
        bias: Vec<f32>,
        /// Groups of neighboring experts, equally many in each; 1 for none.
        groups: usize,
        /// Groups whose experts may be chosen.
        top_groups: usize,
        /// Whether weights are divided by their sum and 1e-20.
        renormalize: bool,
        /// What weights are multiplied with at last (`routed_scaling_factor`).
        scale: f32,
    },
}

/// A router, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Router {
    experts: usize,
    top_k: usize,
    scoring: Scoring,
}

impl Router {
    /// A router that gives each token `top_k` of so many experts.
    ///
    /// # Errors
    /// If a size is out of range (512 experts, 32 of a token, 32 groups), groups are not equal or have too few experts, or a number
    /// is not finite.
    pub fn new(experts: usize, top_k: usize, scoring: Scoring) -> Result<Self, Error> {
        let within = |what: &str, got: usize, most: usize| match got {
            got if (1..=most).contains(&got) => Ok(()),
            got => Err(Error::Invalid(format!("router: {what} = {got} is not from 1 to {most}"))),
        };
        within("experts", experts, MAX_EXPERTS as usize)?;
        within("top_k", top_k, experts.min(MAX_TOP_K as usize))?;
        match &scoring {
            Scoring::Softmax { .. } | Scoring::TopKSoftmax => {}
            Scoring::SigmoidTop1 => within("top_k of sigmoid top-1", top_k, 1)?,
            Scoring::SigmoidGroups { bias, groups, top_groups, scale, .. } => {
                within("groups", *groups, MAX_GROUPS as usize)?;
                within("top_groups", *top_groups, *groups)?;
                let size = experts / groups;
                if !experts.is_multiple_of(*groups) || *groups > 1 && size < 2 {
                    return Err(Error::Invalid(format!(
                        "router: {experts} experts in {groups} groups; a group must have equally many, two at least"
                    )));
                }
                within("top_k of the groups that are taken", top_k, top_groups * size)?;
                if bias.len() != experts {
                    return Err(Error::Mismatch { what: "biases of the router", got: bias.len(), expected: experts });
                }
                if let Some(expert) = bias.iter().position(|bias| !bias.is_finite()) {
                    return Err(Error::Invalid(format!("router: the bias of expert {expert} is {}", bias[expert])));
                }
                if !scale.is_finite() {
                    return Err(Error::Invalid(format!("router: scale = {scale} is not finite")));
                }
            }
        }
        Ok(Self { experts, top_k, scoring })
    }

    /// E.
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// k.
    pub fn top_k(&self) -> usize {
        self.top_k
    }

    /// How experts are chosen and weighted.
    pub fn scoring(&self) -> &Scoring {
        &self.scoring
    }

    /// The biases with which scores are compared, if there are some.
    pub fn bias(&self) -> Option<&[f32]> {
        match &self.scoring {
            Scoring::SigmoidGroups { bias, .. } => Some(bias),
            _ => None,
        }
    }

    /// Whether the weights are for a layer's input ([`MoeInputs::weights_on_input`](crate::moe::MoeInputs::weights_on_input)).
    pub fn weights_on_input(&self) -> bool {
        self.scoring == Scoring::SigmoidTop1
    }

    /// Groups, and how many of them are taken.
    pub(crate) fn groups(&self) -> (usize, usize) {
        match self.scoring {
            Scoring::SigmoidGroups { groups, top_groups, .. } => (groups, top_groups),
            _ => (1, 1),
        }
    }
}

/// The type of logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitType {
    /// f32.
    F32,
    /// 16 bits.
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
    /// T·E.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(numbers) => numbers.len(),
            Self::F16(bits) | Self::Bf16(bits) => bits.len(),
        }
    }

    /// Whether there is no logit.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Their type.
    pub fn logit_type(&self) -> LogitType {
        match self {
            Self::F32(_) => LogitType::F32,
            Self::F16(_) => LogitType::Token(TokenDtype::F16),
            Self::Bf16(_) => LogitType::Token(TokenDtype::Bf16),
        }
    }

    /// T, for a router of so many experts.
    ///
    /// # Errors
    /// If the rows are not whole, or ids and weights would be more than an index of 32 bits.
    pub fn tokens(&self, router: &Router) -> Result<usize, Error> {
        let tokens = self.len() / router.experts;
        if !self.len().is_multiple_of(router.experts) {
            let (got, expected) = (self.len(), (tokens + 1) * router.experts);
            return Err(Error::Mismatch { what: "logits (one for each token and expert)", got, expected });
        }
        if tokens.checked_mul(router.top_k).is_none_or(|choices| choices >= i32::MAX as usize) {
            return Err(Error::TooLarge);
        }
        Ok(tokens)
    }

    /// The logits as f32, exact.
    pub(crate) fn numbers(&self) -> Cow<'_, [f32]> {
        let decoded = |dtype: TokenDtype, bits: &[u16]| bits.iter().map(|&bits| dtype.decode(bits) as f32).collect();
        match self {
            Self::F32(numbers) => Cow::Borrowed(numbers),
            Self::F16(bits) => decoded(TokenDtype::F16, bits),
            Self::Bf16(bits) => decoded(TokenDtype::Bf16, bits),
        }
    }

    /// The bytes as they lie in memory.
    #[cfg(feature = "kernels")]
    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            Self::F32(numbers) => bytemuck::cast_slice(numbers),
            Self::F16(bits) | Self::Bf16(bits) => bytemuck::cast_slice(bits),
        }
    }
}

/// What a router gives: `[T, k]` each, the best expert first.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Routes {
    /// Experts.
    pub ids: Vec<i32>,
    /// Their weights.
    pub weights: Vec<f32>,
}

#[cfg(test)]
mod tests;
