//! Which weights of a model are quantized, and why others are not.
//!
//! Engines quantize by module, and some modules are one to them: projections that they merge, and the experts of a layer.
//! Of those either all are quantized or none.

use std::collections::{BTreeMap, BTreeSet};

use super::config::Config;
use super::stored::{self, Found, Stored, WEIGHT, Weight};
use super::{Left, Options};
use crate::checkpoint::file::{Tensor, TensorFile};
use crate::checkpoint::names::{Aside, Expert, Projection, layer_of, merged_with};
use crate::checkpoint::{Checkpoint, Format};
use crate::error::Error;
use crate::problem::check_weight_size;

/// Tensors that only the layers have that draft tokens ahead, where those are numbered on from the model's own.
const OF_DRAFTS: [&str; 3] = ["eh_proj.weight", "enorm.weight", "hnorm.weight"];

/// What becomes of the tensors that hold weights.
#[derive(Debug, Default)]
pub(super) struct Selection<'a> {
    /// Weights to quantize, by the tensor that holds them.
    pub chosen: BTreeMap<&'a str, Stored<'a>>,
    /// Weights in FP8 or MXFP4 that are written as bf16, since no engine reads a model in both.
    pub widened: BTreeMap<&'a str, Stored<'a>>,
    /// Tensors that were asked for and are not quantized.
    pub left: Vec<Left>,
    /// Modules that are NVFP4 already.
    pub nvfp4: BTreeSet<String>,
}

