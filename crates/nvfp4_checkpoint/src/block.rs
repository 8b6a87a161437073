//! Feed-forward blocks of a model's layers, found by the names of their tensors.

use std::collections::{BTreeMap, BTreeSet};

use super::Checkpoint;
use super::names::{self, Aside, Projection, Role};
use nvfp4_core::Error;
use nvfp4_core::moe::Activation;
use nvfp4_core::problem::Op;

/// Remedy for a model with missing parts.
pub(super) const DOWNLOAD: &str = "download the model again";

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

    /// Whether the block has projections of this role.
    pub(super) fn has_role(&self, role: Role) -> bool {
        self.modules.contains_key(&role)
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

    /// Checks that every expert of a block in separate tensors has the projections that the activation needs.
    pub(super) fn check_roles(&self, activation: Activation) -> Result<(), Error> {
        let [merged, experts] = [Role::GateUp, Role::Down].map(|role| self.modules(role).len());
        for (what, role) in [("gate", Role::Gate), ("up", Role::Up), ("down", Role::Down)] {
            let is_merged = role != Role::Down && activation.has_gate() && merged == experts;
            let has_none = is_merged || role == Role::Gate && !activation.has_gate();
            let expected = if has_none { 0 } else { experts };
            let found = self.modules(role).len();
            if found != expected || experts == 0 {
                let expected = expected.max(usize::from(!has_none));
                let what = format!("{activation} needs {expected} {what} projections, found {found}");
                return Err(Error::NotComputed(format!("{what}; {DOWNLOAD}")).at(self.path()));
            }
        }
        Ok(())
    }
}

impl Checkpoint {
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
}

/// Returns the error for a block without some of these roles.
pub(super) fn lacks_a_role(block: &Block<'_>, roles: &[Role]) -> Error {
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
