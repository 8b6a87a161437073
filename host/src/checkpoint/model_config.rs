//! What a model's `config.json` says of its layers and of their quantization, as far as it can contradict the tensors.
//!
//! Keys: those of transformers' configurations; `quantization_config` as ModelOpt and compressed-tensors write it, with
//! `hf_quant_config.json` for ModelOpt's older exports.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::{Checkpoint, Format};
use crate::error::Error;
use crate::files::{foreign_kind, read_bounded};
use crate::moe::Activation;

/// More than any configuration has; lists of thousands of excluded modules have some hundred kilobytes.
const MAX_BYTES: usize = 64 << 20;

/// A model's configuration.
#[derive(Debug)]
pub(super) struct ModelConfig {
    path: PathBuf,
    config: Value,
    /// Of `hf_quant_config.json`, which is asked only where the other says nothing of a quantization.
    older: Option<Value>,
}

/// The name of an activation.
struct Word<'a> {
    /// Under which it stands.
    key: &'static str,
    word: &'a str,
    /// What it is, if that is known.
    activation: Option<Activation>,
}

impl ModelConfig {
    /// The configuration beside a checkpoint's files, if there is one.
    ///
    /// # Errors
    /// If it is there and cannot be read.
    pub(super) fn beside(checkpoint: &Checkpoint) -> Result<Option<Self>, Error> {
        let path = checkpoint.path();
        let folder = if path.is_dir() { path } else { path.parent().unwrap_or(Path::new("")) };
        let path = folder.join("config.json");
        let Some(config) = read(&path)? else { return Ok(None) };
        let mut config = Self { path, config, older: None };
        if config.quantization().is_none() {
            config.older = read(&folder.join("hf_quant_config.json"))?;
        }
        Ok(Some(config))
    }

    /// Where it is, for messages.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// All that it says.
    pub(super) fn json(&self) -> &Value {
        &self.config
    }

