//! Random configurations beside a sound model: reading ends in a layer or an error, never in a panic.

use model_files::{Tensors, f32s};
use nvfp4_checkpoint::{Checkpoint, Examination, Format, Inspection};
use nvfp4_core::problem::{Op, TokenDtype};
use proptest::prelude::*;
use serde_json::Value;

/// Keys and words that the readers of configurations know.
const KEYS: [&str; 40] = [
    "model_type",
    "text_config",
    "thinker_config",
    "talker_config",
    "llm_config",
    "hidden_act",
    "hidden_activation",
    "mlp_hidden_act",
    "swiglu_limit",
    "swiglu_limits",
    "swiglu_alpha",
    "num_experts_per_tok",
    "moe_topk",
    "moe_k",
    "n_shared_experts",
    "shared_expert_intermediate_size",
    "norm_topk_prob",
    "scoring_func",
    "topk_method",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
    "num_hidden_layers",
    "num_experts",
    "vocab_size",
    "quantization_config",
    "quant_method",
    "quant_algo",
    "config_groups",
    "group_0",
    "weights",
    "input_activations",
    "quantized_layers",
    "model.layers.0.mlp",
    "ignore",
    "exclude_modules",
    "transform_config",
    "kv_cache_scheme",
    "num_bits",
    "group_size",
];
const WORDS: [&str; 24] = [
    "",
    "qwen3_moe",
    "deepseek_v3",
    "gpt_oss",
    "llama4",
    "granitemoe",
    "jamba",
    "silu",
    "relu2",
    "gelu",
    "sigmoid",
    "softmax",
    "noaux_tc",
    "modelopt",
    "compressed-tensors",
    "quark",
    "fp_quant",
    "NVFP4",
    "MIXED_PRECISION",
    "W4A8_NVFP4_FP8",
    "re:(",
    "re:.*",
    "*",
    "lm_head",
];

/// A random value with the readers' keys and words, nested several times.
fn random_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        (-2i64..20).prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        proptest::sample::select(&WORDS[..]).prop_map(Value::from),
    ];
    leaf.prop_recursive(5, 60, 12, |inner| {
        let keys = proptest::sample::select(&KEYS[..]).prop_map(str::to_owned);
        prop_oneof![
            1 => proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            4 => proptest::collection::vec((keys, inner), 0..12).prop_map(|pairs| pairs.into_iter().collect()),
        ]
    })
}

proptest! {
    #[test]
    fn random_configurations_never_panic(value in random_json()) {
        const BLOCK: &str = "model.layers.0.mlp";
        let folder = tempfile::tempdir().unwrap();
        let mut tensors = Tensors::default();
        tensors.set_experts(BLOCK, ["gate_proj", "up_proj", "down_proj"], Format::ModelOpt, 2);
        tensors.set(format!("{BLOCK}.gate.weight"), f32s(&[2, 32], &[0.5; 64]));
        tensors.write(&folder.path().join("model.safetensors"));
        for name in ["config.json", "hf_quant_config.json"] {
            std::fs::write(folder.path().join(name), value.to_string()).unwrap();
        }
        // An error is as good as a layer; what counts is that reading ends in one of them.
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        _ = checkpoint.moe_layer(0, TokenDtype::Bf16);
        _ = checkpoint.layer(0, Op::Gated);
        _ = checkpoint.linear(&format!("{BLOCK}.experts.0.up_proj"), TokenDtype::Bf16);
        _ = Inspection::of(folder.path());
        _ = Examination::of(folder.path());
    }
}
