//! Writes the files that servers read beside the weights: `config.json` and ModelOpt's `hf_quant_config.json`. The
//! description of the quantization follows vLLM 0.24 (`ModelOptNvFp4Config.from_config`,
//! `CompressedTensorsConfig.from_config`). Also decides which other files of a model are copied.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::place::{folder, is_one_file};
use crate::file::TensorFile;
use crate::model_config::ModelConfig;
use crate::names::natural;
use crate::{Checkpoint, Format};
use nvfp4_core::Error;
use nvfp4_core::format::BLOCK;

/// File that describes a model.
pub(super) const CONFIG: &str = "config.json";

/// File in which ModelOpt describes a quantization.
pub(super) const QUANT_CONFIG: &str = "hf_quant_config.json";

/// Maximum size in bytes of a small file beside the weights.
const MAX_SMALL_BYTES: u64 = 256 << 20;

/// Endings of files with weights: weights of this model, or the same weights in another form.
const WEIGHTS: [&str; 13] = [
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".ggml",
    ".onnx",
    ".msgpack",
    ".h5",
    ".npz",
    ".nemo",
    ".index.json",
];

/// Keys that hold the description of a quantization.
const DESCRIPTIONS: [&str; 2] = ["quantization_config", "compression_config"];

/// Configuration of a model; empty if there is none.
#[derive(Debug, Default)]
pub(crate) struct Config(Option<ModelConfig>);

impl Config {
    /// Reads the configuration beside a model's files.
    ///
    /// # Errors
    /// Returns an error if the configuration exists and cannot be read, or is not a JSON object.
    pub(super) fn beside(checkpoint: &Checkpoint) -> Result<Self, Error> {
        let config = ModelConfig::beside(checkpoint)?;
        match &config {
            Some(config) if !config.json().is_object() => {
                let what = "not a valid configuration: expected a JSON object; download it again";
                Err(Error::Invalid(what.into()).at(config.path().display()))
            }
            _ => Ok(Self(config)),
        }
    }

    /// Reads the configuration beside a model's files, and lists the other files. For a single file both are empty if the
    /// configuration, which can belong to another model, cannot be read.
    ///
    /// # Errors
    /// Returns an error if the configuration or the folder cannot be read.
    pub(crate) fn and_others(checkpoint: &Checkpoint) -> Result<(Self, Others), Error> {
        let config = Self::beside(checkpoint);
        if is_one_file(checkpoint) {
            return Ok((config.unwrap_or_default(), Others::default()));
        }
        let shards = checkpoint.files().iter().map(TensorFile::path).collect();
        Ok((config?, Others::of(folder(checkpoint), &shards)?))
    }

    /// Refuses weights that are transformed together with the tokens: as floats they would be another model.
    pub(super) fn check_transforms(&self) -> Result<(), Error> {
        self.0.as_ref().map_or(Ok(()), ModelConfig::check_transforms)
    }

    /// Returns the text of the configuration without a quantization, for weights of this type; `None` if there is none.
    pub(super) fn dequantized(&self, dtype: &str) -> Option<String> {
        let mut json = self.0.as_ref()?.json().as_object()?.clone();
        json.values_mut().filter_map(Value::as_object_mut).for_each(remove_descriptions);
        remove_descriptions(&mut json);
        if !DTYPES.iter().any(|key| json.contains_key(*key)) {
            json.insert(DTYPES[0].into(), dtype.into());
        }
        let set = |part: &mut Map<String, Value>| {
            for key in DTYPES {
                part.entry(key).and_modify(|value| *value = dtype.into());
            }
        };
        json.values_mut().filter_map(Value::as_object_mut).for_each(set);
        set(&mut json);
        Some(format!("{:#}\n", Value::Object(json)))
    }

    /// Returns the texts of `config.json` and `hf_quant_config.json` with further modules that are not quantized.
    pub(super) fn with_ignored(&self, modules: &BTreeSet<&str>) -> (Option<String>, Option<String>) {
        let Some(config) = &self.0 else { return (None, None) };
        let add = |description: &mut Value, keys: [&str; 3]| {
            let key = keys.into_iter().find(|key| description.get(key).is_some_and(Value::is_array)).unwrap_or(keys[0]);
            if let Some(description) = description.as_object_mut() {
                let list = description.entry(key).or_insert_with(|| json!([]));
                if let Some(list) = list.as_array_mut() {
                    list.extend(modules.iter().map(|module| Value::from(*module)));
                }
            }
        };
        let mut json = config.json().clone();
        if let Some(description) = json.get_mut(DESCRIPTIONS[0]).filter(|description| description.is_object()) {
            add(description, ["ignore", "modules_to_not_convert", "exclude"]);
        }
        let older = config.quant_config().cloned().map(|mut older| {
            if let Some(description) = older.get_mut("quantization") {
                add(description, ["exclude_modules", "ignore", "modules_to_not_convert"]);
            }
            format!("{older:#}\n")
        });
        (Some(format!("{json:#}\n")), older)
    }

