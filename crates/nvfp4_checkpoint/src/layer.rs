//! The experts of a layer as weights that run. Unknown tensors of the block are refused, because they could change the
//! result.

use std::collections::BTreeSet;

use rayon::prelude::*;

use super::block::{Block, Kind, lacks_a_role, ranges};
use super::convert::weights::PRE_QUANT_SCALE;
use super::layer_tensors::Scope;
use super::model_config::ModelConfig;
use super::names::{BIAS, Projection, Role};
use super::{Checkpoint, Dtype, Format, LayerTensors, QuantizedWeight, floats, fused};
use nvfp4_core::Error;
use nvfp4_core::problem::{Expert, Op, Weights};

/// Weights of a layer, in place in the mapped files.
#[derive(Clone, Debug)]
pub struct Layer<'a> {
    /// Experts; a dense layer counts as one expert.
    pub weights: Weights<'a>,
    /// Global scale that each expert's activations were calibrated for; `None` if the model has none. The larger of the
    /// scales of gate and up, which read the same activations.
    pub input_scales: Vec<Option<f32>>,
    /// Module names, with `*` for the number of the expert: `model.layers.3.mlp.experts.*.down_proj`.
    pub modules: Vec<String>,
    /// Tensors of the layer that are used, and tensors that are left.
    pub tensors: LayerTensors,
}

