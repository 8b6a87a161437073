//! Input scales of the experts of a layer: the global scales that their NVFP4 tokens were calibrated for. A layer has
//! all of them, none, or a fault that is said: an incomplete set is never dropped in silence.

use super::Checkpoint;
use super::block::{Block, Kind};
use super::names::Role;
use nvfp4_core::Error;
use nvfp4_core::fp4::InputScales;
use nvfp4_core::moe::MoeWeights;

/// Input scale of a projection of an expert.
pub(super) struct InputScale {
    /// Number of the expert; the shared expert follows the last routed expert.
    pub expert: usize,
    /// Name of the projection, for messages.
    pub place: String,
    /// `None`: the model has none.
    pub value: Result<Option<f32>, Error>,
}

impl Checkpoint {
    /// Adds the input scales of a layer's blocks to its weights. `fp8_tokens`: the model's algorithm, if its scales are
    /// for FP8 tokens.
    pub(super) fn with_input_scales<'a>(
        &self,
        weights: MoeWeights<'a>,
        routed: &Block<'_>,
        shared: Option<&Block<'_>>,
        fp8_tokens: Option<&str>,
    ) -> Result<MoeWeights<'a>, Error> {
        let experts = weights.experts().len();
        let count = experts + usize::from(shared.is_some());
        let of = |roles: &[Role]| {
            let of_routed = roles.iter().flat_map(|&role| self.input_scales_of(routed, role, 0, experts));
            let of_shared = shared.into_iter().flat_map(|shared| {
                roles.iter().flat_map(|&role| self.input_scales_of(shared, role, experts, 1)).collect::<Vec<_>>()
            });
            of_routed.chain(of_shared).collect::<Vec<_>>()
        };
        let (gate_up, down) = (of(&[Role::Gate, Role::Up, Role::GateUp]), of(&[Role::Down]));
        if gate_up.iter().chain(&down).all(|scale| matches!(scale.value, Ok(None))) {
            return Ok(weights);
        }
        if let Some(algorithm) = fp8_tokens {
            return Ok(weights.without_input_scales(of_fp8_tokens(algorithm)));
        }
        if let Some(fault) = fault(gate_up.iter().chain(&down)) {
            return Ok(weights.without_input_scales(fault));
        }
        // Gate and up read the same tokens.
        let [gate_up, down] = [gate_up, down].map(|scales| largest(&scales, count));
        let scales = gate_up.into_iter().zip(down).map(|(gate_up, down)| InputScales { gate_up, down });
        weights.with_input_scales(scales.collect())
    }

    /// Returns the input scales of a block's projections of a role, one or more per expert.
    fn input_scales_of(&self, block: &Block<'_>, role: Role, first: usize, experts: usize) -> Vec<InputScale> {
        let modules = block.modules(role);
        if let (Kind::Fused, Some(module)) = (block.kind, modules.first()) {
            return self.fused_input_scales(module, experts, if role == Role::GateUp { 2 } else { 1 });
        }
        let scale = |(index, module): (usize, String)| {
            let value = self.input_scale(&module);
            InputScale { expert: first + index, place: module, value }
        };
        modules.into_iter().enumerate().map(scale).collect()
    }
}

/// Returns why the input scales of a model with FP8 tokens cannot be used.
pub(super) fn of_fp8_tokens(algorithm: &str) -> String {
    format!("the input scales of {algorithm} are for FP8 tokens")
}

/// Returns why the scales cannot be used, if one is missing or wrong.
fn fault<'s>(scales: impl Iterator<Item = &'s InputScale> + Clone) -> Option<String> {
    if let Some(error) = scales.clone().find_map(|scale| scale.value.as_ref().err()) {
        return Some(error.to_string());
    }
    let missing = scales.clone().filter(|scale| matches!(scale.value, Ok(None)));
    let first = missing.clone().next()?;
    let (count, all) = (missing.count(), scales.count());
    Some(format!("{count} of {all} projections have no input scale, starting with {}", first.place))
}

/// Returns the largest scale of each expert.
fn largest(scales: &[InputScale], experts: usize) -> Vec<f32> {
    let mut largest = vec![0.0; experts];
    for scale in scales {
        if let Ok(Some(value)) = scale.value {
            largest[scale.expert] = f32::max(largest[scale.expert], value);
        }
    }
    largest
}
