//! Layers by name: the built-in layers, and the layers of a JSON file. `models.json` has the layers of models, each with
//! the source of its sizes; `layers.json` has the layers that measurements and tests use.
//!
//! A file holds one entry or a list of entries. `FILE.json#NAME` selects one entry of a list:
//!
//! ```json
//! {"name": "mine", "hidden": 2048, "intermediate": 768, "experts": 128, "top_k": 8, "tokens": 32}
//! ```
//!
//! [`LayerShape`] documents the optional keys, like `"activation": "gpt-oss", "biases": true`.
//!
//! `NAME@tp8` is the part of a layer that one of 8 GPUs has with tensor parallelism (an eighth of each expert), and
//! `NAME@ep8` with expert parallelism (an eighth of the experts). `NAME@ep4@tp2` is both.

use std::sync::LazyLock;

use serde::Deserialize;

use super::routing::Routing;
use super::{Activation, MoeSizes};
use crate::error::Error;
use crate::format::BLOCK;
use crate::generate::Generator;
use crate::problem::{TokenDtype, TokenFormat};
use crate::shape::{find_named, parse_list};

/// A layer as written in a file, and the generation of its inputs.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerShape {
    /// Name of the layer. Empty if the file gives none.
    #[serde(default)]
    pub name: String,
    /// H: number of elements per token.
    pub hidden: usize,
    /// I: number of rows of gate and up.
    pub intermediate: usize,
    /// E: number of experts that the layer holds.
    pub experts: usize,
    /// Number of experts that tokens can name, if the layer does not hold all of them. It holds the first E.
    pub named_experts: Option<usize>,
    /// k: number of experts that each token names.
    pub top_k: usize,
    /// I of the shared expert, if there is one.
    pub shared_intermediate: Option<usize>,
    /// Whether weights multiply the tokens instead of the experts' results. Requires k = 1.
    #[serde(default)]
    pub weights_on_input: bool,
    /// Activation of gate and up, written as a word.
    #[serde(default)]
    pub activation: Activation,
    /// Whether every projection has biases.
    #[serde(default)]
    pub biases: bool,
    /// Format in which tokens are multiplied, written as a word: `16-bit`, `fp8` or `nvfp4`.
    #[serde(default)]
    pub token_format: TokenFormat,
    /// Whether experts have input scales, with which tokens in NVFP4 are quantized.
    #[serde(default)]
    pub input_scales: bool,
    /// T: number of tokens.
    pub tokens: usize,
    /// Generator of the weights and tokens.
    #[serde(default)]
    pub input: Generator,
    /// Distribution of the experts that tokens name.
    #[serde(default)]
    pub routing: Routing,
    /// The model's router in words. Generated steps name experts by `routing`.
    #[serde(default)]
    pub router: String,
    /// Source of the sizes, as text.
    #[serde(default, rename = "source")]
    _source: serde::de::IgnoredAny,
    /// Free text.
    #[serde(default, rename = "note")]
    _note: serde::de::IgnoredAny,
}

impl LayerShape {
    /// Returns the layer with another activation, and with or without biases.
    pub fn with_activation(self, activation: Activation, biases: bool) -> Self {
        Self { activation, biases, ..self }
    }

    /// Returns the layer with another token format.
    pub fn with_token_format(self, token_format: TokenFormat) -> Self {
        Self { token_format, ..self }
    }

    /// Returns the layer with input scales.
    pub fn with_input_scales(self) -> Self {
        Self { input_scales: true, ..self }
    }

    /// Returns the part of the layer that one of `gpus` GPUs has: its experts, or its rows of every expert. With expert
    /// parallelism each GPU has the whole shared expert.
    ///
    /// # Errors
    /// If the parts would not be equal, or not a multiple of 16 rows.
    fn part(mut self, of_experts: bool, gpus: usize) -> Result<Self, Error> {
        let divided = |what: &str, size: usize, unit: usize| match size.checked_div(gpus) {
            Some(part) if part * gpus == size && part.is_multiple_of(unit) && part > 0 => Ok(part),
            _ => Err(Error::Invalid(format!(
                "{what} {size} cannot be divided among {gpus} GPUs in multiples of {unit}; take another number of GPUs"
            ))),
        };
        if of_experts {
            self.named_experts = Some(self.named_experts.unwrap_or(self.experts));
            self.experts = divided("number of experts", self.experts, 1)?;
        } else {
            self.intermediate = divided("intermediate size", self.intermediate, BLOCK)?;
            let shared = self.shared_intermediate;
            self.shared_intermediate =
                shared.map(|size| divided("intermediate size of the shared expert", size, BLOCK)).transpose()?;
        }
        self.name = format!("{}@{}{gpus}", self.name, if of_experts { "ep" } else { "tp" });
        Ok(self)
    }

    /// Sizes of the layer with tokens of this type.
    pub fn sizes(&self, dtype: TokenDtype) -> MoeSizes {
        MoeSizes {
            hidden: self.hidden,
            intermediate: self.intermediate,
            experts: self.experts,
            named_experts: self.named_experts.unwrap_or(self.experts),
            top_k: self.top_k,
            shared_intermediate: self.shared_intermediate,
            dtype,
            activation: self.activation,
            biases: self.biases,
            token_format: self.token_format,
            input_scales: self.input_scales,
        }
    }
}

/// Built-in layers: layers of models, and small layers for tests (`layer-test-*`).
pub fn builtin() -> &'static [LayerShape] {
    static LAYERS: LazyLock<Vec<LayerShape>> = LazyLock::new(|| {
        let files = [include_str!("models.json"), include_str!("layers.json")];
        files.into_iter().flat_map(|file| parse(file).expect("a test parses all built-in layers")).collect()
    });
    &LAYERS
}

