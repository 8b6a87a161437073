//! Layers by name: those built in, and those of a JSON file.
//!
//! A file holds one entry, or a list of entries of which `FILE.json#NAME` picks one:
//!
//! ```json
//! {"name": "mine", "hidden": 2048, "intermediate": 768, "experts": 128, "top_k": 8, "tokens": 32}
//! ```
//!
//! What else an entry may have, [`LayerShape`] says: `"activation": "gpt-oss", "biases": true`, and more.

use std::sync::LazyLock;

use serde::Deserialize;

use super::generate::Routing;
use super::{Activation, MoeSizes};
use crate::error::Error;
use crate::generate::Generator;
use crate::problem::{TokenDtype, TokenFormat};
use crate::shape::{find_named, parse_list};

/// A layer as a file gives it, and how its inputs are made.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerShape {
    /// What it is called; empty where a file gives no name.
    #[serde(default)]
    pub name: String,
    /// H.
    pub hidden: usize,
    /// I.
    pub intermediate: usize,
    /// E: experts that the layer holds.
    pub experts: usize,
    /// Experts that tokens name, if the layer holds a part of them: the first ones.
    pub named_experts: Option<usize>,
    /// k.
    pub top_k: usize,
    /// I of the shared expert, if there is one.
    pub shared_intermediate: Option<usize>,
    /// Whether weights are on the input; for k = 1.
    #[serde(default)]
    pub weights_on_input: bool,
    /// What becomes of gate and up, as a word.
    #[serde(default)]
    pub activation: Activation,
    /// Whether every projection has biases.
    #[serde(default)]
    pub biases: bool,
    /// As what tokens are multiplied, in a word: `16-bit`, `fp8` or `nvfp4`.
    #[serde(default)]
    pub token_format: TokenFormat,
    /// Whether experts come with input scales; tokens in NVFP4 are quantized by them.
    #[serde(default)]
    pub input_scales: bool,
    /// T.
    pub tokens: usize,
    /// The generator that belongs to it.
    #[serde(default)]
    pub input: Generator,
    /// Which experts tokens name.
    #[serde(default)]
    pub routing: Routing,
    /// Anything a person wants to say.
    #[serde(default, rename = "note")]
    _note: serde::de::IgnoredAny,
}

impl LayerShape {
    /// The layer with another activation, and with biases or without.
    pub fn with_activation(self, activation: Activation, biases: bool) -> Self {
        Self { activation, biases, ..self }
    }

    /// The layer with its tokens multiplied as this.
    pub fn with_token_format(self, token_format: TokenFormat) -> Self {
        Self { token_format, ..self }
    }

    /// The layer with input scales.
    pub fn with_input_scales(self) -> Self {
        Self { input_scales: true, ..self }
    }

    /// The sizes, for tokens of a type.
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

/// The built-in layers: those of some models, and small ones for tests (`layer-test-*`).
pub fn builtin() -> &'static [LayerShape] {
    static LAYERS: LazyLock<Vec<LayerShape>> =
        LazyLock::new(|| parse(include_str!("layers.json")).expect("a test reads every built-in layer"));
    &LAYERS
}

/// The layer that `NAME`, `FILE.json` or `FILE.json#NAME` stands for.
///
/// # Errors
/// If there is no such layer or file, or the file is not of this form.
pub fn find(spec: &str) -> Result<LayerShape, Error> {
    find_named(spec, "layer", builtin(), |layer| &layer.name, parse)
}

/// Reads one layer or a list of them from JSON text, and checks their sizes.
///
/// # Errors
/// If the text is not of this form, or the sizes are no valid layer.
pub fn parse(json: &str) -> Result<Vec<LayerShape>, Error> {
    let form = r#"a layer is {"name": …, "hidden": H, "intermediate": I, "experts": E, "top_k": k, "tokens": T}"#;
    let layers: Vec<LayerShape> = parse_list(json, form)?;
    for layer in &layers {
        check(layer).map_err(|error| error.at(format_args!("layer `{}`", layer.name)))?;
    }
    Ok(layers)
}

/// What no step or layer could be made of.
fn check(layer: &LayerShape) -> Result<(), Error> {
    let sizes = layer.sizes(TokenDtype::Bf16);
    sizes.check()?;
    if sizes.named_experts < sizes.experts {
        return Err(Error::Invalid(format!(
            "named_experts = {} is less than experts = {}; a layer holds a part of the experts that tokens name",
            sizes.named_experts, sizes.experts
        )));
    }
    if layer.weights_on_input && layer.top_k > 1 {
        return Err(Error::Invalid("weights_on_input is for top_k = 1; leave it out".into()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_built_in_layer_is_valid_and_found_by_its_name() {
        for layer in builtin() {
            assert_eq!(&find(&layer.name).unwrap(), layer);
            assert!(crate::shape::find(&layer.name).is_err(), "{} names a shape of groups too", layer.name);
        }
    }

    #[test]
    fn nonsense_is_refused_with_what_would_be_right() {
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
            (layer(r#""top_k": 2, "weights_on_input": true"#), "weights_on_input is for top_k = 1"),
        ] {
            assert!(error.contains(text), "{error}");
        }
        assert!(
            find("moe-1").unwrap_err().to_string().contains("layer `moe-1` is neither a .json file nor one of qwen3")
        );
    }
}
