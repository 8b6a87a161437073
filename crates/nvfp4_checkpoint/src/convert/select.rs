//! Decides which weights of a model are quantized, and records why the others are not.
//!
//! Engines quantize by module and treat some projections as one module: merged projections, and all experts of a layer.
//! The weights of a module are quantized together or not at all.

use std::collections::{BTreeMap, BTreeSet};

use super::config::Config;
use super::options::Options;
use super::stored::{self, Found, Stored, WEIGHT, Weight};
use crate::file::{Tensor, TensorFile};
use crate::names::{Aside, Expert, Projection, layer_of, merged_with};
use crate::{Checkpoint, Format};
use nvfp4_core::Error;
use nvfp4_core::problem::check_weight_size;

/// Tensors that exist only in draft layers, for models that number these layers after their own.
const OF_DRAFTS: [&str; 3] = ["eh_proj.weight", "enorm.weight", "hnorm.weight"];

/// A requested tensor that is not quantized.
#[derive(Debug)]
pub struct Left {
    /// Name of the tensor.
    pub name: String,
    /// Reason.
    pub reason: String,
    /// Error if the tensor should be quantized and cannot be; then nothing is written. `None`: left on purpose.
    pub refusal: Option<Error>,
}

impl Left {
    pub(super) fn excluded(name: &str, reason: String) -> Self {
        Self { name: name.to_owned(), reason, refusal: None }
    }

    pub(super) fn refused(name: &str, error: Error, checkpoint: &Checkpoint) -> Self {
        let reason = error.to_string();
        Self { name: name.to_owned(), reason, refusal: Some(error.at(checkpoint.place(name))) }
    }
}

/// Decision for each tensor with weights.
#[derive(Debug, Default)]
pub(super) struct Selection<'a> {
    /// Weights to quantize, by the tensor that holds them.
    pub chosen: BTreeMap<&'a str, Stored<'a>>,
    /// Weights in FP8 or MXFP4 that are written as bf16, because no engine reads a model with both formats.
    pub widened: BTreeMap<&'a str, Stored<'a>>,
    /// Requested tensors that are not quantized.
    pub left: Vec<Left>,
    /// Modules that are already NVFP4.
    pub nvfp4: BTreeSet<String>,
}

/// Decides the fate of every tensor.
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
    /// Chooses a requested tensor if it can be quantized.
    fn take(&mut self, checkpoint: &Checkpoint, name: &'a str, tensor: Tensor<'a>, found: Found<'a>) {
        let stored = match found {
            Found::Weights(stored) => stored,
            Found::Left(reason) => return self.left.push(Left::excluded(name, reason)),
            Found::Unreadable(error) => {
                return self.left.push(Left::refused(name, error, checkpoint));
            }
            Found::Nvfp4(_) => unreachable!("`select` handles NVFP4 tensors before"),
        };
        let wrong = stored.weights.iter().find_map(|weight| {
            let [n, k] = weight.source.sizes();
            check_weight_size(n, k).err()
        });
        match wrong {
            Some(error) => self.left.push(Left::refused(name, error, checkpoint)),
            None if stored.weights.is_empty() => {
                let what = format!("the tensor holds no experts: its shape is {:?}", tensor.shape);
                self.left.push(Left::refused(name, Error::Invalid(what), checkpoint));
            }
            None => _ = self.chosen.insert(name, stored),
        }
    }

    /// Drops weights whose partners in a group are not quantized.
    fn keep_together(&mut self, checkpoint: &Checkpoint, unasked: &mut BTreeMap<&'a str, Stored<'a>>) {
        // Tensors that hold the modules of each group.
        let mut groups: BTreeMap<String, BTreeSet<&'a str>> = BTreeMap::new();
        let all = self.chosen.values().chain(unasked.values());
        for (module, tensor) in all.flat_map(|stored| stored.weights.iter().map(|weight| (&weight.module, stored.name)))
        {
            for group in groups_of(module) {
                groups.entry(group).or_default().insert(tensor);
            }
        }
        // Excluding one member excludes the group; requesting only a part of a group is an error.
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
                let stored = self.chosen.remove(tensor).expect("`back` lists only chosen tensors");
                unasked.insert(tensor, stored);
                self.left.push(if excluded.contains(other) {
                    excluded.insert(tensor.to_owned());
                    Left::excluded(tensor, format!("engines merge it with {other}, which is excluded"))
                } else {
                    let what = format!(
                        "engines merge it with {other}, which is not quantized; include or exclude both, or use \
                         --separate-scales"
                    );
                    Left::refused(tensor, Error::Invalid(what), checkpoint)
                });
            }
        }
    }
}

/// Groups of a module: the projections merged with it, and the experts of its layer.
fn groups_of(module: &str) -> impl Iterator<Item = String> {
    let merged = merged_with(module).chain([module.to_owned()]).collect::<BTreeSet<_>>();
    let merged = (merged.len() > 1).then(|| merged.into_iter().collect::<Vec<_>>().join(" "));
    let experts = Projection::parse(module)
        .filter(|projection| matches!(projection.expert, Expert::Routed(_)))
        .map(|projection| format!("{}{} {}", projection.stack, projection.layer, projection.block));
    merged.into_iter().chain(experts)
}

/// Returns `true` if a tensor or one of its weights is requested.
fn is_included(options: &Options<'_>, name: &str, mut modules: impl Iterator<Item = String>) -> bool {
    (options.include)(name) || modules.any(|module| (options.include)(&format!("{module}{WEIGHT}")))
}

/// Returns the reason why a requested tensor is not quantized; `None` if it is.
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

/// Returns the draft layers that are numbered after the model's own layers.
fn draft_layers<'a>(checkpoint: &'a Checkpoint, config: &Config) -> BTreeSet<(&'a str, usize)> {
    let drafted = config.number("num_nextn_predict_layers").is_some_and(|count| count > 0);
    let own = config.number("num_hidden_layers").filter(|_| drafted).unwrap_or(usize::MAX);
    let layers = checkpoint.names().filter_map(|name| {
        let layer = layer_of(name)?;
        (layer.1 >= own || OF_DRAFTS.iter().any(|tensor| name.ends_with(tensor))).then_some(layer)
    });
    layers.collect()
}

/// Returns the entry of a weight that is already NVFP4.
fn already(checkpoint: &Checkpoint, wanted: Format, name: &str, format: Format) -> Left {
    if wanted == format {
        return Left::excluded(name, "already NVFP4".into());
    }
    let what = format!("already NVFP4 in {} format; exclude it, or use this --format", format.name());
    Left::refused(name, Error::Invalid(what), checkpoint)
}
