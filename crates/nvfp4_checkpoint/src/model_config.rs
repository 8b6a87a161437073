//! Reads a model's `config.json`: the facts about layers and quantization that can contradict the tensors.
//!
//! Keys are the ones of transformers configurations. `quantization_config` has the form that ModelOpt and
//! compressed-tensors write; older ModelOpt exports use `hf_quant_config.json` instead.

use std::path::{Path, PathBuf};

use regex::Regex;
use serde_json::Value;

use super::{Checkpoint, Format};
use nvfp4_core::Error;
use nvfp4_core::files::{foreign_kind, read_bounded};
use nvfp4_core::moe::Activation;

/// Upper limit for the size of a configuration, in bytes; lists of thousands of excluded modules take several hundred
/// kilobytes.
const MAX_BYTES: usize = 64 << 20;

/// A model's configuration.
#[derive(Debug)]
pub(super) struct ModelConfig {
    path: PathBuf,
    config: Value,
    /// Part of the model whose layers are read, such as `talker`.
    stack: Option<String>,
    /// Content of `hf_quant_config.json`. A file that cannot be read is an error only if `config` describes no
    /// quantization.
    older: Option<Value>,
}

/// Activation named in the configuration.
struct Word<'a> {
    /// Key of the name.
    key: &'static str,
    word: &'a str,
    /// Activation; `None` if the name is unknown.
    activation: Option<Activation>,
}

impl ModelConfig {
    /// Reads the configuration beside a checkpoint's files; `None` if there is none.
    ///
    /// # Errors
    /// Returns an error if the configuration exists and cannot be read.
    pub(super) fn beside(checkpoint: &Checkpoint) -> Result<Option<Self>, Error> {
        let path = checkpoint.path();
        let folder = if path.is_dir() { path } else { path.parent().unwrap_or(Path::new("")) };
        let path = folder.join("config.json");
        let Some(config) = read(&path)? else { return Ok(None) };
        let mut config = Self { path, config, stack: checkpoint.stack.clone(), older: None };
        config.older = match (config.quantization(), read(&folder.join("hf_quant_config.json"))) {
            (None, older) => older?,
            (Some(_), older) => older.unwrap_or_default(),
        };
        Ok(Some(config))
    }

    /// Path of the configuration, for messages.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Whole configuration.
    pub(super) fn json(&self) -> &Value {
        &self.config
    }

    /// Content of `hf_quant_config.json`.
    pub(super) fn quant_config(&self) -> Option<&Value> {
        self.older.as_ref()
    }