    /// The value of a key of the language model, which multimodal models keep in a part of its own.
    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        let parts = ["text_config", "llm_config", "language_config", "thinker_config"];
        let texts = parts.into_iter().filter_map(|part| self.config.get(part));
        let nested = self.config.get("thinker_config").and_then(|thinker| thinker.get("text_config"));
        let everywhere = texts.chain(nested).chain([&self.config]);
        everywhere.filter_map(|part| part.get(key)).find(|value| !value.is_null())
    }

    /// Refuses a model whose experts compute something else than `silu(gate) · up`.
    ///
    /// # Errors
    /// If the configuration names another activation, or a limit on it.
    pub(super) fn check_activation(&self) -> Result<(), Error> {
        match self.activation_word()? {
            Some(Word { key, word, activation }) if activation != Some(Activation::Silu) => {
                let what = format!("{key} is {word:?}; only silu is computed");
                Err(Error::NotComputed(what).at(self.path.display()))
            }
            _ => self.check_limits(),
        }
    }

    /// What the experts of an MoE layer compute of gate and up.
    ///
    /// # Errors
    /// If it is none of what MoE layers compute.
    pub(super) fn activation(&self) -> Result<Activation, Error> {
        let is_gpt_oss = |name: &str| name.starts_with("gpt_oss");
        if self.get("model_type").and_then(Value::as_str).is_some_and(is_gpt_oss) {
            // Its hidden_act says silu, and `GptOssExperts` of transformers computes this, whose numbers it has as constants.
            let number = |key, constant| self.get(key).and_then(Value::as_f64).map_or(constant, |number| number as f32);
            let (alpha, limit) = (number("swiglu_alpha", 1.702), number("swiglu_limit", 7.0));
            let activation = Activation::GptOss { alpha, limit };
            return activation.check().map(|()| activation).map_err(|error| error.at(self.path.display()));
        }
        self.check_limits()?;
        match self.activation_word()? {
            None => Ok(Activation::Silu),
            Some(Word { activation: Some(activation), .. }) => Ok(activation),
            Some(Word { key, word, activation: None }) => {
                let what = format!("{key} is {word:?}; only silu, gelu by tanh and relu2 are computed");
                Err(Error::NotComputed(what).at(self.path.display()))
            }
        }
    }

    /// The name of the activation.
    fn activation_word(&self) -> Result<Option<Word<'_>>, Error> {
        let refuse = |what: String| Err(Error::NotComputed(what).at(self.path.display()));
        let mut found: Option<Word<'_>> = None;
        for key in ["hidden_act", "hidden_activation", "mlp_hidden_act", "activation_function", "activation"] {
            let Some(word) = self.get(key).and_then(Value::as_str) else { continue };
            let activation = match word {
                "silu" | "swish" | "swiglu" => Some(Activation::Silu),
                "gelu_pytorch_tanh" | "gelu_new" => Some(Activation::GeluTanh),
                "relu2" => Some(Activation::Relu2),
                _ => None,
            };
            match found {
                Some(Word { key: before, word: other, activation: known }) if known != activation => {
                    return refuse(format!("{key} is {word:?} and {before} is {other:?}; which holds is not known"));
                }
                _ => found = Some(Word { key, word, activation }),
            }
        }
        Ok(found)
    }

    /// Refuses limits on gate and up, and what scales gate under the sigmoid.
    fn check_limits(&self) -> Result<(), Error> {
        // A number, or one for each layer; 0 is none.
        for (key, none) in [("swiglu_limit", 0.0), ("swiglu_limits", 0.0), ("swiglu_alpha", 1.0)] {
            let Some(value) = self.get(key) else { continue };
            let numbers = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
            if numbers.iter().any(|number| !number.is_null() && number.as_f64() != Some(none)) {
                let what = format!("{key} is {value}; silu of gate is multiplied with up here, and nothing else");
                return Err(Error::NotComputed(what).at(self.path.display()));
            }
        }
        Ok(())
    }

    /// Refuses a model whose activations are transformed before they are multiplied.
    ///
    /// # Errors
    /// If the configuration has such a transform.
    pub(super) fn check_transforms(&self) -> Result<(), Error> {
        let transforms = self.quantization().and_then(|quantization| quantization.get("transform_config"));
        match transforms {
            None | Some(Value::Null) => Ok(()),
            Some(Value::Object(transforms)) if transforms.is_empty() => Ok(()),
            Some(_) => {
                let what = "its transform_config rotates activations, which is not computed".to_owned();
                Err(Error::NotComputed(what).at(self.path.display()))
            }
        }
    }

    /// What it says of the quantization, if it says anything.
    pub(super) fn quantization(&self) -> Option<&Value> {
        let found = |config: &'_ Value| config.get("quantization_config").is_some_and(Value::is_object);
        if found(&self.config) {
            return self.config.get("quantization_config");
        }
        self.get("quantization_config").or_else(|| self.older.as_ref()?.get("quantization"))
    }

    /// The format that the tensors should have, if it is one of ours.
    pub(super) fn format(&self) -> Option<Format> {
        let quantization = self.quantization()?;
        let method = quantization.get("quant_method").and_then(Value::as_str);
        match method {
            Some("compressed-tensors") => Some(Format::CompressedTensors),
            Some(method) if method.starts_with("modelopt") => Some(Format::ModelOpt),
            None => quantization.get("quant_algo").map(|_| Format::ModelOpt),
            _ => None,
        }
    }

    /// Whether servers quantize activations too, and so want input scales.
    pub(super) fn quantizes_activations(&self) -> bool {
        let Some(quantization) = self.quantization() else { return false };
        match quantization.get("quant_algo").and_then(Value::as_str) {
            Some(algorithm) => algorithm == "NVFP4",
            None => groups(quantization).any(|group| {
                // `"dynamic": "local"` has scales for blocks from the tokens and one for all from the model.
                group
                    .get("input_activations")
                    .is_some_and(|inputs| inputs.get("dynamic").is_some_and(|dynamic| dynamic != true))
            }),
        }
    }

    /// Whether it calls its quantization NVFP4.
    pub(super) fn says_nvfp4(&self) -> bool {
        let word = |key| self.quantization()?.get(key)?.as_str().map(str::to_ascii_lowercase);
        ["quant_algo", "format"].into_iter().filter_map(word).any(|word| word.contains("nvfp4"))
    }

    /// The numbers that NVFP4 has no other of, if they are other ones.
    pub(super) fn contradiction(&self) -> Option<String> {
        let quantization = self.quantization()?;
        let weights = groups(quantization).filter_map(|group| group.get("weights"));
        for weights in weights.chain([quantization]) {
            for (key, expected) in [("group_size", 16), ("num_bits", 4)] {
                if let Some(number) = weights.get(key).and_then(Value::as_u64).filter(|number| *number != expected) {
                    return Some(format!("{key} is {number}, and NVFP4's is {expected}"));
                }
            }
        }
        None
    }

    /// The entry that excludes a module from quantization, if there is one. Regular expressions (`re:…`) are not looked at.
    pub(super) fn excluding(&self, module: &str) -> Option<&str> {
        let quantization = self.quantization()?;
        let lists =
            ["ignore", "exclude_modules", "modules_to_not_convert"].into_iter().filter_map(|key| quantization.get(key));
        let mut entries = lists.filter_map(Value::as_array).flatten().filter_map(Value::as_str);
        entries.find(|entry| {
            // A name excludes what is in the module too.
            let inside = module.strip_prefix(*entry).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
            !entry.starts_with("re:") && (inside || matches_glob(entry, module))
        })
    }

    /// The first of some keys that is a number.
    pub(super) fn number<'k>(&self, keys: &[&'k str]) -> Option<(&'k str, usize)> {
        keys.iter().find_map(|&key| Some((key, usize::try_from(self.get(key)?.as_u64()?).ok()?)))
    }
}

