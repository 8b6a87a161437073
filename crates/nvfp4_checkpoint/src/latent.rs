//! Routed experts in a latent space (Nemotron 3 Super and Ultra): one projection makes the tokens of the experts narrower,
//! another one widens the sum of their results. The router and the shared expert read the tokens themselves.
//!
//! Sources of names and order: Transformers 5.24, `NemotronHMoE`; vLLM 0.33, `nemotron_h.py`.

use rayon::prelude::*;

use super::Checkpoint;
use super::convert::weights;
use super::model_config::ModelConfig;
use super::names::BIAS;
use nvfp4_core::Error;
use nvfp4_core::moe::{MoeInputs, MoeWeights};
use nvfp4_core::problem::TokenDtype;

/// Names of the projections before and after the experts, in the feed-forward block.
const PROJECTIONS: [&str; 2] = ["fc1_latent_proj", "fc2_latent_proj"];

/// Tensors of a projection in every form that is read.
const PARTS: [&str; 10] = [
    ".weight",
    ".weight_packed",
    ".weight_scale",
    ".weight_scale_2",
    ".weight_scale_inv",
    ".weight_global_scale",
    ".scale",
    ".input_scale",
    ".input_global_scale",
    BIAS,
];

/// What surrounds the routed experts of a layer in a latent space.
#[derive(Clone, Debug)]
pub struct Latent<'a> {
    /// `[L, H]`
    before: Projection,
    /// `[H, L]`
    after: Projection,
    /// Shared expert: a layer of width H with one expert, which every token names.
    shared: Option<MoeWeights<'a>>,
}

/// A matrix `[N, K]` with its bias.
#[derive(Clone, Debug)]
struct Projection {
    k: usize,
    weights: Vec<f32>,
    bias: Option<Vec<f32>>,
}

impl Projection {
    fn rows(&self) -> usize {
        self.weights.len() / self.k.max(1)
    }

    /// Returns the product with a token `[K]`, summed in f64.
    fn product(&self, dtype: TokenDtype, token: &[u16]) -> Vec<f64> {
        let token: Vec<f64> = token.iter().map(|&bits| dtype.decode(bits)).collect();
        let dot = |row: &[f32]| token.iter().zip(row).map(|(x, &w)| x * f64::from(w)).sum::<f64>();
        let bias = |row: usize| self.bias.as_ref().map_or(0.0, |bias| f64::from(bias[row]));
        self.weights.chunks(self.k).enumerate().map(|(index, row)| dot(row) + bias(index)).collect()
    }
}

impl<'a> Latent<'a> {
    /// H: number of elements of the layer's tokens.
    pub fn hidden(&self) -> usize {
        self.before.k
    }

    /// L: number of elements of the routed experts' tokens.
    pub fn width(&self) -> usize {
        self.after.k
    }

