//! What some models have around the routed experts of a layer: norms and projections before and behind the experts, a
//! branch beside them whose output is added, and identity experts, which add the token times their weight (LongCat-Flash).
//! The host computes norms, projections and the sum; the experts and the branch are layers of their own. Where norms belong to single branches, the router has a norm of its own too.
//!
//! | family | before the experts | behind the experts | branch beside them |
//! |---|---|---|---|
//! | Nemotron 3 Super and Ultra | `fc1_latent_proj` | `fc2_latent_proj` | shared expert |
//! | Kimi-K3 | `routed_expert_down_proj` | `routed_expert_norm`, `routed_expert_up_proj` | shared expert |
//! | Gemma 4 | `pre_feedforward_layernorm_2` | `post_feedforward_layernorm_2` | dense MLP from `pre_feedforward_layernorm` to `post_feedforward_layernorm_1` |
//!
//! In every family, the host also computes a shared expert that is not NVFP4 ([`FeedForward`]). An NVFP4 shared expert whose
//! activation differs from the routed experts' activation is a layer of its own.
//!
//! A norm that all branches share does not belong to the layer: tokens are behind the one before the branches, and the
//! output is the sum of the branches.
//!
//! Sources of names and order: `NemotronHMoE` and `Gemma4TextDecoderLayer` of Transformers 5.24; `nemotron_h.py`,
//! `gemma4.py`, and `KimiMoE` of `kimi_k3` in vLLM 0.33.

use rayon::prelude::*;

use super::Checkpoint;
use super::block::{DOWNLOAD, Kind};
use super::feed_forward::FeedForward;
use super::model_config::ModelConfig;
use super::projection::Projection;
use nvfp4_core::Error;
use nvfp4_core::moe::{MoeInputs, MoeWeights};
use nvfp4_core::problem::TokenDtype;
use nvfp4_core::transform::TokenTransform;

/// Modules around the routed experts in a family of models.
#[derive(Debug)]
struct Family {
    before: Names,
    behind: Names,
    /// Norms before and behind the branch.
    branch: [Option<&'static str>; 2],
    /// Kind of the projections of the branch.
    branch_kind: Kind,
}

/// Names of a norm and of a projection behind the norm.
#[derive(Debug)]
struct Names {
    norm: Option<&'static str>,
    projection: Option<&'static str>,
}

static FAMILIES: [Family; 3] = [
    Family {
        before: Names { norm: None, projection: Some("fc1_latent_proj") },
        behind: Names { norm: None, projection: Some("fc2_latent_proj") },
        branch: [None, None],
        branch_kind: Kind::Shared,
    },
    Family {
        before: Names { norm: None, projection: Some("routed_expert_down_proj") },
        behind: Names { norm: Some("routed_expert_norm"), projection: Some("routed_expert_up_proj") },
        branch: [None, None],
        branch_kind: Kind::Shared,
    },
    Family {
        before: Names { norm: Some("pre_feedforward_layernorm_2"), projection: None },
        behind: Names { norm: Some("post_feedforward_layernorm_2"), projection: None },
        branch: [Some("pre_feedforward_layernorm"), Some("post_feedforward_layernorm_1")],
        branch_kind: Kind::Dense,
    },
];

/// No norm or projection around the experts.
static ALONE: Family = Family {
    before: Names { norm: None, projection: None },
    behind: Names { norm: None, projection: None },
    branch: [None, None],
    branch_kind: Kind::Shared,
};

impl Family {
    /// Returns the modules that identify the family: a layer that lacks one of them belongs to another family.
    fn signs(&self) -> impl Iterator<Item = &'static str> {
        [&self.before, &self.behind].into_iter().filter_map(|names| names.projection.or(names.norm))
    }

    fn norms(&self) -> impl Iterator<Item = &'static str> {
        [self.before.norm, self.behind.norm].into_iter().chain(self.branch).flatten()
    }

    fn projections(&self) -> impl Iterator<Item = &'static str> {
        [self.before.projection, self.behind.projection].into_iter().flatten()
    }
}

/// Returns `true` if a name contains a module that is, or may be, a projection before or behind the experts.
pub(super) fn is_projection(name: &str) -> bool {
    let is_known = |segment| FAMILIES.iter().any(|family| family.projections().any(|known| known == segment));
    name.contains("latent") || name.split('.').any(is_known)
}

