//! The experts of a layer as weights that run. Unknown tensors of the block are refused, because they could change the
//! result.

use std::collections::{BTreeMap, BTreeSet};

use rayon::prelude::*;

use super::layer_tensors::Scope;
use super::linear::BIAS;
use super::model_config::ModelConfig;
use super::names::{self, Aside, Projection, Role};
use super::{Checkpoint, LayerTensors, QuantizedWeight, fused};
use crate::error::Error;
use crate::problem::{Expert, Op, Weights};

const DOWNLOAD: &str = "download the model again";

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

/// Kind of the projections of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    /// Experts that a router chooses, each in separate tensors.
    Routed,
    /// Experts that a router chooses, all in one tensor.
    Fused,
    /// A layer without experts, or the dense block beside the experts.
    Dense,
    /// Shared experts, which process every token.
    Shared,
}

impl Kind {
    fn of(expert: names::Expert) -> Self {
        match expert {
            names::Expert::Routed(_) => Self::Routed,
            names::Expert::Fused => Self::Fused,
            names::Expert::Dense => Self::Dense,
            names::Expert::Shared => Self::Shared,
        }
    }
}

/// Projections of one kind in one block of one layer.
#[derive(Debug)]
pub(super) struct Block<'n> {
    stack: &'n str,
    pub layer: usize,
    name: &'n str,
    pub kind: Kind,
    /// Numbers of the routed experts.
    numbers: BTreeSet<usize>,
    /// Per role: the module names before and after the number of the expert.
    modules: BTreeMap<Role, BTreeSet<(&'n str, &'n str)>>,
}

