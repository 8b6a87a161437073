//! The experts of a layer as weights that run. What is not understood of their block is refused: it would change what they
//! compute.

use std::collections::{BTreeMap, BTreeSet};

use rayon::prelude::*;

use super::linear::BIAS;
use super::model_config::ModelConfig;
use super::moe::{FUSED_BIASES, FUSED_DIVISORS, FUSED_FACTORS, FUSED_SCALES, FUSED_VALUES};
use super::names::{self, Aside, Projection, Role};
use super::{Checkpoint, QuantizedWeight};
use crate::error::Error;
use crate::problem::{Expert, Op, Weights};

/// What stands behind the module of fused experts in the names of the scales of their activations.
const INPUT_SCALES: [&str; 2] = ["_input_scale", ".input_global_scale"];

const DOWNLOAD: &str = "download the model again";

/// The weights of a layer, in place in the mapped files.
#[derive(Clone, Debug)]
pub struct Layer<'a> {
    /// The experts; a dense layer is one.
    pub weights: Weights<'a>,
    /// For each expert the global scale that its activations were calibrated for, where the model has one: the larger of
    /// gate's and up's, which read the same activations.
    pub input_scales: Vec<Option<f32>>,
    /// What the weights are called, with `*` for the number of the expert: `model.layers.3.mlp.experts.*.down_proj`.
    pub modules: Vec<String>,
}

/// Whose projections a block has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    /// Experts that a router chooses, each with tensors of its own.
    Routed,
    /// The same in one tensor.
    Fused,
    /// A layer without experts, or the block beside them.
    Dense,
    /// Experts that every token passes.
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
    /// The numbers of routed experts.
    numbers: BTreeSet<usize>,
    /// What stands before and behind the number of the expert in the names of the modules of each role.
    modules: BTreeMap<Role, BTreeSet<(&'n str, &'n str)>>,
}

impl Block<'_> {
    /// For each expert, the module of this role.
    pub(super) fn modules(&self, role: Role) -> Vec<String> {
        let Some((before, after)) = self.modules.get(&role).and_then(BTreeSet::first) else { return Vec::new() };
        match self.kind {
            Kind::Routed => self.numbers.iter().map(|number| format!("{before}{number}{after}")).collect(),
            _ => vec![(*before).to_owned()],
        }
    }

    /// How many routed experts there are.
    pub(super) fn numbers(&self) -> usize {
        self.numbers.len()
    }

    /// The module of this role with `*` for the number of the expert.
    pub(super) fn pattern(&self, role: Role) -> Option<String> {
        let (before, after) = self.modules.get(&role)?.first()?;
        Some(if self.kind == Kind::Routed { format!("{before}*{after}") } else { (*before).to_owned() })
    }

    /// What stands before all that belongs to its layer's feed-forward, with a dot: `model.layers.3.mlp.`
    pub(super) fn path(&self) -> String {
        let Self { stack, layer, name, .. } = self;
        if name.is_empty() { format!("{stack}{layer}.") } else { format!("{stack}{layer}.{name}.") }
    }

    /// What stands before all that belongs to it alone.
    fn prefix(&self) -> String {
        let Self { stack, layer, name, .. } = self;
        match (name.is_empty(), self.kind) {
            (false, _) => format!("{stack}{layer}.{name}."),
            (true, Kind::Dense) => self.modules.values().flatten().next().map_or("", |(before, _)| before).to_owned(),
            (true, _) => format!("{stack}{layer}.experts."),
        }
    }

    /// Refuses what no layer is: an expert that is missing, a projection under two names.
    pub(super) fn check(&self) -> Result<(), Error> {
        // No more numbers are looked at than there are experts.
        if let Some(missing) = (0..self.numbers.len()).find(|expert| !self.numbers.contains(expert)) {
            let name = format!("expert {missing} of layer {}", self.layer);
            return Err(Error::Missing { name, remedy: DOWNLOAD.into() });
        }
        for modules in self.modules.values() {
            if let [(one, _), (other, _), ..] = modules.iter().collect::<Vec<_>>()[..] {
                let what = format!("{one}… and {other}… are the same projection; export the model again");
                return Err(Error::Invalid(what));
            }
        }
        Ok(())
    }
}

