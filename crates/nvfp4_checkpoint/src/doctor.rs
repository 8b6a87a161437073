//! Examines a model before it is served: the faults of [`Inspection`], files that a server needs, experts without numbers, and
//! what each engine makes of the findings. [`RULES`] has the facts about engines, each with its source.

use std::path::Path;

use rayon::prelude::*;
use serde_json::Value;

use super::convert::{Config, weights};
use super::model_config::ModelConfig;
use super::names::{Expert, Projection};
use super::{Checkpoint, Inspection};
use nvfp4_core::Error;
use nvfp4_core::files::read_bounded;

/// A program that serves or computes a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Engine {
    /// This library.
    Nvfp4,
    /// vLLM with its own kernels.
    Vllm,
    /// SGLang with its own kernels.
    Sglang,
    /// TensorRT-LLM with its PyTorch backend.
    TensorRtLlm,
    /// llama.cpp, after `nvfp4 convert --to gguf`.
    LlamaCpp,
}

impl Engine {
    /// All engines.
    pub const ALL: [Self; 5] = [Self::Nvfp4, Self::Vllm, Self::Sglang, Self::TensorRtLlm, Self::LlamaCpp];

    /// Name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nvfp4 => "nvfp4",
            Self::Vllm => "vllm",
            Self::Sglang => "sglang",
            Self::TensorRtLlm => "tensorrt-llm",
            Self::LlamaCpp => "llama.cpp",
        }
    }
}

/// What an engine makes of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Effect {
    /// The model is served; the finding is worth knowing.
    Note,
    /// The model cannot be loaded, or a part of it cannot be computed.
    Refused,
    /// The model is served and computes something else.
    Wrong,
}

impl Effect {
    /// Word for people and for `--json`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Note => "note",
            Self::Refused => "refused",
            Self::Wrong => "wrong results",
        }
    }
}

/// What an engine makes of one kind of finding.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    /// Code of the finding.
    pub code: &'static str,
    /// The engine.
    pub engine: Engine,
    /// Versions that were read or tried.
    pub versions: &'static str,
    /// What happens.
    pub effect: Effect,
    /// What to do.
    pub remedy: &'static str,
    /// Where this was found.
    pub source: &'static str,
}

const fn rule(
    code: &'static str,
    engine: Engine,
    versions: &'static str,
    effect: Effect,
    remedy: &'static str,
    source: &'static str,
) -> Rule {
    Rule { code, engine, versions, effect, remedy, source }
}

/// Version of this library, for its own rules.
const OWN: &str = env!("CARGO_PKG_VERSION");

/// Versions of vLLM whose source was read.
const VLLM: &str = "0.24 to 0.33";

/// Version of SGLang whose wheel was read.
const SGLANG: &str = "0.5.23";

/// Revision of TensorRT-LLM whose source was read.
const TENSORRT_LLM: &str = "commit 002366a";