    /// Returns a value of the language model, or of the stack that is read; multimodal models keep these values in a
    /// nested object.
    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        let of_stack = self.stack.as_ref().and_then(|stack| self.config.get(format!("{stack}_config")));
        let of_stack = of_stack.and_then(|stack| stack.get("text_config")).into_iter().chain(of_stack);
        let in_stack = of_stack.filter_map(|part| part.get(key)).find(|value| !value.is_null());
        if in_stack.is_some() {
            return in_stack;
        }
        let parts = ["text_config", "llm_config", "language_config", "thinker_config"];
        let texts = parts.into_iter().filter_map(|part| self.config.get(part));
        let nested = self.config.get("thinker_config").and_then(|thinker| thinker.get("text_config"));
        let everywhere = texts.chain(nested).chain([&self.config]);
        everywhere.filter_map(|part| part.get(key)).find(|value| !value.is_null())
    }

    /// Whether the type of the model or of its language model begins with `name`.
    pub(super) fn is_model(&self, name: &str) -> bool {
        let of = |value: Option<&Value>| value.and_then(Value::as_str).is_some_and(|model| model.starts_with(name));
        of(self.get("model_type")) || of(self.config.get("model_type"))
    }

    /// Same as [`Self::is_model`], for any of these names.
    pub(super) fn is_any(&self, names: &[&str]) -> bool {
        names.iter().any(|name| self.is_model(name))
    }

    /// Returns the first of `keys` whose value is a number, or a list with a number for this layer.
    pub(super) fn number_of_layer<'k>(&self, keys: &[&'k str], layer: usize) -> Option<(&'k str, usize)> {
        keys.iter().find_map(|&key| {
            let value = self.get(key)?;
            let number = value.as_array().map_or(Some(value), |numbers| numbers.get(layer))?;
            Some((key, usize::try_from(number.as_u64()?).ok()?))
        })
    }

    /// Returns the key and the number of shared experts, or their width, if the model says that this layer has some.
    pub(super) fn shared_experts(&self, layer: usize) -> Option<(&'static str, usize)> {
        const COUNTS: [&str; 4] =
            ["n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts"];
        // Other models have these keys without a shared expert.
        const WIDTHS: [(&str, &str); 9] = [
            ("qwen2_moe", "shared_expert_intermediate_size"),
            ("qwen3_next", "shared_expert_intermediate_size"),
            ("qwen3_5", "shared_expert_intermediate_size"),
            ("qwen3_6", "shared_expert_intermediate_size"),
            ("granitemoe", "shared_intermediate_size"),
            ("step3", "share_expert_dim"),
            ("laguna", "shared_expert_intermediate_size"),
            ("lara_mini", "shared_expert_intermediate_size"),
            ("minimax_m3", "shared_intermediate_size"),
        ];
        let width = || {
            let (_, key) = WIDTHS.iter().find(|(model, _)| self.is_model(model))?;
            self.number_of_layer(&[*key], layer)
        };
        let said = self.number_of_layer(&COUNTS, layer).or_else(width);
        said.filter(|(_, number)| *number > 0)
    }

    /// Returns the factor of both outputs in a layer with routed and shared experts: 1 if the layer adds the outputs, ½ if it
    /// averages them (Cohere).
    ///
    /// # Errors
    /// Returns an error if the configuration names another combination.
    pub(super) fn factor_with_shared(&self) -> Result<f32, Error> {
        const KEY: &str = "shared_expert_combination_strategy";
        // Cohere's modules take the average if the key is missing.
        let default = self.is_model("cohere2_moe").then_some("average");
        match self.get(KEY).and_then(Value::as_str).or(default) {
            None | Some("sum") => Ok(1.0),
            Some("average") => Ok(0.5),
            Some(word) => {
                let what = format!(
                    "{KEY} is {word}, but only the sum and the average of routed and shared experts are computed"
                );
                Err(Error::NotComputed(what).at(self.path.display()))
            }
        }
    }

    /// Refuses a model whose experts do not compute `silu(gate) · up`.
    ///
    /// # Errors
    /// Returns an error if the configuration names another activation, or a limit of the activation.
    pub(super) fn check_activation(&self) -> Result<(), Error> {
        match self.activation_word()? {
            Some(Word { key, word, activation }) if activation != Some(Activation::Silu) => {
                let what = format!("{key} is {word:?}; only silu is supported");
                Err(Error::NotComputed(what).at(self.path.display()))
            }
            _ => self.check_limits(),
        }
    }

    /// Returns the activation of the routed experts of an MoE layer, or of its shared expert (`is_shared`), whose limit may
    /// be another one.
    ///
    /// Sources: `GptOssExperts`, `MiniMaxM3VLExperts`, `DeepseekV4Experts`, `Glm5NextTextMLP`, `HYV4MLP`, `HYV4Experts`,
    /// `Step3p7MLP` and `Step3p7Experts` in transformers; `SituAndMul` and `SiluAndMulWithClamp` in vLLM.
    ///
    /// # Errors
    /// Returns an error if the activation is not supported in MoE layers.
    pub(super) fn activation(&self, layer: usize, is_shared: bool) -> Result<Activation, Error> {
        /// Models that clamp gate and up before SiLU, and models that clamp the result of SiLU and up.
        const CLAMPED_BEFORE: [&str; 3] = ["deepseek_v4", "glm5_next", "hy_v4"];
        const CLAMPED_AFTER: [&str; 2] = ["step3", "step5"];
        let at = |error: Error| error.at(self.path.display());
        let number = |key| self.get(key).and_then(Value::as_f64).map(|number| number as f32);
        let word = self.activation_word()?;
        // gpt-oss and MiniMax-M3 declare silu, but their modules compute this, with gpt-oss's numbers as defaults.
        let is_oai = word.as_ref().is_some_and(|word| word.word.starts_with("swigluoai"));
        let activation = if is_oai || self.is_any(&["gpt_oss", "minimax_m3"]) {
            let (alpha, limit) = (number("swiglu_alpha").unwrap_or(1.702), number("swiglu_limit").unwrap_or(7.0));
            match number("swiglu_beta") {
                None | Some(1.0) => Activation::GptOss { alpha, limit },
                Some(offset) => Activation::SwigluOai { alpha, limit, offset },
            }
        } else if word.as_ref().is_some_and(|word| word.word == "situ") {
            let beta = number("activation_situ_beta").ok_or_else(|| {
                let remedy = "it is the beta of SiTU; download the model again".into();
                at(Error::Missing { name: "activation_situ_beta".into(), remedy })
            })?;
            Activation::Situ { beta, linear: number("activation_situ_linear_beta") }
        } else {
            let activation = match word {
                None => Activation::Silu,
                Some(Word { activation: Some(activation), .. }) => activation,
                Some(Word { key, word, activation: None }) => {
                    let what = format!("{key} is {word:?}; only silu, gelu, relu2, situ and swigluoai are supported");
                    return Err(at(Error::NotComputed(what)));
                }
            };
            match self.limit_of_layer(layer, is_shared)? {
                None => activation,
                Some(limit) if activation == Activation::Silu && self.is_any(&CLAMPED_BEFORE) => {
                    Activation::SiluLimit { limit }
                }
                Some(limit) if activation == Activation::Silu && self.is_any(&CLAMPED_AFTER) => {
                    Activation::SwigluStep { limit }
                }
                Some(_) => {
                    self.check_limits()?;
                    activation
                }
            }
        };
        activation.check().map(|()| activation).map_err(at)
    }

    /// Returns the limit of gate and up in a layer: of its routed experts, or of its shared expert. `None`: there is no limit.
    ///
    /// # Errors
    /// Returns an error if gate has a factor inside the sigmoid.
    fn limit_of_layer(&self, layer: usize, is_shared: bool) -> Result<Option<f32>, Error> {
        let of_keys = |keys: [&str; 2]| {
            let found = keys.into_iter().find_map(|key| {
                let value = self.get(key)?;
                let number = value.as_array().map_or(Some(value), |numbers| numbers.get(layer))?;
                // 0 stands for no limit.
                number.as_f64().filter(|limit| *limit != 0.0)
            });
            found.map(|limit| limit as f32)
        };
        let shared_keys = ["swiglu_limit_shared", "swiglu_limits_shared"];
        // Other models clamp the shared expert with the routed experts' limit, unless the shared expert has its own.
        let is_apart = self.is_any(&["step3", "step5", "hy_v4"]);
        let has_own = is_shared && (is_apart || shared_keys.iter().any(|key| self.get(key).is_some()));
        let limit = of_keys(if has_own { shared_keys } else { ["swiglu_limit", "swiglu_limits"] });
        if let Some(alpha) = self.get("swiglu_alpha").filter(|alpha| alpha.as_f64() != Some(1.0)) {
            let what = format!("swiglu_alpha is {alpha}; only silu(gate) * up without a factor is supported");
            return Err(Error::NotComputed(what).at(self.path.display()));
        }
        Ok(limit)
    }

    /// Returns the name of the activation.
    fn activation_word(&self) -> Result<Option<Word<'_>>, Error> {
        let refuse = |what: String| Err(Error::NotComputed(what).at(self.path.display()));
        let mut found: Option<Word<'_>> = None;
        for key in ["hidden_act", "hidden_activation", "mlp_hidden_act", "activation_function", "activation"] {
            let word = match self.get(key) {
                None | Some(Value::Null) => continue,
                Some(Value::String(word)) => word.as_str(),
                Some(other) => return refuse(format!("{key} is {other}; one name for all layers is expected")),
            };
            let activation = match word {
                "silu" | "swish" | "swiglu" => Some(Activation::Silu),
                "gelu" => Some(Activation::Gelu),
                "gelu_pytorch_tanh" | "gelu_new" => Some(Activation::GeluTanh),
                "relu2" => Some(Activation::Relu2),
                _ => None,
            };
            match found {
                Some(Word { key: before, word: other, activation: known }) if known != activation => {
                    return refuse(format!("{key} is {word:?} but {before} is {other:?}; remove the wrong one"));
                }
                _ => found = Some(Word { key, word, activation }),
            }
        }
        Ok(found)
    }

    /// Refuses limits of gate and up, and a factor of gate inside the sigmoid.
    fn check_limits(&self) -> Result<(), Error> {
        // One number, or one number per layer; 0 stands for no limit.
        const LIMITS: [(&str, f64); 5] = [
            ("swiglu_limit", 0.0),
            ("swiglu_limits", 0.0),
            ("swiglu_limit_shared", 0.0),
            ("swiglu_limits_shared", 0.0),
            ("swiglu_alpha", 1.0),
        ];
        for (key, none) in LIMITS {
            let Some(value) = self.get(key) else { continue };
            let numbers = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
            if numbers.iter().any(|number| !number.is_null() && number.as_f64() != Some(none)) {
                let what = format!("{key} is {value}; only silu(gate) * up without limits is supported");
                return Err(Error::NotComputed(what).at(self.path.display()));
            }
        }
        Ok(())
    }

    /// Refuses a model that transforms activations while it runs. Transforms of weights are already part of the weights.
    ///
    /// # Errors
    /// Returns an error if the configuration contains such a transform, or one that cannot be read.
    pub(super) fn check_transforms(&self) -> Result<(), Error> {
        self.check_fp_quant()?;
        match self.transforms()?.into_iter().find(|transform| !transform.is_of_weights()) {
            None => Ok(()),
            Some(Transform { group, kind, location, .. }) => Err(self.refused_transform(&format!(
                "transform {group} ({kind}) of transform_config changes activations at {location} while the model runs (as \
                 MR-GPTQ does), which only `nvfp4 run --op linear` computes, and `--op moe` for experts in separate tensors"
            ))),
        }
    }

    /// Returns the transform of the tokens that a linear module reads; `None` if there is none.
    ///
    /// # Errors
    /// Returns an error if the module has a transform that is not computed.
    pub(super) fn input_transform(&self, module: &str) -> Result<Option<InputTransform<'_>>, Error> {
        self.check_fp_quant()?;
        let mut found = None;
        for transform in self.transforms()?.into_iter().filter(|transform| transform.targets(module)) {
            let Transform { group, kind, location, scheme, apply } = transform;
            let refuse = |what: &str| Err(self.refused_transform(&format!("transform {group} of {module} {what}")));
            match location {
                // Transforms of weights are already part of the weights; queries and keys lie behind the projections.
                "weight_input" | "weight_output" | "q_attn" | "k_cache" => continue,
                "input" => {}
                other => return refuse(&format!("is at {other}, which is not computed")),
            }
            if !["hadamard", "random-hadamard"].contains(&kind) {
                return refuse(&format!("is of type {kind}, which is not computed"));
            }
            if scheme.get("randomize").is_some_and(|randomize| randomize != false) {
                return refuse("permutes its matrix (randomize), which is not computed");
            }
            let block = match scheme.get("head_dim") {
                None | Some(Value::Null) => None,
                Some(size) => match size.as_u64().and_then(|size| usize::try_from(size).ok()) {
                    Some(size) => Some(size),
                    None => return refuse(&format!("has head_dim {size}, which is not a size")),
                },
            };
            let inverse = apply.get("inverse").is_some_and(|inverse| inverse == true);
            if found.replace(InputTransform { group, kind, block, inverse }).is_some() {
                return refuse("transforms the tokens a second time, which is not computed");
            }
        }
        Ok(found)
    }

    /// Refuses FP-Quant's own form. Its layer multiplies weights and tokens by `forward_hadamard_matrix`, block by block, and
    /// stores `qweight` and `scales`, or `dqweight`, of the product (package `fp_quant` 0.3.2, `module/linear.py`).
    fn check_fp_quant(&self) -> Result<(), Error> {
        if self.method() == Some("fp_quant") {
            let what = "quant_method is fp_quant: its weights (qweight and scales, or dqweight) are multiplied by \
                        forward_hadamard_matrix, and so are its tokens while the model runs, which is not computed; quantize \
                        the model from which it was made";
            return Err(Error::NotComputed(what.to_owned()).at(self.path.display()));
        }
        Ok(())
    }

    fn refused_transform(&self, what: &str) -> Error {
        Error::NotComputed(format!("{what}; export the model without it")).at(self.path.display())
    }

    /// Returns the places of all transforms of `transform_config`.
    ///
    /// # Errors
    /// Returns an error if one has another form than compressed-tensors'.
    fn transforms(&self) -> Result<Vec<Transform<'_>>, Error> {
        let unknown =
            |place: &str| self.refused_transform(&format!("transform_config has a form that is not known ({place})"));
        let config = match self.quantization().and_then(|quantization| quantization.get("transform_config")) {
            None | Some(Value::Null) => return Ok(Vec::new()),
            Some(config) => config.as_object().ok_or_else(|| unknown("it is no object"))?,
        };
        let groups = match config.get("config_groups") {
            None if config.is_empty() => return Ok(Vec::new()),
            groups => groups.and_then(Value::as_object).ok_or_else(|| unknown("config_groups"))?,
        };
        let mut transforms = Vec::new();
        for (group, scheme) in groups {
            let kind =
                scheme.get("type").and_then(Value::as_str).ok_or_else(|| unknown(&format!("type of {group}")))?;
            let places = scheme.get("apply").and_then(Value::as_array);
            for apply in places.ok_or_else(|| unknown(&format!("apply of {group}")))? {
                let location = apply.get("location").and_then(Value::as_str);
                let location = location.ok_or_else(|| unknown(&format!("location of {group}")))?;
                transforms.push(Transform { group, kind, location, scheme, apply });
            }
        }
        Ok(transforms)
    }

    /// Returns the description of the quantization; `None` if there is none.
    pub(super) fn quantization(&self) -> Option<&Value> {
        let found = |config: &'_ Value| config.get("quantization_config").is_some_and(Value::is_object);
        if found(&self.config) {
            return self.config.get("quantization_config");
        }
        self.get("quantization_config").or_else(|| self.older.as_ref()?.get("quantization"))
    }

    /// Returns the name of the quantization's library.
    pub(super) fn method(&self) -> Option<&str> {
        self.quantization()?.get("quant_method")?.as_str()
    }

    /// Returns the format that the NVFP4 tensors should have; `None` if this library does not know it.
    pub(super) fn format(&self) -> Option<Format> {
        let quantization = self.quantization()?;
        match self.method() {
            // AutoRound stores NVFP4 (`nv_fp`) under the names of compressed-tensors.
            Some("compressed-tensors" | "auto-round" | "auto_round") => Some(Format::CompressedTensors),
            Some(method) if method.starts_with("modelopt") || method == "quark" => Some(Format::ModelOpt),
            // ModelOpt's DeepSeek-V4: FP8, with experts in NVFP4.
            Some("fp8") if self.says_nvfp4() => Some(Format::ModelOpt),
            None => quantization.get("quant_algo").map(|_| Format::ModelOpt),
            _ => None,
        }
    }

    /// Whether servers also quantize the activations of NVFP4 weights, which requires input scales.
    pub(super) fn quantizes_activations(&self) -> bool {
        let Some(quantization) = self.quantization() else { return false };
        let algorithm = |key| quantization.get(key).and_then(Value::as_str);
        match algorithm("quant_algo") {
            Some("MIXED_PRECISION") => quantized_layers(quantization).any(|(_, algorithm)| algorithm == "NVFP4"),
            Some(algorithm) => algorithm == "NVFP4",
            None => groups(quantization).filter(|group| group.get("weights").is_some_and(is_nvfp4)).any(|group| {
                // `"dynamic": "local"`: block scales come from the tokens, the global scale from the model.
                group
                    .get("input_activations")
                    .is_some_and(|inputs| inputs.get("dynamic").is_some_and(|dynamic| dynamic != true))
            }),
        }
    }

    /// Returns the algorithm if the model's input scales are for FP8 tokens, which mean nothing for NVFP4 tokens.
    pub(super) fn fp8_tokens(&self) -> Option<&str> {
        self.quantization()?.get("quant_algo")?.as_str().filter(|algorithm| algorithm.starts_with("W4A8"))
    }

    /// Whether the configuration describes NVFP4 weights, of the whole model or of a part.
    pub(super) fn says_nvfp4(&self) -> bool {
        let Some(quantization) = self.quantization() else { return false };
        let says = |value: &Value| value.as_str().is_some_and(|word| word.to_ascii_lowercase().contains("nvfp4"));
        let is_auto_round = |value: &Value| value.as_str().is_some_and(|word| word.starts_with("nv_fp"));
        let words = ["quant_algo", "moe_quant_algo", "format"].into_iter().filter_map(|key| quantization.get(key));
        words.chain(groups(quantization).filter_map(|group| group.get("format"))).any(says)
            || quantized_layers(quantization).any(|(_, algorithm)| algorithm.contains("NVFP4"))
            || quark_weights(quantization).any(is_nvfp4)
            || quantization.get("data_type").is_some_and(is_auto_round)
    }

    /// Returns a message if the description has no NVFP4 weights because the block size or the number of bits differs.
    pub(super) fn contradiction(&self) -> Option<String> {
        let quantization = self.quantization()?;
        let weights =
            || groups(quantization).filter_map(|group| group.get("weights")).chain(quark_weights(quantization));
        // A model with several formats is right if one of them is NVFP4.
        if weights().any(is_nvfp4) || quantized_layers(quantization).any(|(_, algorithm)| algorithm.contains("NVFP4")) {
            return None;
        }
        for weights in weights().chain([quantization]) {
            for (key, expected) in NVFP4 {
                if let Some(number) = weights.get(key).and_then(Value::as_u64).filter(|number| *number != expected) {
                    return Some(format!("{key} is {number}, but NVFP4 has {expected}"));
                }
            }
        }
        None
    }

    /// Returns the algorithm that the description gives to a module by name, in `quantized_layers`.
    pub(super) fn algorithm_of(&self, module: &str) -> Option<&str> {
        let layers = quantized_layers(self.quantization()?);
        let of_module = layers.filter(|(name, _)| is_inside(module, name));
        // The most specific entry counts.
        of_module.max_by_key(|(name, _)| name.len()).map(|(_, algorithm)| algorithm)
    }

    /// Returns the entry that excludes a module from quantization: a name, a pattern with `*`, or `re:` and a regular
    /// expression for the beginning of the name.
    pub(super) fn excluding(&self, module: &str) -> Option<&str> {
        let quantization = self.quantization()?;
        let lists = ["ignore", "exclude_modules", "modules_to_not_convert", "exclude"];
        let lists = lists.into_iter().filter_map(|key| quantization.get(key));
        let mut entries = lists.filter_map(Value::as_array).flatten().filter_map(Value::as_str);
        entries.find(|entry| match entry.strip_prefix("re:") {
            // An expression that this library cannot read excludes nothing here.
            Some(regex) => Regex::new(&format!("^(?:{regex})")).is_ok_and(|regex| regex.is_match(module)),
            None => is_inside(module, entry) || matches_glob(entry, module),
        })
    }

    /// Returns the description of a quantized KV cache in both forms: ModelOpt's algorithm and compressed-tensors'
    /// scheme.
    pub(super) fn kv_cache(&self) -> (Option<&str>, Option<&Value>) {
        let Some(quantization) = self.quantization() else { return (None, None) };
        let algorithm = quantization.get("kv_cache_quant_algo").and_then(Value::as_str);
        (algorithm, quantization.get("kv_cache_scheme").filter(|scheme| scheme.is_object()))
    }

    /// Returns the first of `keys` whose value is a number.
    pub(super) fn number<'k>(&self, keys: &[&'k str]) -> Option<(&'k str, usize)> {
        keys.iter().find_map(|&key| Some((key, usize::try_from(self.get(key)?.as_u64()?).ok()?)))
    }
}