/// Whether a name contains a projection or a norm around the experts. These change no product of the experts.
pub(super) fn is_part(name: &str) -> bool {
    let is_norm = |segment| FAMILIES.iter().any(|family| family.norms().any(|known| known == segment));
    is_projection(name) || name.split('.').any(is_norm)
}

/// What surrounds the routed experts of one layer, known before any weight is read.
pub(super) struct Surroundings {
    family: &'static Family,
    /// Name of the modules' parent, including the dot.
    path: String,
    /// Names of the tensors that are read.
    pub tensors: Vec<String>,
}

impl Surroundings {
    /// Surroundings without norms and projections: the layer only adds something to the output of the block's experts.
    pub(super) fn alone(path: String) -> Self {
        Self { family: &ALONE, path, tensors: Vec::new() }
    }

    /// Modules of the projections before and behind the experts.
    pub(super) fn projections(&self) -> impl Iterator<Item = String> {
        self.family.projections().map(|name| format!("{}{name}", self.path))
    }

    /// Kind of the projections of the branch beside the experts.
    pub(super) fn branch_kind(&self) -> Kind {
        self.family.branch_kind
    }
}

/// Norms and projections around the routed experts of a layer, and the branch beside the experts.
#[derive(Clone, Debug)]
pub struct Around<'a> {
    hidden: usize,
    width: usize,
    before: Steps,
    behind: Steps,
    /// Transform of the tokens that all routed experts share, after `before`.
    transform: Option<TokenTransform>,
    /// Norms of the branch before and behind it.
    norms: [Option<Norm>; 2],
    branch: Option<Branch<'a>>,
    identity_experts: usize,
}

/// A branch of width H beside the routed experts.
#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "a layer has one branch")]
pub(super) enum Branch<'a> {
    /// A layer with one expert, which every token names.
    Layer(MoeWeights<'a>),
    /// A branch that the host computes. Its projections may have any form.
    Host(FeedForward),
}

/// A norm, and a projection behind the norm; both can be missing.
#[derive(Clone, Debug)]
pub struct Steps {
    /// Norm of the rows.
    pub norm: Option<Norm>,
    /// Projection of the norm's rows.
    pub projection: Option<Projection>,
}

impl Steps {
    /// Takes one row through norm and projection, in f64.
    fn apply(&self, mut row: Vec<f64>) -> Vec<f64> {
        if let Some(norm) = &self.norm {
            norm.apply(&mut row);
        }
        match &self.projection {
            Some(projection) => projection.product(&row),
            None => row,
        }
    }
}

/// A norm of rows by their root mean square: `x / √(mean(x²) + ε) · w`, in f64.
#[derive(Clone, Debug, PartialEq)]
pub struct Norm {
    /// Weights w, one per element of a row.
    pub weights: Vec<f64>,
    /// ε: a finite number that is not negative.
    pub epsilon: f64,
}

impl Norm {
    pub(super) fn apply(&self, row: &mut [f64]) {
        let mean = row.iter().map(|number| number * number).sum::<f64>() / row.len() as f64;
        let root = (mean + self.epsilon).sqrt();
        row.iter_mut().zip(&self.weights).for_each(|(number, weight)| *number = *number / root * weight);
    }
}

fn decoded(dtype: TokenDtype, row: &[u16]) -> Vec<f64> {
    row.iter().map(|&bits| dtype.decode(bits)).collect()
}

impl<'a> Around<'a> {
    /// H: number of elements of the layer's tokens.
    pub fn hidden(&self) -> usize {
        self.hidden
    }