impl Checkpoint {
    /// Loads the experts of a layer: gate and up projections for [`Op::Gated`], down projections for [`Op::Plain`]. A
    /// layer without routed experts counts as one expert.
    ///
    /// # Errors
    /// Returns an error if
    /// - the layer does not exist (the message lists the layers),
    /// - an expert or a part of an expert is missing, or a tensor is wrong,
    /// - the block has a tensor that changes the result and is not computed: a bias, a scale of the activations, or an
    ///   unknown tensor,
    /// - the model's `config.json` names an activation other than SiLU.
    pub fn layer(&self, layer: usize, op: Op) -> Result<Layer<'_>, Error> {
        let at = |error: Error| error.at(self.path().display());
        let block = self.feed_forward(layer).map_err(at)?;
        block.check().map_err(at)?;
        let roles = block.roles_of(op);
        let modules = roles.iter().map(|&role| block.pattern(role)).collect::<Option<Vec<_>>>();
        let modules = modules.ok_or_else(|| at(lacks_a_role(&block, roles)))?;
        self.check_forms(&block, roles, false)?;
        let tensors = self.account(&Scope { blocks: vec![&block], roles, router: None, apart: &[], on_host: None })?;
        if let Some(config) = ModelConfig::beside(self)? {
            config.check_transforms()?;
            if op == Op::Gated {
                config.check_activation()?;
            }
        }
        let of_roles: Vec<Vec<String>> = roles.iter().map(|&role| block.modules(role)).collect();
        let experts = (0..of_roles[0].len()).into_par_iter().map(|expert| {
            let projections: Result<Vec<_>, _> = match roles {
                [Role::GateUp] => {
                    let module = &of_roles[0][expert];
                    self.input_scale(module).and_then(|_| self.halves(module)).map(Vec::from)
                }
                _ => of_roles.iter().map(|modules| self.quantized(&modules[expert])).collect(),
            };
            projections.map(as_expert)
        });
        let experts = experts.collect::<Result<Vec<_>, _>>()?;
        let (experts, input_scales) = experts.into_iter().unzip();
        let place = |error: Error| error.at(format_args!("{}: layer {layer}", self.path().display()));
        Ok(Layer { weights: Weights::new(op, experts).map_err(place)?, input_scales, modules, tensors })
    }

    /// Loads one weight as a layer of one expert, for [`Op::Plain`].
    ///
    /// # Errors
    /// Returns an error if a part is missing or wrong, or a part is not computed.
    pub fn single(&self, module: &str) -> Result<Layer<'_>, Error> {
        if let Some(part) = self.parts_not_computed(module).first() {
            return Err(self.not_computed(part));
        }
        let QuantizedWeight { matrix, input_scale, .. } = self.quantized(module)?;
        let weights = Weights::new(Op::Plain, vec![Expert::Plain(matrix)]).map_err(|error| error.at(module))?;
        let tensors = LayerTensors { used: self.parts_of(module).map(str::to_owned).collect(), left: Vec::new() };
        Ok(Layer { weights, input_scales: vec![input_scale], modules: vec![module.to_owned()], tensors })
    }

    /// Refuses a block with a projection of these roles in floats or FP8. `is_whole`: the operation computes whole experts,
    /// also in MXFP4.
    ///
    /// # Errors
    /// Returns an error with the first such projection, and with the layers that have none.
    pub(super) fn check_forms(&self, block: &Block<'_>, roles: &[Role], is_whole: bool) -> Result<(), Error> {
        let modules = |block: &Block<'_>| roles.iter().flat_map(|&role| block.modules(role)).collect::<Vec<_>>();
        let in_other_form = |module: &String| {
            let names = [".weight", ""].map(|part| format!("{module}{part}"));
            let mut found = names.into_iter().filter_map(|name| self.tensor(&name).map(|tensor| (name, tensor.dtype)));
            found.find(|(_, dtype)| floats::DTYPES.contains(dtype) || *dtype == Dtype::F8_E4M3)
        };
        let Some((name, dtype)) = modules(block).iter().find_map(in_other_form) else { return Ok(()) };
        let runs = |module: &String| {
            let globals = [Format::ModelOpt, Format::CompressedTensors].map(Format::global);
            let mut globals = globals.into_iter().map(|global| self.tensor(&format!("{module}{global}")));
            let is_fp4 = self.is_fused(module)
                || globals.any(|global| global.is_some())
                || is_whole && self.mxfp4_values(module).is_some();
            is_fp4 && in_other_form(module).is_none()
        };
        let is_alike = |other: &Block<'_>| {
            let both_routed = [block, other].iter().all(|block| matches!(block.kind, Kind::Routed | Kind::Fused));
            let modules = modules(other);
            (other.kind == block.kind || is_whole && both_routed) && !modules.is_empty() && modules.iter().all(runs)
        };
        let layers: BTreeSet<usize> = self.blocks(None).into_iter().filter(is_alike).map(|block| block.layer).collect();
        let runs = if is_whole { "NVFP4 or MXFP4 experts" } else { "NVFP4 weights" };
        let mut what = format!("its dtype is {dtype}, but only {runs} run; quantize the model with `nvfp4 quantize`");
        if !layers.is_empty() {
            what += &format!(", or use a layer that has them: {}", ranges(&layers));
        }
        Err(Error::NotComputed(what).at(self.place(&name)))
    }

    /// Returns the block of a layer that runs: its routed experts, or else its only dense block.
    fn feed_forward(&self, layer: usize) -> Result<Block<'_>, Error> {
        let blocks = self.blocks(Some(layer));
        let has = |kind| blocks.iter().any(|block| block.kind == kind);
        let kind = if has(Kind::Routed) { Kind::Routed } else { Kind::Dense };
        if has(kind) && !(kind == Kind::Dense && has(Kind::Fused)) {
            let mut chosen: Vec<_> = blocks.into_iter().filter(|block| block.kind == kind).collect();
            if let [one, other, ..] = &chosen[..] {
                let what = format!(
                    "layer {layer} has two blocks, {} and {}; choose a stack of layers with --stack, or export the model with one \
                     of them",
                    one.prefix(),
                    other.prefix()
                );
                return Err(Error::Invalid(what));
            }
            return Ok(chosen.remove(0));
        }
        Err(self.no_such_block(layer))
    }

    /// Returns `true` if a tensor is a part of a block's projection that is computed. `is_whole`: the operation
    /// computes whole experts, with biases and transforms of the tokens, also in MXFP4.
    pub(super) fn is_part(&self, block: &Block<'_>, projection: &Projection<'_>, is_whole: bool) -> bool {
        let Projection { module, part, .. } = *projection;
        let is_matrix = self.is_input_matrix(&format!("{module}{part}"));
        self.is_computed(module, part) && block.kind != Kind::Fused
            || block.kind == Kind::Fused && fused::is_part(part)
            || is_whole && self.is_mxfp4_part(module, part)
            || is_whole && block.kind != Kind::Fused && (part == PRE_QUANT_SCALE || is_matrix)
            || is_whole && if block.kind == Kind::Fused { fused::BIASES.contains(&part) } else { part == BIAS }
    }
}

/// Builds an expert from gate and up or from down; returns it with its input scale.
fn as_expert(mut projections: Vec<QuantizedWeight<'_>>) -> (Expert<'_>, Option<f32>) {
    let input_scale = projections.iter().filter_map(|projection| projection.input_scale).reduce(f32::max);
    let last = projections.pop().expect("one projection per role").matrix;
    let expert = match projections.pop() {
        Some(gate) => Expert::Gated { gate: gate.matrix, up: last },
        None => Expert::Plain(last),
    };
    (expert, input_scale)
}