/// A transform of the tokens that a linear module reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct InputTransform<'c> {
    /// Name of the transform.
    pub group: &'c str,
    /// `hadamard` or `random-hadamard`.
    pub kind: &'c str,
    /// Number of columns that are transformed together; `None`: all.
    pub block: Option<usize>,
    /// Whether the transposed matrix is multiplied.
    pub inverse: bool,
}

/// A place at which a transform of `transform_config` is applied.
struct Transform<'c> {
    group: &'c str,
    kind: &'c str,
    location: &'c str,
    scheme: &'c Value,
    apply: &'c Value,
}

impl Transform<'_> {
    /// Whether the transform is already part of the weights.
    fn is_of_weights(&self) -> bool {
        ["weight_input", "weight_output"].contains(&self.location)
    }

    /// Whether the transform is applied to a linear module: `targets` has its name, a class of linear layers, or `re:` and
    /// a regular expression for the beginning of the name; and `ignore` does not.
    fn targets(&self, module: &str) -> bool {
        let has = |key: &str| {
            let list = self.apply.get(key);
            let entries =
                list.map_or(&[][..], |list| list.as_array().map_or(std::slice::from_ref(list), Vec::as_slice));
            entries.iter().filter_map(Value::as_str).any(|entry| match entry.strip_prefix("re:") {
                Some(regex) => Regex::new(&format!("^(?:{regex})")).is_ok_and(|regex| regex.is_match(module)),
                None => entry == module || !entry.contains('.') && entry.ends_with("Linear"),
            })
        };
        has("targets") && !has("ignore")
    }
}

