//! Names of tensors in GGUF and in Hugging Face's models.
//!
//! Source: `tensor_mapping.py` of the package `gguf` 0.19.

/// Architectures whose tensors have these names, and the order of rows of Hugging Face's models.
pub(super) const ARCHITECTURES: [&str; 5] = ["llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe"];

/// Names outside of layers.
const GLOBAL: [(&str, &str); 3] =
    [("token_embd", "model.embed_tokens"), ("output_norm", "model.norm"), ("output", "lm_head")];

/// Names in layers: `blk.N.A` and `model.layers.N.B`.
const OF_LAYERS: [(&str, &str); 17] = [
    ("attn_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
    ("ffn_gate_inp", "mlp.gate"),
    ("ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
    ("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_expert.up_proj"),
    ("ffn_down_shexp", "mlp.shared_expert.down_proj"),
    ("attn_qkv", "self_attn.qkv_proj"),
];

/// Names of all experts of a layer in one tensor.
const EXPERTS: [(&str, &str); 3] =
    [("ffn_gate_exps", "gate_proj"), ("ffn_up_exps", "up_proj"), ("ffn_down_exps", "down_proj")];

/// Module in Hugging Face's names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Module {
    /// One module.
    One(String),
    /// A projection of all experts: the names before and after the number of the expert.
    Experts(String, &'static str),
}

impl Module {
    /// Returns the module of a tensor `X.weight`, without `.weight`; `None` if the name is unknown.
    pub(super) fn of(gguf: &str) -> Option<Self> {
        if let Some((_, name)) = GLOBAL.iter().find(|(name, _)| *name == gguf) {
            return Some(Self::One((*name).to_owned()));
        }
        let (layer, rest) = gguf.strip_prefix("blk.")?.split_once('.')?;
        let layer: usize = layer.parse().ok()?;
        if let Some((_, projection)) = EXPERTS.iter().find(|(name, _)| *name == rest) {
            return Some(Self::Experts(format!("model.layers.{layer}.mlp.experts."), projection));
        }
        let (_, name) = OF_LAYERS.iter().find(|(name, _)| *name == rest)?;
        Some(Self::One(format!("model.layers.{layer}.{name}")))
    }

    /// Name of one module, or of an expert's module.
    pub(super) fn name(&self, expert: usize) -> String {
        match self {
            Self::One(name) => name.clone(),
            Self::Experts(before, projection) => format!("{before}{expert}.{projection}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_both_kinds_of_layers_are_known() {
        assert_eq!(Module::of("output").unwrap().name(0), "lm_head");
        assert_eq!(Module::of("blk.3.attn_output").unwrap().name(0), "model.layers.3.self_attn.o_proj");
        assert_eq!(Module::of("blk.3.ffn_up_exps").unwrap().name(7), "model.layers.3.mlp.experts.7.up_proj");
        assert_eq!(Module::of("blk.x.ffn_up"), None);
        assert_eq!(Module::of("blk.1.ssm_in"), None);
    }
}
