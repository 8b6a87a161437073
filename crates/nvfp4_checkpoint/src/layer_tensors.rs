//! Accounts for every tensor of a decoder layer, so that no operation silently computes another layer. A tensor is used,
//! left because it does not belong to the operation, or refused because it changes the result and is not computed.

use std::collections::BTreeSet;

use super::block::Block;
use super::names::{self, Aside, Projection, Role, any_expert, below_layer, natural};
use super::{Checkpoint, around};
use nvfp4_core::Error;

/// Tensors of a decoder layer, with `*` for the number of an expert.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LayerTensors {
    /// Tensors that the operation computes with.
    pub used: Vec<String>,
    /// Tensors that the operation leaves: attention, norms, and projections of other operations.
    pub left: Vec<String>,
}

/// What an operation computes of a decoder layer.
pub(super) struct Scope<'s> {
    /// Blocks whose projections are computed.
    pub blocks: Vec<&'s Block<'s>>,
    /// Projections that are computed.
    pub roles: &'s [Role],
    /// `None`: single projections are computed. Otherwise the whole block is computed, with these tensors of the
    /// router, of the projections around the experts and of `on_host`, so everything in the layer that adds to the block's
    /// output matters.
    pub router: Option<Vec<&'s str>>,
    /// Modules below the layer whose output is not added to the block's.
    pub apart: &'s [&'s str],
    /// Block whose projections the host computes, in any form. Their tensors are in `router`.
    pub on_host: Option<&'s Block<'s>>,
}

enum Fate {
    Used,
    Left,
    Refused,
}

impl Checkpoint {
    /// Returns the tensors of a layer that the operation uses and leaves.
    ///
    /// # Errors
    /// Returns an error for the first tensor that changes the result and is not computed.
    pub(super) fn account(&self, scope: &Scope<'_>) -> Result<LayerTensors, Error> {
        if let Some(name) = self.refused(scope).first() {
            return Err(self.not_computed(name));
        }
        let (mut used, mut left) = (BTreeSet::new(), BTreeSet::new());
        for name in self.names_of_layer(scope) {
            match self.fate(name, scope) {
                Fate::Used => used.insert(any_expert(name)),
                _ => left.insert(any_expert(name)),
            };
        }
        let in_order = |names: BTreeSet<String>| {
            let mut names: Vec<_> = names.into_iter().collect();
            names.sort_by_cached_key(|name| natural(name));
            names
        };
        Ok(LayerTensors { used: in_order(used), left: in_order(left) })
    }

    /// Returns the tensors that change the operation's result and are not computed, and unknown tensors.
    pub(super) fn refused(&self, scope: &Scope<'_>) -> Vec<&str> {
        self.names_of_layer(scope).filter(|name| matches!(self.fate(name, scope), Fate::Refused)).collect()
    }

    fn names_of_layer<'a>(&'a self, scope: &Scope<'_>) -> impl Iterator<Item = &'a str> + use<'a> {
        let prefix = scope.blocks.first().map(|block| block.layer_path()).unwrap_or_default();
        let names: Vec<_> = self.names_under(&prefix).collect();
        names.into_iter()
    }

    fn fate(&self, name: &str, scope: &Scope<'_>) -> Fate {
        let computed = |is_computed| if is_computed { Fate::Used } else { Fate::Refused };
        let is_whole = scope.router.is_some();
        if scope.router.iter().flatten().any(|known| *known == name) {
            return Fate::Used;
        }
        if below_layer(name).is_some_and(|part| names::is_no_feed_forward(part) || scope.apart.contains(&part)) {
            return Fate::Left;
        }
        let in_block = scope.blocks.iter().any(|block| name.starts_with(&block.prefix()));
        match Projection::parse(name) {
            Some(projection) => match scope.blocks.iter().find(|block| block.has(&projection)) {
                Some(block) if scope.on_host.is_some_and(|on_host| std::ptr::eq(on_host, *block)) => Fate::Refused,
                Some(block) if scope.roles.contains(&projection.role) => {
                    computed(self.is_part(block, &projection, is_whole))
                }
                Some(_) => Fate::Left,
                // A shared expert or a dense branch adds to the output. Parts of fused experts belong to the block.
                None if is_whole || in_block && projection.expert == names::Expert::Fused => Fate::Refused,
                None => Fate::Left,
            },
            None => match Aside::of(name) {
                Some(Aside::Router) if is_whole => Fate::Refused,
                // Layers that draft tokens, and towers, have blocks of their own.
                Some(Aside::Draft | Aside::Tower) if is_whole && in_block => Fate::Refused,
                Some(_) => Fate::Left,
                None if in_block && !is_whole && name.split('.').any(names::is_shared) => Fate::Left,
                None if in_block && !is_whole && around::is_part(name) => Fate::Left,
                None if in_block => Fate::Refused,
                // A vector beside the block cannot be a branch with an output of its own.
                None if is_whole && self.tensor(name).is_some_and(|tensor| tensor.shape.len() > 1) => Fate::Refused,
                None => Fate::Left,
            },
        }
    }

    /// Returns the error for a tensor that is present but not computed.
    pub(super) fn not_computed(&self, name: &str) -> Error {
        const WITHOUT: &str = "export the model without this tensor";
        const FOLDED: &str = "`nvfp4 dequantize` multiplies it into the weight, which `nvfp4 quantize` then quantizes";
        const APART: &str = "use --op gated and plain for the projections of the experts";
        const LATENT: &str = "a known model has two projections, such as fc1_latent_proj and fc2_latent_proj: use --op gated and plain \
                              for the projections of the experts";
        let expert = Projection::parse(name).map(|projection| projection.expert);
        let (what, remedy) = match name.rsplit(['.', '_']).next() {
            Some("bias") if Aside::of(name).is_none() => ("this bias is not computed", WITHOUT),
            _ if name.ends_with("pre_quant_scale") => {
                ("this scale of the activations (NVFP4_AWQ) is not computed", FOLDED)
            }
            _ if around::is_projection(name) => {
                ("experts in a latent space behind this tensor alone are not computed", LATENT)
            }
            _ if Aside::of(name) == Some(Aside::Router) => ("this part of the router is not computed", APART),
            _ => match expert {
                Some(names::Expert::Dense) => ("this dense branch beside the experts is not computed", APART),
                Some(names::Expert::Shared) => ("this part of the shared expert is not computed", APART),
                _ => ("this tensor is unknown and is not computed", WITHOUT),
            },
        };
        let what = format!("{what}, so the result would be wrong; {remedy}");
        Error::NotComputed(what).at(self.place(name))
    }
}