impl Checkpoint {
    /// The experts of a layer: gate and up projections for [`Op::Gated`], down projections for [`Op::Plain`]. A layer with
    /// routed experts is those; one without is one expert.
    ///
    /// # Errors
    /// If there is no such layer (the message says which there are), an expert or a part of one is missing, a tensor is
    /// wrong, the block has a tensor that would change the result and is not computed (a bias, a scale for the activations, one
    /// that is unknown), or the model's `config.json` asks for another activation than SiLU.
    pub fn layer(&self, layer: usize, op: Op) -> Result<Layer<'_>, Error> {
        let at = |error: Error| error.at(self.path().display());
        let block = self.feed_forward(layer).map_err(at)?;
        block.check().map_err(at)?;
        let roles = roles_of(op);
        let modules = roles.iter().map(|&role| block.pattern(role)).collect::<Option<Vec<_>>>();
        let modules = modules.ok_or_else(|| at(lacks_a_role(&block, roles)))?;
        if let Some(name) = self.not_understood(&block, roles, false).first() {
            return Err(self.not_computed(name));
        }
        if let Some(config) = ModelConfig::beside(self)? {
            config.check_transforms()?;
            if op == Op::Gated {
                config.check_activation()?;
            }
        }
        let of_roles: Vec<Vec<String>> = roles.iter().map(|&role| block.modules(role)).collect();
        let experts = (0..of_roles[0].len()).into_par_iter().map(|expert| {
            let projections: Result<Vec<_>, _> =
                of_roles.iter().map(|modules| self.quantized(&modules[expert])).collect();
            projections.map(as_expert)
        });
        let experts = experts.collect::<Result<Vec<_>, _>>()?;
        let (experts, input_scales) = experts.into_iter().unzip();
        let place = |error: Error| error.at(format_args!("{}: layer {layer}", self.path().display()));
        Ok(Layer { weights: Weights::new(op, experts).map_err(place)?, input_scales, modules })
    }

    /// One weight as a layer of one expert, for [`Op::Plain`].
    ///
    /// # Errors
    /// If a part of it is missing or wrong, or it has a part that is not computed.
    pub fn single(&self, module: &str) -> Result<Layer<'_>, Error> {
        if let Some(part) = self.parts_not_computed(module).first() {
            return Err(self.not_computed(part));
        }
        let QuantizedWeight { matrix, input_scale, .. } = self.quantized(module)?;
        let weights = Weights::new(Op::Plain, vec![Expert::Plain(matrix)]).map_err(|error| error.at(module))?;
        Ok(Layer { weights, input_scales: vec![input_scale], modules: vec![module.to_owned()] })
    }

    /// The block of a layer that runs: its routed experts, or else its one dense block.
    fn feed_forward(&self, layer: usize) -> Result<Block<'_>, Error> {
        let blocks = self.blocks(Some(layer));
        let has = |kind| blocks.iter().any(|block| block.kind == kind);
        let kind = if has(Kind::Routed) { Kind::Routed } else { Kind::Dense };
        if has(kind) && !(kind == Kind::Dense && has(Kind::Fused)) {
            let mut chosen: Vec<_> = blocks.into_iter().filter(|block| block.kind == kind).collect();
            if let [one, other, ..] = &chosen[..] {
                let what = format!(
                    "layer {layer} has two blocks, {} and {}; which to run is not known",
                    one.prefix(),
                    other.prefix()
                );
                return Err(Error::Invalid(what));
            }
            return Ok(chosen.remove(0));
        }
        Err(self.no_such_block(layer))
    }

    /// Says that a layer has no block that is read, or that there is no such layer.
    pub(super) fn no_such_block(&self, layer: usize) -> Error {
        let layers = self.layers();
        let remedy = if layers.contains(&layer) {
            "it needs experts stored apart (mlp.experts.E.gate_proj, block_sparse_moe.experts.E.w1) or a dense \
             mlp.gate_proj; fused experts are not read here: --op moe reads those in NVFP4, and `nvfp4 quantize` takes \
             others apart"
                .to_owned()
        } else if layers.is_empty() {
            "give a model with tensors named model.layers.L.…".to_owned()
        } else {
            format!("there are layers {}", ranges(&layers))
        };
        Error::Missing { name: format!("a feed-forward block of layer {layer}"), remedy }
    }

    /// The feed-forward blocks of the language model, or those of one layer of it, in order.
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
            if Aside::of(stack).or_else(|| Aside::of(block)).is_some() {
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

    /// The numbers of the language model's layers.
    pub(super) fn layers(&self) -> BTreeSet<usize> {
        let of_language = |&(stack, _): &(&str, usize)| Aside::of(stack).is_none();
        self.names().filter_map(names::layer_of).filter(of_language).map(|(_, layer)| layer).collect()
    }

    /// The tensors of a block that change what is computed of these roles, or that nobody knows. Biases are computed or not.
    pub(super) fn not_understood<'a>(&'a self, block: &Block<'_>, roles: &[Role], biases: bool) -> Vec<&'a str> {
        let is_computed = |name: &str| match Projection::parse(name) {
            Some(projection) if Kind::of(projection.expert) == block.kind && projection.block == block.name => {
                !roles.contains(&projection.role)
                    || self.is_computed(projection.module, projection.part)
                    || block.kind == Kind::Fused && is_fused_part(projection.part)
                    || biases && is_bias(block.kind, projection.part)
            }
            // Experts of another kind stand beside these. Parts of fused ones, such as their biases, belong to these.
            Some(projection) => projection.expert != names::Expert::Fused,
            None => Aside::of(name).is_some() || name.split('.').any(names::is_shared),
        };
        let prefix = block.prefix();
        self.names_under(&prefix).filter(|name| !is_computed(name)).collect()
    }

    /// The refusal of a tensor that is there and not computed.
    pub(super) fn not_computed(&self, name: &str) -> Error {
        let what = match name.rsplit(['.', '_']).next() {
            Some("bias") => "a bias, which is not added",
            Some("scale") if name.ends_with("pre_quant_scale") => {
                "a scale of the activations (AWQ), which is not applied"
            }
            _ => "a tensor of unknown meaning, which is not computed",
        };
        let what = format!("{what}: the result would not be the model's; export the model without it");
        Error::NotComputed(what).at(self.place(name))
    }
}