/// The rules. A finding without a row for an engine does not concern that engine.
pub const RULES: &[Rule] = &[
    rule(
        "unequal-global-scales",
        Engine::Vllm,
        VLLM,
        Effect::Wrong,
        "quantize without --separate-scales, or serve with the plugin nvfp4-vllm, which keeps both scales",
        "vllm/model_executor/layers/quantization/modelopt.py: `w13_weight_scale_2[:, 0]` for gate and up",
    ),
    rule(
        "unequal-global-scales",
        Engine::Nvfp4,
        OWN,
        Effect::Note,
        "nothing: both scales are used",
        "MoeWeights: one global scale per projection",
    ),
    rule(
        "config-input-scales",
        Engine::Vllm,
        VLLM,
        Effect::Wrong,
        "set quant_algo to W4A16_NVFP4, or calibrate with `nvfp4 quantize --calibrate`",
        "vllm/model_executor/layers/quantization/modelopt.py: `input_scale` is created by torch.empty and only loaded if present",
    ),
    rule(
        "input-scales-partly-missing",
        Engine::Vllm,
        VLLM,
        Effect::Wrong,
        "calibrate all experts with `nvfp4 quantize --calibrate`, or none",
        "vllm/model_executor/layers/quantization/modelopt.py: `input_scale` is created by torch.empty and only loaded if present",
    ),
    rule(
        "input-scales-partly-missing",
        Engine::Nvfp4,
        OWN,
        Effect::Note,
        "nothing with 16-bit tokens; NVFP4 tokens are refused",
        "MoeWeights::without_input_scales",
    ),
    rule(
        "config-without-quantisation",
        Engine::Vllm,
        VLLM,
        Effect::Refused,
        "write the quantization to config.json: `nvfp4 convert --to modelopt` does",
        "vllm/config/model.py: `_verify_quantization` reads quantization_config",
    ),
    rule(
        "config-exclusion",
        Engine::Vllm,
        VLLM,
        Effect::Refused,
        "remove the module from the list of excluded modules: `nvfp4 convert --to modelopt` writes a new list",
        "vllm/model_executor/layers/quantization/modelopt.py: `is_layer_excluded`",
    ),
    rule(
        "global-scale-size",
        Engine::Vllm,
        VLLM,
        Effect::Wrong,
        "export the model again; the scale is stored inverted",
        "both formats: ModelOpt multiplies by weight_scale_2, compressed-tensors divides by weight_global_scale",
    ),
    rule(
        "tokenizer",
        Engine::Vllm,
        VLLM,
        Effect::Refused,
        "copy the tokenizer's files from the original model",
        "transformers: AutoTokenizer.from_pretrained",
    ),
    rule(
        "config",
        Engine::Vllm,
        VLLM,
        Effect::Refused,
        "copy config.json from the original model, then `nvfp4 convert --to modelopt` describes the quantization",
        "transformers: AutoConfig.from_pretrained",
    ),
    rule(
        "unequal-global-scales",
        Engine::Sglang,
        SGLANG,
        Effect::Wrong,
        "quantize without --separate-scales",
        "sglang/srt/layers/quantization/modelopt_quant.py: dense projections take the largest scale, and experts on Marlin the gate's",
    ),
    rule(
        "config-input-scales",
        Engine::Sglang,
        SGLANG,
        Effect::Wrong,
        "set quant_algo to W4A16_NVFP4, or calibrate with `nvfp4 quantize --calibrate`",
        "sglang/srt/layers/quantization/modelopt_quant.py: a missing `input_scale` is 1",
    ),
    rule(
        "input-scales-partly-missing",
        Engine::Sglang,
        SGLANG,
        Effect::Wrong,
        "calibrate all experts with `nvfp4 quantize --calibrate`, or none",
        "sglang/srt/layers/quantization/modelopt_quant.py: a missing `input_scale` is 1, and the largest of a layer counts",
    ),
    rule(
        "unequal-global-scales",
        Engine::TensorRtLlm,
        TENSORRT_LLM,
        Effect::Wrong,
        "quantize without --separate-scales",
        "tensorrt_llm/_torch/modules/fused_moe/quantization.py: `load_all_fp4_weight_scales_and_alphas` takes the larger scale",
    ),
    rule(
        "config-input-scales",
        Engine::TensorRtLlm,
        TENSORRT_LLM,
        Effect::Refused,
        "calibrate with `nvfp4 quantize --calibrate`",
        "tensorrt_llm/_torch/modules/fused_moe/quantization.py: each expert's `input_scale` is looked up by name",
    ),
    rule(
        "input-scales-partly-missing",
        Engine::TensorRtLlm,
        TENSORRT_LLM,
        Effect::Refused,
        "calibrate all experts with `nvfp4 quantize --calibrate`",
        "tensorrt_llm/_torch/modules/fused_moe/quantization.py: each expert's `input_scale` is looked up by name",
    ),
    rule(
        "global-scale-size",
        Engine::Sglang,
        SGLANG,
        Effect::Wrong,
        "export the model again; the scale is stored inverted",
        "both formats: ModelOpt multiplies by weight_scale_2, compressed-tensors divides by weight_global_scale",
    ),
    rule(
        "global-scale-size",
        Engine::TensorRtLlm,
        TENSORRT_LLM,
        Effect::Wrong,
        "export the model again; the scale is stored inverted",
        "tensorrt_llm/_torch/modules/fused_moe/quantization.py: products are multiplied by weight_scale_2",
    ),
    rule(
        "tokenizer",
        Engine::Sglang,
        SGLANG,
        Effect::Refused,
        "copy the tokenizer's files from the original model",
        "transformers: AutoTokenizer.from_pretrained",
    ),
    rule(
        "tokenizer",
        Engine::TensorRtLlm,
        TENSORRT_LLM,
        Effect::Refused,
        "copy the tokenizer's files from the original model",
        "transformers: AutoTokenizer.from_pretrained",
    ),
    rule(
        "config",
        Engine::Sglang,
        SGLANG,
        Effect::Refused,
        "copy config.json from the original model, then `nvfp4 convert --to modelopt` describes the quantization",
        "transformers: AutoConfig.from_pretrained",
    ),
    rule(
        "config",
        Engine::TensorRtLlm,
        TENSORRT_LLM,
        Effect::Refused,
        "copy config.json from the original model, then `nvfp4 convert --to modelopt` describes the quantization",
        "transformers: AutoConfig.from_pretrained",
    ),
    rule(
        "tokenizer-size",
        Engine::Vllm,
        VLLM,
        Effect::Wrong,
        "copy the tokenizer's files and config.json from the same model",
        "ids from vocab_size on have no row in the embedding",
    ),
    rule(
        "tokenizer-size",
        Engine::Sglang,
        SGLANG,
        Effect::Wrong,
        "copy the tokenizer's files and config.json from the same model",
        "ids from vocab_size on have no row in the embedding",
    ),
    rule(
        "tokenizer-size",
        Engine::TensorRtLlm,
        TENSORRT_LLM,
        Effect::Wrong,
        "copy the tokenizer's files and config.json from the same model",
        "ids from vocab_size on have no row in the embedding",
    ),
    rule(
        "gpt-oss",
        Engine::Vllm,
        "0.24.0",
        Effect::Refused,
        "serve the original MXFP4 model",
        "tests/engines/vllm_loads.py of this repository, run with vLLM 0.24.0",
    ),
    rule(
        "k-of-64",
        Engine::LlamaCpp,
        "package gguf 0.19",
        Effect::Note,
        "these tensors keep the type of the template with `nvfp4 convert --to gguf`",
        "gguf/constants.py: a block of NVFP4 has 64 values",
    ),
    rule(
        "safetensors",
        Engine::LlamaCpp,
        "package gguf 0.19",
        Effect::Refused,
        "`nvfp4 convert --to gguf --template FILE`, with a GGUF file of the same model by llama.cpp's converter",
        "llama.cpp loads GGUF files only",
    ),
];