fn groups(quantization: &Value) -> impl Iterator<Item = &Value> {
    quantization.get("config_groups").and_then(Value::as_object).into_iter().flat_map(|groups| groups.values())
}

/// Whether a pattern with `*` for any text matches all of a name.
fn matches_glob(pattern: &str, name: &str) -> bool {
    let mut pieces = pattern.split('*');
    let first = pieces.next().unwrap_or_default();
    let Some(mut rest) = name.strip_prefix(first) else { return false };
    let pieces: Vec<_> = pieces.collect();
    let Some((last, between)) = pieces.split_last() else { return rest.is_empty() };
    for piece in between {
        let Some(at) = rest.find(piece) else { return false };
        rest = &rest[at + piece.len()..];
    }
    rest.ends_with(last)
}

/// A file of JSON, if it is there.
fn read(path: &Path) -> Result<Option<Value>, Error> {
    if path.symlink_metadata().is_err() {
        return Ok(None);
    }
    let bytes = read_bounded(path, MAX_BYTES, "a model's configuration")?;
    let invalid = |error: serde_json::Error| match foreign_kind(&bytes) {
        Some(kind) => Error::Invalid(kind.into()),
        None => Error::Invalid(format!("not a configuration: {error}; download it again")),
    };
    serde_json::from_slice(&bytes).map(Some).map_err(|error| invalid(error).at(path.display()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn config(config: Value) -> ModelConfig {
        ModelConfig { path: "config.json".into(), config, older: None }
    }

    #[test]
    fn activations_other_than_silu_are_refused() {
        for (value, words) in [
            (json!({"hidden_act": "gelu_pytorch_tanh"}), "hidden_act is \"gelu_pytorch_tanh\""),
            (
                json!({"text_config": {"hidden_activation": "gelu"}, "hidden_act": "silu"}),
                "hidden_activation is \"gelu\"",
            ),
            (json!({"mlp_hidden_act": "relu2"}), "mlp_hidden_act is \"relu2\""),
            (json!({"hidden_act": "silu", "swiglu_limit": 7.0}), "swiglu_limit is 7.0"),
            (json!({"swiglu_limits": [0.0, 7]}), "swiglu_limits is [0.0,7]"),
            (json!({"swiglu_alpha": 1.702}), "swiglu_alpha is 1.702"),
        ] {
            let message = config(value).check_activation().unwrap_err().to_string();
            assert!(message.contains(words), "{message}");
        }
        for value in
            [json!({}), json!({"hidden_act": "silu", "swiglu_limit": null}), json!([1]), json!({"hidden_act": 3})]
        {
            assert!(config(value).check_activation().is_ok());
        }
    }

    #[test]
    fn activations_of_whole_layers_are_those_of_the_models() {
        for (value, activation) in [
            (json!({}), Activation::Silu),
            (json!({"hidden_act": "silu", "hidden_activation": "swish"}), Activation::Silu),
            (json!({"text_config": {"hidden_activation": "gelu_pytorch_tanh"}}), Activation::GeluTanh),
            (json!({"mlp_hidden_act": "relu2"}), Activation::Relu2),
            (json!({"model_type": "gpt_oss", "hidden_act": "silu", "swiglu_limit": 7.0}), Activation::GPT_OSS),
            (
                json!({"model_type": "gpt_oss", "swiglu_alpha": 1.5, "swiglu_limit": 5}),
                Activation::GptOss { alpha: 1.5, limit: 5.0 },
            ),
        ] {
            assert_eq!(config(value).activation().unwrap(), activation);
        }
        for (value, words) in [
            (json!({"hidden_act": "gelu"}), "hidden_act is \"gelu\"; only silu, gelu by tanh and relu2 are computed"),
            (json!({"hidden_act": "silu", "mlp_hidden_act": "relu2"}), "mlp_hidden_act is \"relu2\" and hidden_act is"),
            (json!({"hidden_act": "silu", "swiglu_limit": 7.0}), "swiglu_limit is 7.0"),
            (json!({"model_type": "gpt_oss", "swiglu_limit": -1}), "limit = -1 is not from"),
        ] {
            let message = config(value).activation().unwrap_err().to_string();
            assert!(message.contains(words), "{message}");
        }
    }

    #[test]
    fn transforms_are_refused() {
        let with = |transforms: Value| config(json!({"quantization_config": {"transform_config": transforms}}));
        assert!(with(json!({"config_groups": {"u": {"type": "hadamard"}}})).check_transforms().is_err());
        assert!(with(json!({})).check_transforms().is_ok() && with(json!(null)).check_transforms().is_ok());
    }

    #[test]
    fn quantizations_of_both_libraries_are_understood() {
        let modelopt = config(json!({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4",
            "ignore": ["lm_head", "model.layers.0*", "*.gate"]}}));
        assert_eq!((modelopt.format(), modelopt.quantizes_activations()), (Some(Format::ModelOpt), true));
        for (module, excluded) in [
            ("lm_head", true),
            ("lm_head2", false),
            ("model.layers.0.mlp.up_proj", true),
            ("model.layers.1.mlp.gate", true),
            ("model.layers.1.mlp.gate_proj", false),
        ] {
            assert_eq!(modelopt.excluding(module).is_some(), excluded, "{module}");
        }
        let weights = |bits| {
            json!({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"group_0": {
            "weights": {"num_bits": bits, "group_size": 16}, "input_activations": null}}}})
        };
        let compressed = config(weights(4));
        assert_eq!((compressed.format(), compressed.quantizes_activations()), (Some(Format::CompressedTensors), false));
        assert_eq!(compressed.contradiction(), None);
        assert_eq!(config(weights(8)).contradiction().unwrap(), "num_bits is 8, and NVFP4's is 4");
    }
}