    /// Number of elements of the routed experts' tokens.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Branch beside the experts, a shared expert or a dense MLP in NVFP4: a layer of width H with one expert, which every
    /// token names.
    pub fn branch(&self) -> Option<&MoeWeights<'a>> {
        match &self.branch {
            Some(Branch::Layer(weights)) => Some(weights),
            _ => None,
        }
    }

    /// Branch beside the experts in another precision, which [`Self::output`] computes.
    pub fn host_branch(&self) -> Option<&FeedForward> {
        match &self.branch {
            Some(Branch::Host(block)) => Some(block),
            _ => None,
        }
    }

    /// Transform of the tokens that all routed experts share, after [`Self::before`]. [`Self::routed`] applies it.
    pub fn transform(&self) -> Option<&TokenTransform> {
        self.transform.as_ref()
    }

    /// Projections that the host computes.
    pub fn projections(&self) -> impl Iterator<Item = &Projection> {
        let around = [&self.before, &self.behind].into_iter().filter_map(|steps| steps.projection.as_ref());
        around.chain(self.host_branch().into_iter().flat_map(FeedForward::projections))
    }

    /// Norms and projections from the layer's tokens to the routed experts' tokens.
    pub fn before(&self) -> &Steps {
        &self.before
    }

    /// Norms and projections from the routed experts' output to a summand of the layer's output.
    pub fn behind(&self) -> &Steps {
        &self.behind
    }

    /// Norms before and behind the branch.
    pub fn branch_norms(&self) -> [Option<&Norm>; 2] {
        self.norms.each_ref().map(Option::as_ref)
    }

    pub(super) fn set_branch(&mut self, branch: Branch<'a>) -> Result<(), Error> {
        let got = match &branch {
            Branch::Layer(weights) => weights.sizes().hidden,
            Branch::Host(block) => block.hidden(),
        };
        let expected = self.hidden;
        if got != expected {
            return Err(Error::Mismatch { what: "elements per token of the branch beside the experts", got, expected });
        }
        self.branch = Some(branch);
        Ok(())
    }

    /// Number of identity experts. The id of a chosen one is -1 ([`Rule::null_experts`](nvfp4_core::router::Rule)), and
    /// [`Self::output`] adds the token times its weight.
    pub fn identity_experts(&self) -> usize {
        self.identity_experts
    }

    pub(super) fn set_identity_experts(&mut self, count: usize) -> Result<(), Error> {
        if count > 0 && (self.before.projection.is_some() || self.behind.projection.is_some()) {
            return Err(Error::NotComputed(
                "identity experts beside projections of the tokens are not computed".into(),
            ));
        }
        self.identity_experts = count;
        Ok(())
    }

    pub(super) fn set_transform(&mut self, transform: Option<TokenTransform>) {
        self.transform = transform;
    }

    /// Returns the inputs of the routed experts, from the router's inputs of width H. Numbers are computed in f64 and
    /// rounded once to the token type.
    ///
    /// # Errors
    /// Returns an error if a number is not finite in the token type.
    pub fn routed(&self, dtype: TokenDtype, inputs: &MoeInputs<'_>) -> Result<MoeInputs<'static>, Error> {
        let mut hidden = self.rows(dtype, inputs, "the experts", |row| self.before.apply(row))?;
        if let Some(transform) = &self.transform {
            transform.tokens(dtype, self.width, &mut hidden)?;
        }
        Ok(MoeInputs {
            tokens: inputs.tokens,
            hidden: hidden.into(),
            stride: self.width,
            ids: inputs.ids.to_vec().into(),
            weights: inputs.weights.to_vec().into(),
            weights_on_input: inputs.weights_on_input,
            shared_weights: None,
        })
    }

    /// Returns the inputs of the layer [`Self::branch`], from the router's inputs of width H.
    ///
    /// # Errors
    /// Returns an error if a number is not finite in the token type.
    pub fn of_branch(&self, dtype: TokenDtype, inputs: &MoeInputs<'_>) -> Result<MoeInputs<'static>, Error> {
        let weights = inputs.shared_weights.as_ref().map_or_else(|| vec![1.0; inputs.tokens], |gates| gates.to_vec());
        let hidden = self.rows(dtype, inputs, "the branch beside the experts", |mut row| {
            self.norms[0].iter().for_each(|norm| norm.apply(&mut row));
            row
        })?;
        Ok(MoeInputs {
            tokens: inputs.tokens,
            hidden: hidden.into(),
            stride: self.hidden,
            ids: vec![0; inputs.tokens].into(),
            weights: weights.into(),
            weights_on_input: false,
            shared_weights: None,
        })
    }

    /// Changes the rows of the router's inputs and rounds them.
    fn rows(
        &self,
        dtype: TokenDtype,
        inputs: &MoeInputs<'_>,
        what: &str,
        change: impl Fn(Vec<f64>) -> Vec<f64> + Sync,
    ) -> Result<Vec<u16>, Error> {
        let changed = |(token, row): (usize, &[u16])| {
            let numbers = change(decoded(dtype, &row[..self.hidden]));
            let bits: Vec<u16> = numbers.into_iter().map(|number| dtype.round(number)).collect();
            match bits.iter().position(|&bits| !dtype.decode(bits).is_finite()) {
                None => Ok(bits),
                Some(column) => {
                    let what = format!("element {column} of token {token} before {what} is not a finite");
                    Err(Error::Invalid(format!("{what} {}; use smaller tokens, or bf16", dtype.name())))
                }
            }
        };
        let rows: Result<Vec<_>, Error> = inputs.hidden.par_chunks(inputs.stride).enumerate().map(changed).collect();
        Ok(rows?.concat())
    }

    /// Returns the layer's output `[T, H]`. `inputs`: the router's; `routed`: output `[T, width]` of the routed experts;
    /// `branch`: output `[T, H]` of the layer [`Self::branch`]. Sums are computed in f64 and rounded once to the token type.
    pub fn output(
        &self,
        dtype: TokenDtype,
        inputs: &MoeInputs<'_>,
        routed: &[u16],
        branch: Option<&[u16]>,
    ) -> Vec<u16> {
        let [first, last] = self.branch_norms();
        let of_branch = |token: usize| match (&self.branch, branch) {
            (Some(Branch::Host(block)), _) => Some({
                let mut row = decoded(dtype, &inputs.hidden[token * inputs.stride..][..self.hidden]);
                first.iter().for_each(|norm| norm.apply(&mut row));
                let gate = inputs.shared_weights.as_ref().map_or(1.0, |gates| f64::from(gates[token]));
                block.apply(&row).into_iter().map(|number| gate * number).collect()
            }),
            (Some(Branch::Layer(_)), Some(rows)) => Some(decoded(dtype, &rows[token * self.hidden..][..self.hidden])),
            _ => None,
        };
        let of_identities = |token: usize| {
            let top_k = inputs.ids.len() / inputs.tokens;
            let chosen = inputs.ids[token * top_k..][..top_k].iter().zip(&inputs.weights[token * top_k..]);
            let weight: f64 = chosen.filter(|(id, _)| **id < 0).map(|(_, &weight)| f64::from(weight)).sum();
            let row = decoded(dtype, &inputs.hidden[token * inputs.stride..][..self.hidden]);
            row.into_iter().map(move |number| weight * number)
        };
        let sum = |(token, row): (usize, &[u16])| {
            let mut sums = self.behind.apply(decoded(dtype, row));
            if self.identity_experts > 0 {
                sums.iter_mut().zip(of_identities(token)).for_each(|(sum, number)| *sum += number);
            }
            if let Some(mut branch) = of_branch(token) {
                last.iter().for_each(|norm| norm.apply(&mut branch));
                sums.iter_mut().zip(branch).for_each(|(sum, number)| *sum += number);
            }
            sums.into_iter().map(|sum| dtype.round(sum)).collect::<Vec<_>>()
        };
        routed.par_chunks(self.width).enumerate().map(sum).collect::<Vec<_>>().concat()
    }
}

impl Checkpoint {
    /// Finds what surrounds the experts of the block with this path; `None`: nothing of a known family.
    ///
    /// # Errors
    /// Returns an error if the weights of a projection cannot be read.
    pub(super) fn surroundings(&self, path: String) -> Result<Option<Surroundings>, Error> {
        let exists = |sign: &str| self.names_under(&format!("{path}{sign}.weight")).next().is_some();
        let Some(family) = FAMILIES.iter().find(|family| family.signs().all(exists)) else { return Ok(None) };
        let mut tensors: Vec<String> = family.norms().map(|norm| format!("{path}{norm}.weight")).collect();
        for projection in family.projections() {
            let module = format!("{path}{projection}");
            tensors.extend(self.projection_tensors(&module)?);
        }
        Ok(Some(Surroundings { family, path, tensors }))
    }

    /// Loads what surrounds the experts, without the branch. `width`: number of elements of the experts' tokens.
    pub(super) fn around(
        &self,
        config: &ModelConfig,
        Surroundings { family, path, .. }: &Surroundings,
        width: usize,
    ) -> Result<Around<'static>, Error> {
        let projection = |name: Option<&'static str>| {
            name.map(|name| self.projection(config, &format!("{path}{name}")).map(|found| (name, found))).transpose()
        };
        let (before, behind) = (projection(family.before.projection)?, projection(family.behind.projection)?);
        let hidden = before.as_ref().map_or(width, |(_, projection)| projection.k);
        for (found, sizes) in [(&before, [width, hidden]), (&behind, [hidden, width])] {
            let Some((name, found)) = found else { continue };
            for (what, got, expected) in [("rows", found.rows(), sizes[0]), ("columns", found.k, sizes[1])] {
                if got != expected {
                    let error = Error::Mismatch { what, got, expected };
                    return Err(error.at(self.place(&format!("{path}{name}"))));
                }
            }
        }
        let norm = |name: Option<&str>, size: usize| {
            name.map(|name| self.norm(config, &format!("{path}{name}"), size)).transpose()
        };
        let name = self.norm_behind(config, family, path)?;
        let (before_norm, behind_norm) = (norm(family.before.norm, hidden)?, norm(name, width)?);
        let [first, last] = family.branch;
        Ok(Around {
            hidden,
            width,
            before: Steps { norm: before_norm, projection: before.map(|(_, projection)| projection) },
            behind: Steps { norm: behind_norm, projection: behind.map(|(_, projection)| projection) },
            transform: None,
            norms: [norm(first, hidden)?, norm(last, hidden)?],
            branch: None,
            identity_experts: 0,
        })
    }

    /// Returns the name of the norm behind the experts. A model of Kimi-K3 can do without it.
    fn norm_behind(&self, config: &ModelConfig, family: &Family, path: &str) -> Result<Option<&'static str>, Error> {
        const USED: &str = "latent_moe_use_norm";
        let Some(norm) = family.behind.norm.filter(|_| family.behind.projection.is_some()) else {
            return Ok(family.behind.norm);
        };
        let name = format!("{path}{norm}.weight");
        match (self.tensor(&name), config.get(USED).and_then(serde_json::Value::as_bool)) {
            (Some(_), Some(false)) => {
                let what = format!("{USED} is false, but this norm exists; export the model again");
                Err(Error::Invalid(what).at(self.place(&name)))
            }
            (None, None | Some(false)) => Ok(None),
            _ => Ok(Some(norm)),
        }
    }

    /// Loads the weights of a norm of `size` elements.
    fn norm(&self, config: &ModelConfig, module: &str, size: usize) -> Result<Norm, Error> {
        let name = format!("{module}.weight");
        if let Some(other) = self.names_under(&format!("{module}.")).find(|other| **other != name) {
            return Err(self.not_computed(other));
        }
        self.norm_with(config, &name, size, 1.0)
    }

    /// Loads a norm whose weights are a tensor times `factor`. The numbers are rows of `size` elements.
    ///
    /// # Errors
    /// Returns an error if the tensor is missing or wrong, or the configuration does not have the norm's epsilon.
    pub(super) fn norm_with(&self, config: &ModelConfig, name: &str, size: usize, factor: f64) -> Result<Norm, Error> {
        const EPSILON: &str = "rms_norm_eps";
        let weights = self.numbers(name, &[size], "[elements of a row]")?;
        self.check_finite(name, &weights, size)?;
        let epsilon = config.get(EPSILON).and_then(serde_json::Value::as_f64).ok_or_else(|| {
            Error::Missing { name: EPSILON.into(), remedy: DOWNLOAD.into() }.at(config.path().display())
        })?;
        if !(epsilon.is_finite() && epsilon >= 0.0) {
            let what = format!("{EPSILON} is {epsilon}; it must be finite and not negative");
            return Err(Error::Invalid(what).at(config.path().display()));
        }
        Ok(Norm { weights: weights.into_iter().map(|weight| f64::from(weight) * factor).collect(), epsilon })
    }
}
