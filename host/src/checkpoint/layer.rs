//! The experts of a layer, found by the names that models of different families give them.

use std::collections::BTreeSet;

use rayon::prelude::*;

use super::{Checkpoint, Quantized};
use crate::error::Error;
use crate::problem::{Expert, Op, Weights};

const DOWNLOAD: &str = "download the model again";

/// What stands before the number of a layer: plain models, and two ways to wrap one into a multimodal model.
const PREFIXES: [&str; 3] = ["model.layers.", "model.language_model.layers.", "language_model.model.layers."];

/// How a family of models names the feed-forward block of a layer and the projections in it.
struct Family {
    block: &'static str,
    gate: &'static str,
    up: &'static str,
    down: &'static str,
}

const FAMILIES: [Family; 2] = [
    Family { block: ".mlp.", gate: "gate_proj", up: "up_proj", down: "down_proj" },
    Family { block: ".block_sparse_moe.", gate: "w1", up: "w3", down: "w2" },
];

/// The weights of a layer, in place in the mapped files.
#[derive(Clone, Debug)]
pub struct Layer<'a> {
    /// The experts; a dense layer is one.
    pub weights: Weights<'a>,
    /// For each expert the global scale that its activations were calibrated for, where the model has one: the larger of
    /// gate's and up's, which read the same activations.
    pub input_scales: Vec<Option<f32>>,
}

/// For each expert, the modules that read the same activations.
pub(super) type Projections = Vec<Vec<String>>;

impl Checkpoint {
    /// The experts of a layer: gate and up projections for [`Op::Gated`], down projections for [`Op::Plain`].
    ///
    /// # Errors
    /// If there is no such layer (the message says which there are), an expert or a part of one is missing, or a
    /// tensor is wrong.
    pub fn layer(&self, layer: usize, op: Op) -> Result<Layer<'_>, Error> {
        let (block, family) = self.feed_forward(layer)?;
        let blocks = self.expert_blocks(layer, &block)?;
        let experts = blocks.par_iter().map(|block| self.expert(block, family, op)).collect::<Result<Vec<_>, _>>()?;
        let (experts, input_scales) = experts.into_iter().unzip();
        let place = |error: Error| error.at(format_args!("{}: layer {layer}", self.path().display()));
        Ok(Layer { weights: Weights::new(op, experts).map_err(place)?, input_scales })
    }

    /// One weight as a layer of one expert, for [`Op::Plain`].
    ///
    /// # Errors
    /// If a part of it is missing or wrong.
    pub fn single(&self, module: &str) -> Result<Layer<'_>, Error> {
        let Quantized { matrix, input_scale, .. } = self.quantized(module)?;
        let weights = Weights::new(Op::Plain, vec![Expert::Plain(matrix)]).map_err(|error| error.at(module))?;
        Ok(Layer { weights, input_scales: vec![input_scale] })
    }

    /// What stands before the projections of each expert, of which none may be missing.
    fn expert_blocks(&self, layer: usize, block: &str) -> Result<Vec<String>, Error> {
        let experts = self.numbers_under(&format!("{block}experts."));
        if let Some(missing) = (0..experts.len()).find(|expert| !experts.contains(expert)) {
            let name = format!("expert {missing} of layer {layer}");
            return Err(Error::Missing { name, remedy: DOWNLOAD.into() }.at(self.path().display()));
        }
        Ok(match experts.len() {
            0 => vec![block.to_owned()],
            count => (0..count).map(|expert| format!("{block}experts.{expert}.")).collect(),
        })
    }

    fn expert(&self, block: &str, family: &Family, op: Op) -> Result<(Expert<'_>, Option<f32>), Error> {
        let projection = |name| self.quantized(&format!("{block}{name}"));
        match op {
            Op::Gated => {
                let (gate, up) = (projection(family.gate)?, projection(family.up)?);
                let input_scale = gate.input_scale.into_iter().chain(up.input_scale).reduce(f32::max);
                Ok((Expert::Gated { gate: gate.matrix, up: up.matrix }, input_scale))
            }
            Op::Plain => {
                let down = projection(family.down)?;
                Ok((Expert::Plain(down.matrix), down.input_scale))
            }
        }
    }

    /// What stands before `experts.` or a projection in the names of a layer.
    fn feed_forward(&self, layer: usize) -> Result<(String, &'static Family), Error> {
        for prefix in PREFIXES {
            for family in &FAMILIES {
                let block = format!("{prefix}{layer}{}", family.block);
                let dense = self.names_under(&format!("{block}{}.", family.gate)).next().is_some();
                if dense || !self.numbers_under(&format!("{block}experts.")).is_empty() {
                    return Ok((block, family));
                }
            }
        }
        let layers: BTreeSet<usize> = PREFIXES.iter().flat_map(|prefix| self.numbers_under(prefix)).collect();
        let remedy = if layers.contains(&layer) {
            "it needs experts stored apart (mlp.experts.E.gate_proj, block_sparse_moe.experts.E.w1) or a dense \
             mlp.gate_proj; fused experts are not read"
                .to_owned()
        } else if layers.is_empty() {
            "give a model with tensors named model.layers.L.…".to_owned()
        } else {
            format!("there are layers {}", ranges(&layers))
        };
        let name = format!("a feed-forward block of layer {layer}");
        Err(Error::Missing { name, remedy }.at(self.path().display()))
    }

    /// The projections that must be NVFP4 together: gate and up of every expert of a layer, and down of every expert.
    ///
    /// # Errors
    /// For each layer of which an expert is missing.
    pub(super) fn expert_projections(&self) -> Vec<Result<Projections, Error>> {
        let layers: BTreeSet<usize> = PREFIXES.iter().flat_map(|prefix| self.numbers_under(prefix)).collect();
        let mut all = Vec::new();
        for layer in layers {
            let Ok((block, family)) = self.feed_forward(layer) else { continue };
            match self.expert_blocks(layer, &block) {
                Ok(blocks) => all.extend([&[family.gate, family.up][..], &[family.down]].map(|names| {
                    Ok(blocks.iter().map(|block| names.iter().map(|name| format!("{block}{name}")).collect()).collect())
                })),
                Err(error) => all.push(Err(error)),
            }
        }
        all
    }

    /// The numbers that follow `prefix` and end in a dot.
    fn numbers_under(&self, prefix: &str) -> BTreeSet<usize> {
        let number = |name: &str| name[prefix.len()..].split_once('.')?.0.parse().ok();
        self.names_under(prefix).filter_map(number).collect()
    }
}

/// Numbers in words: `0-3, 5`.
fn ranges(numbers: &BTreeSet<usize>) -> String {
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