/// Whether this stands behind the module of fused experts in the name of one of the tensors that [`Checkpoint::moe_layer`] reads, or
/// in that of an input scale.
fn is_fused_part(part: &str) -> bool {
    FUSED_VALUES
        .iter()
        .chain(&FUSED_SCALES)
        .chain(&FUSED_DIVISORS)
        .chain(&FUSED_FACTORS)
        .chain(&INPUT_SCALES)
        .any(|known| *known == part)
}

/// Whether this stands behind a module in the name of its bias.
fn is_bias(kind: Kind, part: &str) -> bool {
    if kind == Kind::Fused { FUSED_BIASES.contains(&part) } else { part == BIAS }
}

/// What an operation multiplies tokens with.
pub(super) fn roles_of(op: Op) -> &'static [Role] {
    match op {
        Op::Gated => &[Role::Gate, Role::Up],
        Op::Plain => &[Role::Down],
    }
}

fn lacks_a_role(block: &Block<'_>, roles: &[Role]) -> Error {
    let there: Vec<_> = block.modules.keys().filter_map(|&role| block.pattern(role)).collect();
    let there = there.join(", ");
    let what = if roles.contains(&Role::Gate) && !block.modules.contains_key(&Role::Gate) {
        format!(
            "layer {} has no gate projection ({there}), so there is nothing gated to compute; --op plain runs down projections",
            block.layer
        )
    } else {
        format!("layer {} has no such projection ({there}); export the model again", block.layer)
    };
    Error::NotComputed(what)
}

/// Gate and up, or down, as an expert with its input scale.
fn as_expert(mut projections: Vec<QuantizedWeight<'_>>) -> (Expert<'_>, Option<f32>) {
    let input_scale = projections.iter().filter_map(|projection| projection.input_scale).reduce(f32::max);
    let last = projections.pop().expect("one of each role").matrix;
    let expert = match projections.pop() {
        Some(gate) => Expert::Gated { gate: gate.matrix, up: last },
        None => Expert::Plain(last),
    };
    (expert, input_scale)
}

/// Numbers in words: `0-3, 5`.
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
    fn numbers_are_told_as_ranges() {
        assert_eq!(ranges(&[0, 1, 2, 5, 7, 8].into()), "0-2, 5, 7-8");
        assert_eq!(ranges(&[usize::MAX].into()), usize::MAX.to_string());
    }
}