    /// Whether there is a configuration.
    pub(super) fn exists(&self) -> bool {
        self.0.is_some()
    }

    /// Returns a size of the language model.
    pub(super) fn number(&self, key: &str) -> Option<usize> {
        self.0.as_ref()?.number(&[key]).map(|(_, number)| number)
    }

    /// Returns the model type.
    pub(crate) fn model_type(&self) -> Option<&str> {
        self.0.as_ref()?.get("model_type")?.as_str()
    }

    /// Returns the sizes of the blocks that share an FP8 scale.
    pub(super) fn fp8_block(&self) -> Option<[usize; 2]> {
        let sizes = self.0.as_ref()?.quantization()?.get("weight_block_size")?.as_array()?;
        let [lines, elements] = &sizes[..] else { return None };
        let size = |size: &Value| usize::try_from(size.as_u64()?).ok().filter(|&size| size > 0);
        Some([size(lines)?, size(elements)?])
    }

    /// Returns the description of a quantized KV cache, which the conversion keeps.
    pub(super) fn kv_cache(&self) -> KvCache {
        let (algorithm, scheme) = self.0.as_ref().map_or((None, None), ModelConfig::kv_cache);
        let is_fp8 = |scheme: &Value| scheme["num_bits"] == 8 && scheme["type"] == "float";
        let as_fp8 = || scheme.filter(|scheme| is_fp8(scheme)).map(|_| FP8.to_owned());
        KvCache {
            algorithm: algorithm.map(str::to_owned).or_else(as_fp8),
            scheme: scheme.cloned().or_else(|| (algorithm == Some(FP8)).then(fp8_scheme)),
        }
    }

    /// Returns the text of the configuration for the quantized model.
    pub(super) fn quantized(&self, quantization: &Quantization) -> String {
        let json = self.0.as_ref().and_then(|config| config.json().as_object());
        let json = replaced(json.cloned().unwrap_or_default(), quantization);
        format!("{:#}\n", Value::Object(json))
    }
}

/// Keys that hold the type of the weights: transformers 4 and 5.
const DTYPES: [&str; 2] = ["torch_dtype", "dtype"];

fn remove_descriptions(json: &mut Map<String, Value>) {
    json.retain(|key, _| !DESCRIPTIONS.contains(&&key[..]));
}

/// Replaces the description of the quantization in a configuration.
fn replaced(mut json: Map<String, Value>, quantization: &Quantization) -> Map<String, Value> {
    // Nested descriptions in multimodal models would describe the original weights.
    json.values_mut().filter_map(Value::as_object_mut).for_each(remove_descriptions);
    remove_descriptions(&mut json);
    json.insert(DESCRIPTIONS[0].into(), quantization.for_config());
    json
}

/// ModelOpt's name of a KV cache in FP8.
const FP8: &str = "FP8";

/// Description of a KV cache in FP8 with one scale per tensor, as compressed-tensors writes it.
fn fp8_scheme() -> Value {
    json!({"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": true, "dynamic": false})
}

/// Description of a quantized KV cache, in the forms that are known; both `None`: the cache is not quantized.
#[derive(Clone, Debug, Default)]
pub(super) struct KvCache {
    /// ModelOpt's `kv_cache_quant_algo`.
    algorithm: Option<String>,
    /// compressed-tensors' `kv_cache_scheme`, which ModelOpt's `config.json` has too.
    scheme: Option<Value>,
}

impl KvCache {
    /// Returns a message if a format cannot describe this cache.
    pub(super) fn loss(&self, format: Format) -> Option<String> {
        let said = match (format, self) {
            (Format::ModelOpt, Self { algorithm: None, scheme: Some(scheme) }) => scheme.to_string(),
            (Format::CompressedTensors, Self { algorithm: Some(algorithm), scheme: None }) => algorithm.clone(),
            _ => return None,
        };
        Some(format!(
            "the KV cache of the input is quantized ({said}), which {} format does not describe",
            format.name()
        ))
    }
}

/// Content of a description of a quantization.
#[derive(Debug)]
pub(super) struct Quantization {
    pub format: Format,
    /// Whether every quantized weight has an input scale.
    pub input_scales: bool,
    /// Modules that are not quantized, see [`ignored`].
    pub ignored: Vec<String>,
    /// Quantized KV cache of the input.
    pub kv_cache: KvCache,
}