fn groups(quantization: &Value) -> impl Iterator<Item = &Value> {
    quantization.get("config_groups").and_then(Value::as_object).into_iter().flat_map(|groups| groups.values())
}

/// Keys of a description of weights, and their values for NVFP4.
const NVFP4: [(&str, u64); 2] = [("group_size", 16), ("num_bits", 4)];

/// Whether a description of weights is one of NVFP4.
fn is_nvfp4(weights: &Value) -> bool {
    let number = |key: &str| weights.get(key).and_then(Value::as_u64);
    let is_quark = weights.get("dtype").and_then(Value::as_str) == Some("fp4") && number("group_size") == Some(16);
    is_quark || number("num_bits") == Some(4) && number("group_size").is_none_or(|size| size == 16)
}

/// Names and algorithms of `quantized_layers`, with which ModelOpt describes models of several formats.
fn quantized_layers(quantization: &Value) -> impl Iterator<Item = (&str, &str)> {
    let layers = quantization.get("quantized_layers").and_then(Value::as_object);
    layers.into_iter().flatten().filter_map(|(name, layer)| Some((&name[..], layer.get("quant_algo")?.as_str()?)))
}

/// Descriptions of weights in Quark's form: of the whole model and of single layers. Two-level scales are a list.
fn quark_weights(quantization: &Value) -> impl Iterator<Item = &Value> {
    let of_layers = quantization.get("layer_quant_config").and_then(Value::as_object);
    let all =
        quantization.get("global_quant_config").into_iter().chain(of_layers.into_iter().flat_map(|all| all.values()));
    let weights = all.filter_map(|config| config.get("weight"));
    weights.flat_map(|weight| weight.as_array().map_or(std::slice::from_ref(weight), Vec::as_slice))
}

