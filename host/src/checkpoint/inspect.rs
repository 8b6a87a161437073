//! What NVFP4 weights a model has, and everything that is wrong with them.

use std::collections::BTreeMap;
use std::path::Path;

use rayon::prelude::*;

use super::{Checkpoint, Format, Quantized};
use crate::error::Error;
use crate::format::e4m3;

/// What there is in a model.
#[derive(Debug)]
pub struct Inspection {
    /// Its files that could be opened.
    pub files: usize,
    /// Tensors in them.
    pub tensors: usize,
    /// Its NVFP4 weights, experts that are alike in one entry, in the order of the layers.
    pub weights: Vec<Weight>,
    /// All that is wrong.
    pub problems: Vec<Error>,
}

/// NVFP4 weights that differ in the number of their expert only.
#[derive(Clone, Debug, PartialEq)]
pub struct Weight {
    /// The name of the module, with `*` for the number of the expert.
    pub module: String,
    /// How its parts are named.
    pub format: Format,
    /// Output features.
    pub n: usize,
    /// Input features.
    pub k: usize,
    /// How many there are.
    pub count: usize,
    /// Their block scales.
    pub block_scales: Range,
    /// Their global scales, as factors.
    pub global_scales: Range,
    /// Their input scales, as factors, where they have them.
    pub input_scales: Option<Range>,
}

/// The smallest and the largest of some numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Range {
    /// The smallest.
    pub min: f32,
    /// The largest.
    pub max: f32,
}

impl Range {
    fn join(self, other: Self) -> Self {
        Self { min: self.min.min(other.min), max: self.max.max(other.max) }
    }

    fn of(number: f32) -> Self {
        Self { min: number, max: number }
    }
}

impl Inspection {
    /// Opens a model as [`Checkpoint::open`] does and looks at every NVFP4 weight in it. What is wrong, even that there is
    /// no such file, is among the problems.
    pub fn of(path: &Path) -> Self {
        let (checkpoint, mut problems) = Checkpoint::survey(path);
        let modules: Vec<&str> = checkpoint.quantized_modules().into_iter().collect();
        let surveyed: Vec<_> = modules.par_iter().map(|module| survey(&checkpoint, module)).collect();
        let mut sizes = BTreeMap::new();
        let mut weights: BTreeMap<_, Weight> = BTreeMap::new();
        for (&module, surveyed) in modules.iter().zip(surveyed) {
            match surveyed {
                Ok(weight) => {
                    sizes.insert(module, Some([weight.n, weight.k]));
                    let key = (in_order(&weight.module), weight.format.name(), weight.n, weight.k);
                    weights.entry(key).and_modify(|alike| alike.add(&weight)).or_insert(weight);
                }
                Err(errors) => {
                    sizes.insert(module, None);
                    problems.extend(errors);
                }
            }
        }
        check_experts(&checkpoint, &sizes, &mut problems);
        Self {
            files: checkpoint.files().len(),
            tensors: checkpoint.names().count(),
            weights: weights.into_values().collect(),
            problems,
        }
    }
}

impl Weight {
    fn add(&mut self, other: &Self) {
        self.count += other.count;
        self.block_scales = self.block_scales.join(other.block_scales);
        self.global_scales = self.global_scales.join(other.global_scales);
        self.input_scales = match (self.input_scales, other.input_scales) {
            (Some(one), Some(two)) => Some(one.join(two)),
            (one, two) => one.or(two),
        };
    }
}

fn survey(checkpoint: &Checkpoint, module: &str) -> Result<Weight, Vec<Error>> {
    let Quantized { format, matrix, input_scale } = checkpoint.survey_quantized(module)?;
    // Codes of scales are ordered as their values are.
    let codes = matrix.scales().iter().fold((e4m3::MAX_CODE, 0), |(min, max), &code| (min.min(code), max.max(code)));
    Ok(Weight {
        module: without_expert(module),
        format,
        n: matrix.rows(),
        k: matrix.k(),
        count: 1,
        block_scales: Range { min: e4m3::decode(codes.0), max: e4m3::decode(codes.1) },
        global_scales: Range::of(matrix.global_scale()),
        input_scales: input_scale.map(Range::of),
    })
}

/// Where one expert's projection is NVFP4, those of all experts of its layer must be, and gate and up alike in shape.
fn check_experts(checkpoint: &Checkpoint, sizes: &BTreeMap<&str, Option<[usize; 2]>>, problems: &mut Vec<Error>) {
    for projections in checkpoint.expert_projections() {
        let experts = match projections {
            Ok(experts) => experts,
            Err(error) => {
                problems.push(error);
                continue;
            }
        };
        if !experts.iter().flatten().any(|module| sizes.contains_key(&module[..])) {
            continue;
        }
        for modules in &experts {
            for module in modules.iter().filter(|module| !sizes.contains_key(&module[..])) {
                problems.extend(checkpoint.quantized(module).err());
            }
            if let [gate, up] = &modules[..]
                && let (Some(Some(expected)), Some(Some(got))) = (sizes.get(&gate[..]), sizes.get(&up[..]))
                && got != expected
            {
                let what = format!("it is {got:?} and {gate} is {expected:?}; both must have one shape");
                problems.push(Error::Invalid(what).at(super::place(checkpoint.path(), up)));
            }
        }
    }
}

/// A module's name with `*` for the number of its expert.
fn without_expert(module: &str) -> String {
    let mut after_experts = false;
    let parts = module.split('.').map(|part| {
        let is_number = after_experts && part.parse::<usize>().is_ok();
        after_experts = part == "experts";
        if is_number { "*" } else { part }
    });
    parts.collect::<Vec<_>>().join(".")
}

/// A key that orders names by the numbers in them, 9 before 10.
fn in_order(name: &str) -> Vec<(Option<usize>, String)> {
    name.split('.').map(|part| (part.parse().ok(), part.to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_number_of_an_expert_is_left_out() {
        assert_eq!(without_expert("model.layers.3.mlp.experts.12.w1"), "model.layers.3.mlp.experts.*.w1");
        assert_eq!(without_expert("model.layers.3.mlp.shared_experts.w1"), "model.layers.3.mlp.shared_experts.w1");
    }

    #[test]
    fn layers_are_in_the_order_of_their_numbers() {
        let mut names = ["layers.10.a", "layers.9.b", "layers.9.a", "head"];
        names.sort_by_key(|name| in_order(name));
        assert_eq!(names, ["head", "layers.9.a", "layers.9.b", "layers.10.a"]);
    }
}