impl Quantization {
    /// Returns `quantization_config` of `config.json`.
    fn for_config(&self) -> Value {
        // Without input scales, servers must not expect any: they would use uninitialized memory.
        let arguments = |dynamic: Value| match self.format {
            Format::ModelOpt => json!({"dynamic": dynamic, "num_bits": 4, "type": "float", "group_size": BLOCK}),
            Format::CompressedTensors => json!({
                "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": BLOCK, "symmetric": true,
                "dynamic": dynamic,
            }),
        };
        let inputs = |dynamic: Value| if self.input_scales { arguments(dynamic) } else { Value::Null };
        let mut json = match self.format {
            Format::ModelOpt => json!({
                "quant_method": "modelopt",
                "quant_algo": self.algorithm(),
                "group_size": BLOCK,
                "producer": producer(),
                "config_groups": {"group_0": {
                    "targets": ["Linear"],
                    "weights": arguments(json!(false)),
                    "input_activations": inputs(json!(false)),
                }},
                "ignore": self.ignored,
            }),
            Format::CompressedTensors => json!({
                "quant_method": "compressed-tensors",
                "format": "nvfp4-pack-quantized",
                "quantization_status": "compressed",
                "kv_cache_scheme": self.kv_cache.scheme,
                "config_groups": {"group_0": {
                    "targets": ["Linear"],
                    "format": "nvfp4-pack-quantized",
                    "weights": arguments(json!(false)),
                    "input_activations": inputs(json!("local")),
                    "output_activations": null,
                }},
                "ignore": self.ignored,
            }),
        };
        if let (Format::ModelOpt, Some(scheme)) = (self.format, &self.kv_cache.scheme) {
            json["kv_cache_scheme"] = scheme.clone();
        }
        json
    }

    /// Returns the names and contents of the configurations of a model with this quantization. `config` is the
    /// configuration of the input.
    pub(super) fn files(&self, config: &Config) -> Vec<(&'static str, String)> {
        let mut files = vec![(CONFIG, config.quantized(self))];
        if self.format == Format::ModelOpt {
            files.push((QUANT_CONFIG, self.for_modelopt()));
        }
        files
    }

    /// Returns `hf_quant_config.json`, which ModelOpt's models have.
    fn for_modelopt(&self) -> String {
        let json = json!({
            "producer": producer(),
            "quantization": {
                "quant_algo": self.algorithm(),
                "kv_cache_quant_algo": self.kv_cache.algorithm,
                "group_size": BLOCK,
                "exclude_modules": self.ignored,
            },
        });
        format!("{json:#}\n")
    }

    fn algorithm(&self) -> &'static str {
        if self.input_scales { "NVFP4" } else { "W4A16_NVFP4" }
    }
}

fn producer() -> Value {
    json!({"name": "nvfp4", "version": env!("CARGO_PKG_VERSION")})
}

/// Merged modules that engines create from each projection. Engines compare their names with the ignored modules too.
const MERGED: [(&str, &[&str]); 6] = [
    ("gate_proj", &["gate_up_proj"]),
    ("w1", &["w13", "gate_up_proj"]),
    ("q_proj", &["qkv_proj"]),
    ("q_a_proj", &["fused_qkv_a_proj"]),
    ("in_proj_qkv", &["in_proj_qkvz"]),
    ("in_proj_b", &["in_proj_ba"]),
];

/// Returns the list of unquantized modules for servers, in natural order.
///
/// vLLM reads an entry of ModelOpt's list as a name, as a pattern, and as a substring of a name: `layers.1.mlp.gate`
/// would also exclude `layers.1.mlp.gate_up_proj`. In that case the last letter becomes a pattern,
/// `layers.1.mlp.gat[e]`, which is a substring of no name.
pub(super) fn ignored(
    format: Format,
    left: impl IntoIterator<Item = String>,
    quantized: impl IntoIterator<Item = String>,
) -> Vec<String> {
    let mut searched = BTreeSet::new();
    for module in quantized {
        if let Some((before, _)) = module.split_once(".experts.")
            && format == Format::ModelOpt
        {
            // Engines treat the experts of a layer as one module.
            searched.insert(format!("{before}.experts"));
            continue;
        }
        if let Some((before, name)) = module.rsplit_once('.') {
            let merged = MERGED.iter().filter(|(first, _)| *first == name).flat_map(|(_, merged)| *merged);
            searched.extend(merged.map(|merged| format!("{before}.{merged}")));
        }
        searched.insert(module);
    }
    let searched: Vec<String> = searched.into_iter().collect();
    let mut names: Vec<String> = left.into_iter().collect();
    names.sort_by_cached_key(|name| natural(name));
    names.dedup();
    let mut ignored = Vec::with_capacity(names.len());
    for name in names {
        let hides = |other: &String| *other != name && other.contains(&name);
        match name.pop_last() {
            Some((rest, last)) if format == Format::ModelOpt && searched.iter().any(hides) => {
                ignored.push(format!("{rest}[{last}]"));
            }
            _ => ignored.push(name),
        }
    }
    ignored
}