/// A finding about a model.
#[derive(Debug)]
pub struct Finding {
    /// Kind of finding: a code of [`Inspection`], or one of the doctor's own.
    pub code: &'static str,
    /// Whether the model itself is broken, for every engine.
    pub is_fault: bool,
    /// What was found, and where.
    pub message: String,
}

impl Finding {
    fn new(code: &'static str, message: String) -> Self {
        Self { code, is_fault: false, message }
    }

    /// Rules of an engine for this finding.
    pub fn rules(&self, engine: Engine) -> impl Iterator<Item = &'static Rule> {
        let code = self.code;
        RULES.iter().filter(move |rule| rule.code == code && rule.engine == engine)
    }

    /// What an engine makes of the finding; `None` if it does not concern the engine. A fault without a rule is refused.
    pub fn effect(&self, engine: Engine) -> Option<Effect> {
        let of_rules = self.rules(engine).map(|rule| rule.effect).max();
        of_rules.or_else(|| (self.is_fault && engine != Engine::LlamaCpp).then_some(Effect::Refused))
    }
}

/// Result of an examination.
#[derive(Debug)]
pub struct Examination {
    /// All findings; faults come first.
    pub findings: Vec<Finding>,
    /// Number of NVFP4 weights.
    pub weights: usize,
}