impl Block<'_> {
    /// Returns the modules of this role, one per expert.
    pub(super) fn modules(&self, role: Role) -> Vec<String> {
        let Some((before, after)) = self.modules.get(&role).and_then(BTreeSet::first) else { return Vec::new() };
        match self.kind {
            Kind::Routed => self.numbers.iter().map(|number| format!("{before}{number}{after}")).collect(),
            _ => vec![(*before).to_owned()],
        }
    }

    /// Number of routed experts.
    pub(super) fn numbers(&self) -> usize {
        self.numbers.len()
    }

    /// Returns the module of this role, with `*` for the number of the expert.
    pub(super) fn pattern(&self, role: Role) -> Option<String> {
        let (before, after) = self.modules.get(&role)?.first()?;
        Some(if self.kind == Kind::Routed { format!("{before}*{after}") } else { (*before).to_owned() })
    }

    /// Common prefix of all names in the layer's feed-forward block, including the dot: `model.layers.3.mlp.`
    pub(super) fn path(&self) -> String {
        let Self { stack, layer, name, .. } = self;
        if name.is_empty() { format!("{stack}{layer}.") } else { format!("{stack}{layer}.{name}.") }
    }

    /// Prefix of the names of all tensors of the decoder layer.
    pub(super) fn layer_path(&self) -> String {
        format!("{}{}.", self.stack, self.layer)
    }

    /// Name before the number of the layer.
    pub(super) fn stack(&self) -> &str {
        self.stack
    }

    /// Common prefix of the names that belong to this block alone.
    pub(super) fn prefix(&self) -> String {
        let Self { stack, layer, name, .. } = self;
        let first = || self.modules.values().flatten().next().map_or("", |(before, _)| before);
        match (name.is_empty(), self.kind) {
            (false, _) => format!("{stack}{layer}.{name}."),
            (true, Kind::Dense) => first().to_owned(),
            (true, Kind::Shared) => first().rsplit_once('.').map_or(String::new(), |(before, _)| format!("{before}.")),
            (true, Kind::Routed | Kind::Fused) => format!("{stack}{layer}.experts."),
        }
    }

    /// Returns `true` if a projection belongs to this block.
    pub(super) fn has(&self, projection: &Projection<'_>) -> bool {
        Kind::of(projection.expert) == self.kind
            && (projection.stack, projection.layer, projection.block) == (self.stack, self.layer, self.name)
            && self.modules.get(&projection.role).is_some_and(|modules| modules.contains(&projection.around_expert))
    }

    /// Returns the projections that an operation multiplies tokens by; gate and up can be one matrix.
    pub(super) fn roles_of(&self, op: Op) -> &'static [Role] {
        match op {
            Op::Gated if self.modules.contains_key(&Role::GateUp) => &[Role::GateUp],
            Op::Gated => &[Role::Gate, Role::Up],
            Op::Plain => &[Role::Down],
        }
    }

    /// Refuses a block with a missing expert, or with two names for one projection.
    pub(super) fn check(&self) -> Result<(), Error> {
        // The search ends after at most as many steps as there are experts.
        if let Some(missing) = (0..self.numbers.len()).find(|expert| !self.numbers.contains(expert)) {
            let name = format!("expert {missing} of layer {}", self.layer);
            return Err(Error::Missing { name, remedy: DOWNLOAD.into() });
        }
        for modules in self.modules.values() {
            if let [(one, _), (other, _), ..] = modules.iter().collect::<Vec<_>>()[..] {
                let what = format!("{one}… and {other}… are two names for one projection; export the model again");
                return Err(Error::Invalid(what));
            }
        }
        Ok(())
    }
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
        let tensors = self.account(&Scope { blocks: vec![&block], roles, router: None })?;
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

    /// Returns the error for a layer that does not exist, or that has no supported block.
    pub(super) fn no_such_block(&self, layer: usize) -> Error {
        let layers = self.layers();
        let remedy = if layers.contains(&layer) {
            "the layer needs experts in separate tensors (mlp.experts.E.gate_proj, block_sparse_moe.experts.E.w1) or a dense \
             mlp.gate_proj. For fused NVFP4 experts use --op moe; split other fused experts with `nvfp4 quantize`"
                .to_owned()
        } else if layers.is_empty() {
            "the model needs tensors named model.layers.L.…".to_owned()
        } else {
            format!("the model has layers {}", ranges(&layers))
        };
        Error::Missing { name: format!("a feed-forward block of layer {layer}"), remedy }
    }

    /// Returns the feed-forward blocks of the language model, or of layer `only`, in order.
    pub(super) fn blocks(&self, only: Option<usize>) -> Vec<Block<'_>> {
        let mut blocks: BTreeMap<_, Block<'_>> = BTreeMap::new();
        for name in self.names() {
            if only.is_some_and(|only| names::layer_of(name).is_none_or(|(_, layer)| layer != only)) {
                continue;
            }
            let Some(Projection { stack, layer, block, expert, role, around_expert, .. }) = Projection::parse(name)
            else {
                continue;
            };
            if Aside::of(stack).or_else(|| Aside::of(block)).is_some() || !self.is_in_stack(stack) {
                continue;
            }
            let kind = Kind::of(expert);
            let block = blocks.entry((layer, stack, block, kind)).or_insert_with(|| Block {
                stack,
                layer,
                name: block,
                kind,
                numbers: BTreeSet::new(),
                modules: BTreeMap::new(),
            });
            if let names::Expert::Routed(number) = expert {
                block.numbers.insert(number);
            }
            block.modules.entry(role).or_default().insert(around_expert);
        }
        blocks.into_values().collect()
    }

    /// Returns the numbers of the language model's layers.
    pub(super) fn layers(&self) -> BTreeSet<usize> {
        let of_language = |&(stack, _): &(&str, usize)| Aside::of(stack).is_none() && self.is_in_stack(stack);
        self.names().filter_map(names::layer_of).filter(of_language).map(|(_, layer)| layer).collect()
    }

    /// Returns `true` if a tensor is a part of a block's projection that is computed. `biases`: biases are computed.
    pub(super) fn is_part(&self, block: &Block<'_>, projection: &Projection<'_>, biases: bool) -> bool {
        let Projection { module, part, .. } = *projection;
        self.is_computed(module, part) && block.kind != Kind::Fused
            || block.kind == Kind::Fused && fused::is_part(part)
            || biases && if block.kind == Kind::Fused { fused::BIASES.contains(&part) } else { part == BIAS }
    }
}

fn lacks_a_role(block: &Block<'_>, roles: &[Role]) -> Error {
    let there: Vec<_> = block.modules.keys().filter_map(|&role| block.pattern(role)).collect();
    let there = there.join(", ");
    let what = if roles.contains(&Role::Gate) && !block.modules.contains_key(&Role::Gate) {
        format!(
            "layer {} has no gate projection (found: {there}), which --op gated needs; use --op plain for down projections",
            block.layer
        )
    } else {
        format!("layer {} has no projection for this --op (found: {there}); export the model again", block.layer)
    };
    Error::NotComputed(what)
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

/// Formats numbers as ranges: `0-3, 5`.
pub(super) fn ranges(numbers: &BTreeSet<usize>) -> String {
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for &number in numbers {
        match ranges.last_mut() {
            Some((_, last)) if number - *last == 1 => *last = number,
            _ => ranges.push((number, number)),
        }
    }
    let words =
        ranges.iter().map(|(first, last)| if first == last { format!("{first}") } else { format!("{first}-{last}") });
    words.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_printed_as_ranges() {
        assert_eq!(ranges(&[0, 1, 2, 5, 7, 8].into()), "0-2, 5, 7-8");
        assert_eq!(ranges(&[usize::MAX].into()), usize::MAX.to_string());
    }
}