/// Looks at every tensor.
pub(super) fn select<'a>(checkpoint: &'a Checkpoint, config: &Config, options: &Options<'_>) -> Selection<'a> {
    let drafts = draft_layers(checkpoint, config);
    let mut selection = Selection::default();
    let mut unasked = BTreeMap::new();
    for (name, tensor) in checkpoint.files().iter().flat_map(TensorFile::tensors) {
        let Some(found) = stored::find(checkpoint, config, name, tensor) else { continue };
        let weights: &[Weight<'_>] = if let Found::Weights(stored) = &found { &stored.weights } else { &[] };
        let modules = weights.iter().map(|weight| weight.module.clone()).chain(stored::modules(name));
        let asked = is_included(options, name, modules);
        match (asked, found) {
            (_, ref found @ Found::Nvfp4(format)) => {
                selection.nvfp4.extend(stored::modules(name));
                if asked {
                    let left = match excuse(options, &drafts, name, found) {
                        Some(reason) => Left::excluded(name, reason),
                        None => already(checkpoint, options.format, name, format),
                    };
                    selection.left.push(left);
                }
            }
            (false, Found::Weights(stored)) => _ = unasked.insert(name, stored),
            (false, _) => {}
            (true, found) => match excuse(options, &drafts, name, &found) {
                Some(reason) => {
                    selection.left.push(Left::excluded(name, reason));
                    if let Found::Weights(stored) = found {
                        unasked.insert(name, stored);
                    }
                }
                None => selection.take(checkpoint, name, tensor, found),
            },
        }
    }
    if !options.separate_scales {
        selection.keep_together(checkpoint, &mut unasked);
    }
    unasked.retain(|_, stored| !stored.plain);
    selection.widened = unasked;
    selection
}

impl<'a> Selection<'a> {
    /// Chooses a tensor that was asked for, if it can be quantized.
    fn take(&mut self, checkpoint: &Checkpoint, name: &'a str, tensor: Tensor<'a>, found: Found<'a>) {
        let stored = match found {
            Found::Weights(stored) => stored,
            Found::Left(reason) => return self.left.push(Left::excluded(name, reason)),
            Found::Unreadable(error) => {
                return self.left.push(Left::refused(name, error, checkpoint));
            }
            Found::Nvfp4(_) => unreachable!("told apart before"),
        };
        let wrong = stored.weights.iter().find_map(|weight| {
            let [n, k] = weight.source.sizes();
            check_weight_size(n, k).err()
        });
        match wrong {
            Some(error) => self.left.push(Left::refused(name, error, checkpoint)),
            None if stored.weights.is_empty() => {
                let what = format!("it has no experts: its shape is {:?}", tensor.shape);
                self.left.push(Left::refused(name, Error::Invalid(what), checkpoint));
            }
            None => _ = self.chosen.insert(name, stored),
        }
    }

    /// Takes back weights of which others that belong to them are not quantized.
    fn keep_together(&mut self, checkpoint: &Checkpoint, unasked: &mut BTreeMap<&'a str, Stored<'a>>) {
        // The tensors that hold the modules of each group.
        let mut groups: BTreeMap<String, BTreeSet<&'a str>> = BTreeMap::new();
        let all = self.chosen.values().chain(unasked.values());
        for (module, tensor) in all.flat_map(|stored| stored.weights.iter().map(|weight| (&weight.module, stored.name)))
        {
            for group in groups_of(module) {
                groups.entry(group).or_default().insert(tensor);
            }
        }
        // Whoever excludes one excludes all; whoever asks for one alone is told.
        let on_purpose = self.left.iter().filter(|left| left.refusal.is_none());
        let mut excluded: BTreeSet<String> = on_purpose.map(|left| left.name.clone()).collect();
        loop {
            let mut back: BTreeMap<&'a str, &'a str> = BTreeMap::new();
            for members in groups.values() {
                let chosen = |tensor: &str| self.chosen.contains_key(tensor);
                let Some(other) = members.iter().find(|tensor| !chosen(tensor)) else { continue };
                back.extend(members.iter().filter(|tensor| chosen(tensor)).map(|&tensor| (tensor, *other)));
            }
            if back.is_empty() {
                return;
            }
            for (tensor, other) in back {
                let stored = self.chosen.remove(tensor).expect("it was chosen");
                unasked.insert(tensor, stored);
                self.left.push(if excluded.contains(other) {
                    excluded.insert(tensor.to_owned());
                    Left::excluded(tensor, format!("engines load it as one with {other}, which is excluded"))
                } else {
                    let what = format!(
                        "engines load it as one with {other}, which is not quantized: include or exclude both, or give \
                         --separate-scales"
                    );
                    Left::refused(tensor, Error::Invalid(what), checkpoint)
                });
            }
        }
    }
}

/// The groups that a module is in: with what it is merged, and the experts of its layer.
fn groups_of(module: &str) -> impl Iterator<Item = String> {
    let merged = merged_with(module).chain([module.to_owned()]).collect::<BTreeSet<_>>();
    let merged = (merged.len() > 1).then(|| merged.into_iter().collect::<Vec<_>>().join(" "));
    let experts = Projection::parse(module)
        .filter(|projection| matches!(projection.expert, Expert::Routed(_)))
        .map(|projection| format!("{}{} {}", projection.stack, projection.layer, projection.block));
    merged.into_iter().chain(experts)
}

/// Whether a tensor or one of the weights that it holds is asked for.
fn is_included(options: &Options<'_>, name: &str, mut modules: impl Iterator<Item = String>) -> bool {
    (options.include)(name) || modules.any(|module| (options.include)(&format!("{module}{WEIGHT}")))
}

/// Why a tensor that is asked for by its name is not quantized after all.
fn excuse(options: &Options<'_>, drafts: &BTreeSet<(&str, usize)>, name: &str, found: &Found<'_>) -> Option<String> {
    let weights: &[Weight<'_>] = if let Found::Weights(stored) = found { &stored.weights } else { &[] };
    let guessed = if weights.is_empty() { stored::modules(name) } else { Vec::new() };
    let modules = || weights.iter().map(|weight| &weight.module).chain(&guessed);
    if let Some(reason) = std::iter::once(name).chain(modules().map(|module| &module[..])).find_map(options.exclude) {
        return Some(reason);
    }
    if let Some(aside) = Aside::of(name) {
        return Some(format!("part of {}", aside.name()));
    }
    if layer_of(name).is_some_and(|layer| drafts.contains(&layer)) {
        return Some(format!("part of {}", Aside::Draft.name()));
    }
    let last = modules().next()?.rsplit('.').next().unwrap_or_default();
    match last {
        "lm_head" | "head" | "output" | "embed_out" => Some("the output head".into()),
        _ if last.contains("embed") || ["wte", "wpe"].contains(&last) => Some("an embedding".into()),
        _ => None,
    }
}

/// The layers that draft tokens ahead but are numbered as the model's own.
fn draft_layers<'a>(checkpoint: &'a Checkpoint, config: &Config) -> BTreeSet<(&'a str, usize)> {
    let drafted = config.number("num_nextn_predict_layers").is_some_and(|count| count > 0);
    let own = config.number("num_hidden_layers").filter(|_| drafted).unwrap_or(usize::MAX);
    let layers = checkpoint.names().filter_map(|name| {
        let layer = layer_of(name)?;
        (layer.1 >= own || OF_DRAFTS.iter().any(|tensor| name.ends_with(tensor))).then_some(layer)
    });
    layers.collect()
}

/// A weight that is in NVFP4.
fn already(checkpoint: &Checkpoint, wanted: Format, name: &str, format: Format) -> Left {
    if wanted == format {
        return Left::excluded(name, "it is NVFP4 already".into());
    }
    let what = format!(
        "it is NVFP4 already, in the form of {}, and stays so: exclude it, or take that --format",
        format.name()
    );
    Left::refused(name, Error::Invalid(what), checkpoint)
}