impl Examination {
    /// Examines a model. Reads all NVFP4 weights once.
    ///
    /// # Errors
    /// Returns an error if the model cannot be opened.
    pub fn of(path: &Path) -> Result<Self, Error> {
        let checkpoint = Checkpoint::open(path)?;
        let inspection = Inspection::of(path);
        let mut findings: Vec<Finding> = Vec::new();
        for problem in &inspection.problems {
            let message = problem.error.to_string();
            findings.push(Finding { code: problem.code, is_fault: problem.is_error, message });
        }
        findings.extend(files(&checkpoint));
        findings.extend(weights_of(&checkpoint));
        findings.push(Finding::new("safetensors", "the weights are in safetensors files".into()));
        findings.sort_by_key(|finding| !finding.is_fault);
        let weights = inspection.weights.iter().map(|weight| weight.count).sum();
        Ok(Self { findings, weights })
    }

    /// Returns the worst effect that a finding has in an engine. `None`: no finding concerns the engine.
    pub fn verdict(&self, engine: Engine) -> Option<Effect> {
        self.findings.iter().filter_map(|finding| finding.effect(engine)).max()
    }
}

/// Findings about the files beside the weights.
fn files(checkpoint: &Checkpoint) -> Vec<Finding> {
    const TOKENIZERS: [&str; 5] = ["tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "tiktoken.model"];
    let path = checkpoint.path();
    if !path.is_dir() {
        return Vec::new();
    }
    let mut findings = Vec::new();
    if !TOKENIZERS.iter().any(|name| path.join(name).exists()) {
        let names = TOKENIZERS.join(", ");
        findings.push(Finding::new("tokenizer", format!("the folder has no tokenizer (none of {names})")));
    }
    if !path.join("config.json").exists() {
        findings.push(Finding::new("config", "the folder has no config.json".into()));
    }
    findings.extend(tokenizer_size(checkpoint));
    findings
}

/// Compares the ids of `tokenizer.json` with the configuration's vocabulary. A tokenizer that cannot be read is a finding too.
fn tokenizer_size(checkpoint: &Checkpoint) -> Option<Finding> {
    /// Upper limit of the file's size; vocabularies of 260,000 tokens take some 35 MB.
    const MAX_BYTES: usize = 256 << 20;
    let path = checkpoint.path().join("tokenizer.json");
    if !path.exists() {
        return None;
    }
    let unreadable = |why: String| Some(Finding::new("tokenizer", format!("{}: {why}", path.display())));
    let bytes = match read_bounded(&path, MAX_BYTES, "a tokenizer") {
        Ok(bytes) => bytes,
        Err(error) => return unreadable(error.to_string()),
    };
    let tokenizer: Value = match serde_json::from_slice(&bytes) {
        Ok(tokenizer) => tokenizer,
        Err(error) => return unreadable(format!("not a valid tokenizer: {error}")),
    };
    let config = ModelConfig::beside(checkpoint).ok()??;
    let (key, size) = config.number(&["vocab_size", "padded_vocab_size"])?;
    let largest = largest_id(&tokenizer)?;
    (largest >= size as u64).then(|| {
        let what = format!("{}: its largest id is {largest}, but {key} of config.json is {size}", path.display());
        Finding::new("tokenizer-size", what)
    })
}

/// Returns the largest id of a tokenizer in the format of the tokenizers library: `model.vocab` maps tokens to ids, or lists
/// tokens by id, and `added_tokens` has further ids.
fn largest_id(tokenizer: &Value) -> Option<u64> {
    let vocabulary = tokenizer.get("model").and_then(|model| model.get("vocab"));
    let of_vocabulary = match vocabulary {
        Some(Value::Object(ids)) => ids.values().filter_map(Value::as_u64).max(),
        Some(Value::Array(tokens)) => (tokens.len() as u64).checked_sub(1),
        _ => None,
    };
    let added = tokenizer.get("added_tokens").and_then(Value::as_array).into_iter().flatten();
    of_vocabulary.into_iter().chain(added.filter_map(|token| token.get("id")?.as_u64())).max()
}

/// Findings about the numbers of NVFP4 weights.
fn weights_of(checkpoint: &Checkpoint) -> Vec<Finding> {
    let Ok((config, _)) = Config::and_others(checkpoint) else { return Vec::new() };
    // Weights that cannot be read are problems of the inspection.
    let Ok(all) = weights::all(checkpoint, &config, false) else { return Vec::new() };
    let (mut dead, mut ragged) = (Vec::new(), Vec::new());
    for (name, readable) in all.into_iter().filter(|(_, readable)| readable.form.is_nvfp4()) {
        for weight in &readable.stored.weights {
            let is_zero =
                || weight.source.nvfp4().is_some_and(|(codes, _, _)| codes.par_iter().all(|code| code & 0x77 == 0));
            let is_expert =
                Projection::parse(&weight.module).is_some_and(|found| matches!(found.expert, Expert::Routed(_)));
            if is_expert && is_zero() {
                dead.push(weight.module.clone());
            }
            if !weight.source.sizes()[1].is_multiple_of(64) {
                ragged.push(weight.module.clone());
            }
        }
        checkpoint.file_with(name).release();
    }
    let mut findings = Vec::new();
    if let Some(first) = dead.first() {
        let what = "projections of experts are all zeros: the expert was never trained, or its weights were lost";
        findings.push(Finding::new("dead-experts", format!("{} {what}, starting with {first}", dead.len())));
    }
    if let Some(first) = ragged.first() {
        let what = format!("{} weights have a K that is not a multiple of 64, starting with {first}", ragged.len());
        findings.push(Finding::new("k-of-64", what));
    }
    if config.model_type().is_some_and(|model| model.contains("gpt_oss")) {
        findings.push(Finding::new("gpt-oss", "the model is gpt-oss in NVFP4".into()));
    }
    findings
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_rule_is_complete_and_unique() {
        let mut keys: Vec<_> = RULES.iter().map(|rule| (rule.code, rule.engine, rule.versions)).collect();
        assert!(RULES.iter().all(|rule| !rule.remedy.is_empty() && !rule.source.is_empty()));
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), RULES.len());
    }

    #[test]
    fn largest_id_is_found_in_every_form_of_vocabulary() {
        let added = json!([{"id": 7, "content": "<s>"}, {"content": "no id"}]);
        for (tokenizer, largest) in [
            (json!({"model": {"vocab": {"a": 0, "b": 4}}}), Some(4)),
            (json!({"model": {"vocab": {"a": 0, "b": 4}}, "added_tokens": added}), Some(7)),
            (json!({"model": {"vocab": [["a", -1.5], ["b", -2.0]]}}), Some(1)),
            (json!({"model": {"vocab": []}}), None),
            (json!([1]), None),
        ] {
            assert_eq!(largest_id(&tokenizer), largest, "{tokenizer}");
        }
    }

    #[test]
    fn worst_effect_is_the_verdict() {
        let finding = |code, is_fault| Finding { code, is_fault, message: String::new() };
        let examination = |findings| Examination { findings, weights: 1 };
        let unequal = examination(vec![finding("unequal-global-scales", false), finding("tokenizer", false)]);
        assert_eq!(unequal.verdict(Engine::Vllm), Some(Effect::Wrong));
        assert_eq!(unequal.verdict(Engine::Nvfp4), Some(Effect::Note));
        assert_eq!(examination(vec![finding("shape", true)]).verdict(Engine::Nvfp4), Some(Effect::Refused));
        assert_eq!(examination(vec![]).verdict(Engine::Vllm), None);
    }
}
