//! Layers by name: the built-in layers, and the layers of a JSON file.
//!
//! A file holds one entry or a list of entries. `FILE.json#NAME` selects one entry of a list:
//!
//! ```json
//! {"name": "mine", "hidden": 2048, "intermediate": 768, "experts": 128, "top_k": 8, "tokens": 32}
//! ```
//!
//! [`LayerShape`] documents the optional keys, like `"activation": "gpt-oss", "biases": true`.

use std::sync::LazyLock;

use serde::Deserialize;

use super::routing::Routing;
use super::{Activation, MoeSizes};
use crate::error::Error;
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
    /// Number of experts that tokens name, if the layer holds only a part of them: the first E.
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

/// Built-in layers: layers of some models, and small layers for tests (`layer-test-*`).
pub fn builtin() -> &'static [LayerShape] {
    static LAYERS: LazyLock<Vec<LayerShape>> =
        LazyLock::new(|| parse(include_str!("layers.json")).expect("a test parses all built-in layers"));
    &LAYERS
}

/// Returns the layer with the name `NAME`, `FILE.json` or `FILE.json#NAME`.
///
/// # Errors
/// If there is no such layer or file, or the file does not have this form.
pub fn find(spec: &str) -> Result<LayerShape, Error> {
    find_named(spec, "layer", builtin(), |layer| &layer.name, parse)
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
            (layer(r#""top_k": 1, "activation": "swish""#), "activation `swish` is none of: silu, "),
            (layer(r#""top_k": 1, "activation": "gpt-oss=1,-7""#), "activation: limit = -7 is not from"),
            (layer(r#""top_k": 1, "shared_intermediate": 24"#), "intermediate size of the shared expert 24 is not"),
            (layer(r#""top_k": 1, "named_experts": 3"#), "named_experts = 3 is less than experts = 4"),
            (layer(r#""top_k": 2, "weights_on_input": true"#), "weights_on_input requires top_k = 1"),
        ] {
            assert!(error.contains(text), "{error}");
        }
        assert!(
            find("moe-1").unwrap_err().to_string().contains("layer `moe-1` is neither a .json file nor one of qwen3")
        );
    }
}