/// Returns the layer with the name `NAME`, `FILE.json` or `FILE.json#NAME`, or a GPU's part of it: `NAME@tp8`,
/// `NAME@ep8`.
///
/// # Errors
/// If there is no such layer or file, the file does not have this form, or the layer has no equal parts.
pub fn find(spec: &str) -> Result<LayerShape, Error> {
    let part = spec.rsplit_once('@').and_then(|(name, part)| {
        let split = part.get(..2).filter(|split| ["tp", "ep"].contains(split))?;
        Some((name, split, part[2..].parse().ok()?))
    });
    match part {
        Some((name, split, gpus)) => find(name)?.part(split == "ep", gpus).map_err(|error| error.at(spec)),
        None => find_named(spec, "layer", builtin(), |layer| &layer.name, parse),
    }
}

/// Parses one layer or a list of layers from JSON text, and checks their sizes.
///
/// # Errors
/// If the text does not have this form, or the sizes are invalid.
pub fn parse(json: &str) -> Result<Vec<LayerShape>, Error> {
    let form = r#"a layer is {"name": …, "hidden": H, "intermediate": I, "experts": E, "top_k": k, "tokens": T}"#;
    let layers: Vec<LayerShape> = parse_list(json, form)?;
    for layer in &layers {
        check(layer).map_err(|error| error.at(format_args!("layer `{}`", layer.name)))?;
    }
    Ok(layers)
}

/// Checks the sizes, including combinations that [`MoeSizes::check`] cannot see.
fn check(layer: &LayerShape) -> Result<(), Error> {
    let sizes = layer.sizes(TokenDtype::Bf16);
    sizes.check()?;
    if sizes.named_experts < sizes.experts {
        return Err(Error::Invalid(format!(
            "named_experts = {} is less than experts = {}; give at least the number of experts that the layer holds",
            sizes.named_experts, sizes.experts
        )));
    }
    if layer.weights_on_input && layer.top_k > 1 {
        return Err(Error::Invalid("weights_on_input requires top_k = 1; leave it out".into()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_built_in_layer_is_found_by_its_name() {
        for layer in builtin() {
            assert_eq!(&find(&layer.name).unwrap(), layer);
            assert!(crate::shape::find(&layer.name).is_err(), "{} is also the name of a shape of groups", layer.name);
        }
    }

    #[test]
    fn parts_of_a_layer_are_found_by_their_name() {
        let sizes = |spec: &str| {
            let LayerShape { name, intermediate, experts, named_experts, shared_intermediate, .. } =
                find(spec).unwrap();
            assert_eq!(name, spec);
            (intermediate, experts, named_experts, shared_intermediate)
        };
        assert_eq!(sizes("glm-5@tp8"), (256, 256, None, Some(256)));
        assert_eq!(sizes("kimi-k3@ep8"), (3072, 112, Some(896), None));
        assert_eq!(sizes("deepseek-v3@ep4@tp2"), (1024, 64, Some(256), Some(1024)));
        for (spec, text) in [
            ("glm-5@tp3", "intermediate size 2048 cannot be divided among 3 GPUs in multiples of 16"),
            ("glm-5@ep0", "number of experts 256 cannot be divided among 0 GPUs"),
            ("qwen3.5-35b-a3b@tp64", "intermediate size 512 cannot be divided among 64 GPUs"),
            ("glm-5@pp2", "layer `glm-5@pp2` is neither"),
        ] {
            let error = find(spec).unwrap_err().to_string();
            assert!(error.contains(text), "{error}");
        }
    }

    #[test]
    fn every_model_has_a_router_and_a_source() {
        let models: Vec<serde_json::Value> = serde_json::from_str(include_str!("models.json")).unwrap();
        assert!(models.len() >= 20);
        for model in &models {
            let text = |key: &str| model[key].as_str().is_some_and(|text| !text.is_empty());
            assert!(text("router") && text("source"), "{model}");
        }
    }

    #[test]
    fn invalid_layers_are_refused_with_a_remedy() {
        let layer = |more: &str| {
            let sizes = r#""hidden": 32, "intermediate": 16, "experts": 4, "tokens": 1"#;
            parse(&format!(r#"{{"name": "x", {sizes}, {more}}}"#)).unwrap_err().to_string()
        };
        for (error, text) in [
            (parse("").unwrap_err().to_string(), "EOF"),
            (parse(r#"{"name": "x", "op": "gated", "groups": []}"#).unwrap_err().to_string(), "unknown field `op`"),
            (layer(r#""top_k": 0"#), "layer `x`: top_k = 0 is not from 1 to 32"),
            (layer(r#""top_k": 1, "routing": "skewed""#), "unknown variant `skewed`"),
            (layer(r#""top_k": 1, "activation": "mish""#), "activation `mish` is none of: silu, "),
            (layer(r#""top_k": 1, "activation": "gpt-oss=1,-7""#), "activation: limit = -7 is not from"),
            (layer(r#""top_k": 1, "shared_intermediate": 24"#), "intermediate size of the shared expert 24 is not"),
            (layer(r#""top_k": 1, "named_experts": 3"#), "named_experts = 3 is less than experts = 4"),
            (layer(r#""top_k": 2, "weights_on_input": true"#), "weights_on_input requires top_k = 1"),
        ] {
            assert!(error.contains(text), "{error}");
        }
        assert!(
            find("moe-1")
                .unwrap_err()
                .to_string()
                .contains("layer `moe-1` is neither a .json file nor one of deepseek-v3")
        );
    }
}