/// Returns `true` if `module` is the module `outer` or lies inside it.
fn is_inside(module: &str, outer: &str) -> bool {
    module.strip_prefix(outer).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Returns `true` if a pattern, in which `*` stands for any text, matches the whole name.
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

/// Reads a JSON file; `None` if it does not exist.
fn read(path: &Path) -> Result<Option<Value>, Error> {
    if path.symlink_metadata().is_err() {
        return Ok(None);
    }
    let bytes = read_bounded(path, MAX_BYTES, "a model's configuration")?;
    let invalid = |error: serde_json::Error| match foreign_kind(&bytes) {
        Some(kind) => Error::Invalid(kind.into()),
        None => Error::Invalid(format!("not a valid configuration: {error}; download it again")),
    };
    serde_json::from_slice(&bytes).map(Some).map_err(|error| invalid(error).at(path.display()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    impl ModelConfig {
        /// A configuration for tests.
        pub(crate) fn of_test(config: Value) -> Self {
            Self { path: "config.json".into(), config, stack: None, older: None }
        }
    }

    fn config(config: Value) -> ModelConfig {
        ModelConfig::of_test(config)
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
            (json!({"hidden_act": ["silu", "gelu"]}), "hidden_act is [\"silu\",\"gelu\"]; one name for all layers"),
        ] {
            let message = config(value).check_activation().unwrap_err().to_string();
            assert!(message.contains(words), "{message}");
        }
        for value in [json!({}), json!({"hidden_act": "silu", "swiglu_limit": null}), json!([1])] {
            assert!(config(value).check_activation().is_ok());
        }
    }

    #[test]
    fn moe_activation_follows_the_configuration() {
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
            (json!({"hidden_act": "gelu"}), Activation::Gelu),
            (
                json!({"hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0}),
                Activation::Situ { beta: 4.0, linear: Some(25.0) },
            ),
            (
                json!({"hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": null}),
                Activation::Situ { beta: 4.0, linear: None },
            ),
            (json!({"hidden_act": "swigluoai", "swiglu_limit": 7.0, "swiglu_alpha": 1.702}), Activation::GPT_OSS),
            (
                json!({"model_type": "minimax_m3_vl", "hidden_act": "silu", "swiglu_beta": 0.5}),
                Activation::SwigluOai { alpha: 1.702, limit: 7.0, offset: 0.5 },
            ),
            (
                json!({"model_type": "deepseek_v4", "hidden_act": "silu", "swiglu_limit": 10.0}),
                Activation::SiluLimit { limit: 10.0 },
            ),
            (json!({"model_type": "step3p5", "swiglu_limits": [0, 7]}), Activation::SwigluStep { limit: 7.0 }),
            (json!({"model_type": "step3p5", "swiglu_limits": [7, 0.0]}), Activation::Silu),
        ] {
            assert_eq!(config(value).activation(1, false).unwrap(), activation);
        }
        for (value, words) in [
            (
                json!({"hidden_act": "tanh"}),
                "hidden_act is \"tanh\"; only silu, gelu, relu2, situ and swigluoai are supported",
            ),
            (json!({"hidden_act": 3}), "hidden_act is 3; one name for all layers is expected"),
            (json!({"hidden_act": "situ"}), "activation_situ_beta is missing"),
            (json!({"hidden_act": "silu", "mlp_hidden_act": "relu2"}), "mlp_hidden_act is \"relu2\" but hidden_act is"),
            (json!({"hidden_act": "silu", "swiglu_limit": 7.0}), "swiglu_limit is 7.0"),
            (json!({"model_type": "gpt_oss", "swiglu_limit": -1}), "limit = -1 is not from"),
        ] {
            let message = config(value).activation(1, true).unwrap_err().to_string();
            assert!(message.contains(words), "{message}");
        }
        let step = config(json!({"model_type": "step3p5", "swiglu_limits": [0, 7], "swiglu_limits_shared": [16, 0]}));
        let of = |layer| [false, true].map(|is_shared| step.activation(layer, is_shared).unwrap());
        assert_eq!(of(0), [Activation::Silu, Activation::SwigluStep { limit: 16.0 }]);
        assert_eq!(of(1), [Activation::SwigluStep { limit: 7.0 }, Activation::Silu]);
        // Without a limit of its own, the shared expert of these models has none; in DeepSeek-V4 it has the routed experts'.
        let limit = 7.0;
        for (model, routed, shared) in [
            ("step3p7_text", Activation::SwigluStep { limit }, Activation::Silu),
            ("hy_v4", Activation::SiluLimit { limit }, Activation::Silu),
            ("glm5_next_text", Activation::SiluLimit { limit }, Activation::SiluLimit { limit }),
            ("deepseek_v4", Activation::SiluLimit { limit }, Activation::SiluLimit { limit }),
        ] {
            let config = config(json!({"model_type": model, "swiglu_limit": limit}));
            assert_eq!([false, true].map(|is_shared| config.activation(0, is_shared).unwrap()), [routed, shared]);
        }
    }

    #[test]
    fn routed_and_shared_experts_are_summed_or_averaged() {
        const KEY: &str = "shared_expert_combination_strategy";
        for (value, factor) in [
            (json!({}), 1.0),
            (json!({"model_type": "cohere2_moe", KEY: "sum"}), 1.0),
            (json!({"model_type": "cohere2_moe"}), 0.5),
            (json!({KEY: "average"}), 0.5),
        ] {
            assert_eq!(config(value).factor_with_shared().unwrap(), factor);
        }
        let message = config(json!({KEY: "product"})).factor_with_shared().unwrap_err().to_string();
        assert!(message.contains("shared_expert_combination_strategy is product"), "{message}");
    }

    #[test]
    fn transforms_of_activations_are_refused() {
        let with = |transforms: Value| config(json!({"quantization_config": {"transform_config": transforms}}));
        let at =
            |location: &str| json!({"config_groups": {"u": {"type": "hadamard", "apply": [{"location": location}]}}});
        for refused in [at("input"), at("output"), at("k_cache"), at("elsewhere")] {
            let message = with(refused).check_transforms().unwrap_err().to_string();
            assert!(message.contains("transform u (hadamard)"), "{message}");
        }
        for unknown in [json!({"config_groups": {"u": {"type": "hadamard"}}}), json!([1]), json!({"groups": {}})] {
            let message = with(unknown).check_transforms().unwrap_err().to_string();
            assert!(message.contains("a form that is not known"), "{message}");
        }
        let fp_quant = config(json!({"quantization_config": {"quant_method": "fp_quant", "forward_dtype": "nvfp4"}}));
        let refusal = fp_quant.check_transforms().unwrap_err().to_string();
        assert!(
            refusal.contains("quant_method is fp_quant") && refusal.contains("forward_hadamard_matrix"),
            "{refusal}"
        );
        for computed in [json!({}), json!(null), at("weight_input"), at("weight_output")] {
            assert!(with(computed).check_transforms().is_ok());
        }
    }

    #[test]
    fn transform_of_a_module_is_found_by_target() {
        let with = |group: Value, apply: Value| {
            let mut group = group;
            group["apply"] = apply;
            config(json!({"quantization_config": {"transform_config": {"config_groups": {"r": group}}}}))
        };
        let plain = || json!({"type": "hadamard", "head_dim": 32});
        let found = |targets: Value, ignore: Value| {
            let apply = json!([{"targets": targets, "location": "input", "ignore": ignore}]);
            with(plain(), apply).input_transform("a.q_proj").unwrap().map(|transform| transform.block)
        };
        for (targets, ignore, expected) in [
            (json!(["Linear"]), json!([]), Some(Some(32))),
            (json!("a.q_proj"), json!([]), Some(Some(32))),
            (json!(["re:.*q_proj$"]), json!([]), Some(Some(32))),
            (json!(["Linear"]), json!(["re:.*q_proj"]), None),
            (json!(["re:.*k_proj"]), json!([]), None),
            (json!(["a.q"]), json!([]), None),
        ] {
            assert_eq!(found(targets.clone(), ignore), expected, "{targets}");
        }
        let input = json!([{"targets": ["Linear"], "location": "input"}]);
        let twice = json!([{"targets": ["Linear"], "location": "input"}, {"targets": ["Linear"], "location": "input"}]);
        let output = json!([{"targets": ["Linear"], "location": "output"}]);
        for (group, apply, words) in [
            (plain(), output, "is at output"),
            (plain(), twice, "a second time"),
            (json!({"type": "random-matrix"}), input.clone(), "of type random-matrix"),
            (json!({"type": "hadamard", "randomize": true}), input.clone(), "randomize"),
            (json!({"type": "hadamard", "head_dim": -1}), input, "head_dim -1"),
        ] {
            let message = with(group, apply).input_transform("a.q_proj").unwrap_err().to_string();
            assert!(message.contains(words), "{message}");
        }
    }

    #[test]
    fn quantization_configs_of_both_libraries_are_read() {
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
        let excluded = |entry: &str, module: &str| {
            config(json!({"quantization_config": {"ignore": [entry]}})).excluding(module).is_some()
        };
        assert!(excluded(r"re:.*\.mlp\.gate$", "model.layers.1.mlp.gate"));
        assert!(!excluded(r"re:.*\.mlp\.gate$", "model.layers.1.mlp.gate_proj"));
        assert!(excluded("re:model", "model.layers.1") && !excluded("re:layers", "model.layers.1"));
        assert!(!excluded("re:(", "("));
        let compressed = config(weights(4));
        assert_eq!((compressed.format(), compressed.quantizes_activations()), (Some(Format::CompressedTensors), false));
        assert_eq!(compressed.contradiction(), None);
        assert_eq!(config(weights(8)).contradiction().unwrap(), "num_bits is 8, but NVFP4 has 4");
    }

    #[test]
    fn models_of_several_formats_are_nvfp4_in_part() {
        let groups = json!({"a": {"weights": {"num_bits": 8}, "input_activations": {"dynamic": false}},
            "b": {"weights": {"num_bits": 4, "group_size": 16}, "input_activations": null}});
        let by_groups =
            json!({"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups});
        let by_layers = json!({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {
            "a.mlp": {"quant_algo": "NVFP4"}, "a.mlp.gate_proj": {"quant_algo": "FP8"}}});
        let deepseek_v4 = json!({"quant_method": "fp8", "weight_block_size": [128, 128], "moe_quant_algo": "NVFP4"});
        let quark = json!({"quant_method": "quark", "global_quant_config": {"weight": [
            {"dtype": "fp4", "group_size": 16}, {"dtype": "float32"}]}});
        for (quantization, format, activations) in [
            (by_groups, Format::CompressedTensors, false),
            (by_layers.clone(), Format::ModelOpt, true),
            (deepseek_v4, Format::ModelOpt, false),
            (quark, Format::ModelOpt, false),
            (
                json!({"quant_method": "auto-round", "data_type": "nv_fp", "bits": 4, "group_size": 16}),
                Format::CompressedTensors,
                false,
            ),
        ] {
            let config = config(json!({"quantization_config": quantization}));
            assert_eq!((config.format(), config.contradiction()), (Some(format), None));
            assert_eq!(config.quantizes_activations(), activations);
        }
        let by_layers = config(json!({"quantization_config": by_layers}));
        let of = |module| by_layers.algorithm_of(module);
        assert_eq!([of("a.mlp.up_proj"), of("a.mlp.gate_proj"), of("a.mlp2")], [Some("NVFP4"), Some("FP8"), None]);
        assert_eq!(config(json!({"quantization_config": {"quant_method": "fp8"}})).format(), None);
    }
}