trait PopLast {
    /// Splits off the last character.
    fn pop_last(&self) -> Option<(&str, char)>;
}

impl PopLast for String {
    fn pop_last(&self) -> Option<(&str, char)> {
        let last = self.chars().next_back()?;
        Some((&self[..self.len() - last.len_utf8()], last))
    }
}

/// Files beside the weights in a model's folder.
#[derive(Debug, Default)]
pub(crate) struct Others {
    /// Files that every form of the model shares: tokenizer, generation configuration, license.
    pub copied: Vec<PathBuf>,
    /// Names of all other files.
    pub left: Vec<String>,
}

impl Others {
    /// Lists a folder. Hidden files and configurations that are rewritten are in neither list.
    ///
    /// # Errors
    /// Returns an error if the folder cannot be read.
    pub(super) fn of(folder: &Path, shards: &BTreeSet<&Path>) -> Result<Self, Error> {
        let io = |error| Error::io(folder, error);
        let mut others = Self::default();
        for entry in std::fs::read_dir(folder).map_err(io)? {
            let path = entry.map_err(io)?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if name.starts_with('.') || [CONFIG, QUANT_CONFIG].contains(&&name[..]) || shards.contains(&*path) {
                continue;
            }
            // Follows links, which the cache of Hugging Face uses.
            let metadata = std::fs::metadata(&path);
            let is_small = metadata.as_ref().is_ok_and(|file| file.is_file() && file.len() <= MAX_SMALL_BYTES);
            if is_small && !WEIGHTS.iter().any(|ending| name.ends_with(ending)) {
                others.copied.push(path);
            } else if metadata.is_ok_and(|file| file.is_dir()) {
                others.left.push(format!("{name}/"));
            } else if !name.ends_with(".index.json") {
                others.left.push(name);
            }
        }
        others.copied.sort();
        others.left.sort();
        Ok(others)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ignore(format: Format, left: &[&str], quantized: &[&str]) -> Vec<String> {
        let owned = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
        ignored(format, owned(left), owned(quantized))
    }

    #[test]
    fn substring_of_a_quantized_name_becomes_a_pattern() {
        let quantized =
            ["model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj", "model.layers.10.mlp.experts.0.w1"];
        let left =
            ["model.layers.10.mlp.gate", "lm_head", "model.layers.2.mlp.gate", "model.layers.1.mlp.gate", "lm_head"];
        assert_eq!(
            ignore(Format::ModelOpt, &left, &quantized),
            ["lm_head", "model.layers.1.mlp.gat[e]", "model.layers.2.mlp.gate", "model.layers.10.mlp.gate"]
        );
        assert_eq!(ignore(Format::CompressedTensors, &left, &quantized)[1], "model.layers.1.mlp.gate");
    }

    #[test]
    fn substring_of_a_merged_name_becomes_a_pattern() {
        let quantized = ["a.self_attn.q_proj", "a.self_attn.k_proj", "a.self_attn.v_proj"];
        assert_eq!(ignore(Format::ModelOpt, &["a.self_attn.qkv"], &quantized), ["a.self_attn.qk[v]"]);
        assert_eq!(ignore(Format::ModelOpt, &["a.self_attn.o_proj"], &quantized), ["a.self_attn.o_proj"]);
    }

    #[test]
    fn description_of_another_quantization_is_replaced() {
        let text = r#"{"z": 1, "quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 128]},
            "text_config": {"hidden_size": 32, "quantization_config": {}, "model_type": "llama4_text"}, "model_type": "llama4"}"#;
        let quantization = Quantization {
            format: Format::ModelOpt,
            input_scales: false,
            ignored: vec!["lm_head".into()],
            kv_cache: KvCache::default(),
        };
        let json: Map<String, Value> = replaced(serde_json::from_str(text).unwrap(), &quantization);
        assert_eq!(json.keys().collect::<Vec<_>>(), ["z", "text_config", "model_type", "quantization_config"]);
        assert_eq!(json["text_config"].as_object().unwrap().len(), 2);
        assert_eq!(json["quantization_config"]["quant_algo"], "W4A16_NVFP4");
    }
}