    /// Shared expert: a layer of width H with one expert, which every token names.
    pub fn shared(&self) -> Option<&MoeWeights<'a>> {
        self.shared.as_ref()
    }

    pub(super) fn set_shared(&mut self, shared: MoeWeights<'a>) {
        self.shared = Some(shared);
    }

    /// Returns the inputs of the routed experts, from the router's inputs of width H. Products are summed in f64 and
    /// rounded once to the token type.
    ///
    /// # Errors
    /// Returns an error if a product is not finite in the token type.
    pub fn routed(&self, dtype: TokenDtype, inputs: &MoeInputs<'_>) -> Result<MoeInputs<'static>, Error> {
        let narrow = |(token, row): (usize, &[u16])| {
            let product = self.before.product(dtype, &row[..self.hidden()]);
            let bits: Vec<u16> = product.into_iter().map(|number| dtype.round(number)).collect();
            match bits.iter().position(|&bits| !dtype.decode(bits).is_finite()) {
                None => Ok(bits),
                Some(column) => {
                    let what = format!("element {column} of token {token} behind {}", PROJECTIONS[0]);
                    let what = format!("{what} is not a finite {}; use smaller tokens, or bf16", dtype.name());
                    Err(Error::Invalid(what))
                }
            }
        };
        let rows: Result<Vec<_>, Error> = inputs.hidden.par_chunks(inputs.stride).enumerate().map(narrow).collect();
        Ok(MoeInputs {
            tokens: inputs.tokens,
            hidden: rows?.concat().into(),
            stride: self.width(),
            ids: inputs.ids.to_vec().into(),
            weights: inputs.weights.to_vec().into(),
            weights_on_input: inputs.weights_on_input,
            shared_weights: None,
        })
    }

    /// Returns the inputs of the shared expert's layer, from the router's inputs of width H.
    pub fn of_shared(&self, inputs: &MoeInputs<'_>) -> MoeInputs<'static> {
        let weights = inputs.shared_weights.as_ref().map_or_else(|| vec![1.0; inputs.tokens], |gates| gates.to_vec());
        MoeInputs {
            tokens: inputs.tokens,
            hidden: inputs.hidden.to_vec().into(),
            stride: inputs.stride,
            ids: vec![0; inputs.tokens].into(),
            weights: weights.into(),
            weights_on_input: false,
            shared_weights: None,
        }
    }

    /// Returns the layer's output `[T, H]`, from the output `[T, L]` of the routed experts and the output `[T, H]` of the
    /// shared expert. Sums are in f64 and rounded once to the token type.
    pub fn output(&self, dtype: TokenDtype, routed: &[u16], shared: Option<&[u16]>) -> Vec<u16> {
        let hidden = self.hidden();
        let wide = |(token, row): (usize, &[u16])| {
            let mut sums = self.after.product(dtype, row);
            if let Some(shared) = shared {
                let of_token = &shared[token * hidden..][..hidden];
                sums.iter_mut().zip(of_token).for_each(|(sum, &bits)| *sum += dtype.decode(bits));
            }
            sums.into_iter().map(|sum| dtype.round(sum)).collect::<Vec<_>>()
        };
        routed.par_chunks(self.width()).enumerate().map(wide).collect::<Vec<_>>().concat()
    }
}

impl Checkpoint {
    /// Returns the names of the tensors of both projections of the block with this path; `None` unless both exist.
    pub(super) fn latent_tensors(&self, path: &str) -> Option<Vec<String>> {
        let of = |name| {
            let names = PARTS.iter().map(move |part| format!("{path}{name}{part}"));
            names.filter(|name| self.tensor(name).is_some()).collect::<Vec<_>>()
        };
        let [before, after] = PROJECTIONS.map(of);
        (!before.is_empty() && !after.is_empty()).then(|| [before, after].concat())
    }

    /// Loads both projections of the block with this path. `width`: L of the experts.
    pub(super) fn latent(&self, config: &ModelConfig, path: &str, width: usize) -> Result<Latent<'static>, Error> {
        let [before, after] = PROJECTIONS.map(|name| self.projection(config, &format!("{path}{name}")));
        let (before, after) = (before?, after?);
        let at = |index: usize| self.place(&format!("{path}{}", PROJECTIONS[index]));
        for (index, what, got, expected) in
            [(0, "rows", before.rows(), width), (1, "columns", after.k, width), (1, "rows", after.rows(), before.k)]
        {
            if got != expected {
                return Err(Error::Mismatch { what, got, expected }.at(at(index)));
            }
        }
        Ok(Latent { before, after, shared: None })
    }

    fn projection(&self, config: &ModelConfig, module: &str) -> Result<Projection, Error> {
        if let Some(transform) = config.input_transform(module)? {
            let what = format!("transform {} of the tokens of a latent projection is not computed", transform.group);
            return Err(Error::NotComputed(format!("{what}; export the model without it")).at(self.place(module)));
        }
        let source = weights::of_module(self, module)?;
        let [n, k] = source.sizes();
        let mut weights = Vec::new();
        source.decoded(0..n, &mut weights);
        if let Some(index) = weights.iter().position(|number| !number.is_finite()) {
            let what = format!("the weight in row {}, column {} is not finite", index / k.max(1), index % k.max(1));
            return Err(Error::Invalid(format!("{what}; export the model again")).at(self.place(module)));
        }
        let name = format!("{module}{BIAS}");
        let bias = self.tensor(&name).map(|_| self.numbers(&name, &[n], "[rows of the weight]")).transpose()?;
        Ok(Projection { k, weights, bias })
    }
}
