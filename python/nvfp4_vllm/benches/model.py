"""Models with the shapes of known ones and random weights, and the engine that runs them. The benchmarks share this module."""

import json
import os
import pathlib

# Set before vLLM is imported. The engine runs in this process, so that the benchmarks can inspect it.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1",
    VLLM_USE_FLASHINFER_SAMPLER="0", VLLM_USE_DEEP_GEMM="0",
)  # fmt: skip

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, HEADS, KV_HEADS, HEAD = 2048, 768, 128, 8, 32, 4, 128

CONTENDERS = {
    "nvfp4": {},
    "nvfp4-fp8": {},
    "marlin": {"moe_backend": "marlin", "linear_backend": "marlin"},
    "humming": {"moe_backend": "humming", "linear_backend": "humming"},
    "humming-fp8": {"moe_backend": "humming", "linear_backend": "humming"},
}
"""The engine's options of each contender. Names with `-fp8` multiply fp8 tokens (W4A8): `humming-fp8` in the experts only."""

ENVIRONMENTS = {
    "nvfp4-fp8": {"NVFP4_VLLM_OPTIONS": '{"experts": "fp8", "linear": "fp8"}'},
    "humming-fp8": {"VLLM_HUMMING_INPUT_QUANT_CONFIG": '{"dtype": "float8e4m3"}'},
}


def modelopt(ignored):
    numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    return {
        "quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "group_size": 16,
        "producer": {"name": "nvfp4", "version": "0.1.0"},
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": numbers, "input_activations": None}}, "ignore": ignored,
    }  # fmt: skip


def config(layers, vocabulary, quantized):
    """Returns the `config.json` of a model of Qwen3-30B-A3B's shape."""
    described = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False, "bos_token_id": 1,
        "eos_token_id": 2, "decoder_sparse_step": 1, "head_dim": HEAD, "hidden_act": "silu", "hidden_size": HIDDEN,
        "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": layers,
        "mlp_only_layers": [], "moe_intermediate_size": INTERMEDIATE, "norm_topk_prob": True, "num_attention_heads": HEADS,
        "num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "num_hidden_layers": layers, "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": vocabulary,
    }  # fmt: skip
    ignored = ["lm_head"] + [f"model.layers.{layer}.mlp.gate" for layer in range(layers)]
    return described | ({"quantization_config": modelopt(ignored)} if quantized else {})


def gpt_oss(layers):
    """Returns the `config.json` of a model of gpt-oss-120b's shape, whose experts are quantized."""
    yarn = {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096, "truncate": False,
    }  # fmt: skip
    names = *(f"attn.{name}_proj" for name in ("qkv", "q", "k", "v", "o")), "mlp.router"
    ignored = ["lm_head"] + [f"model.layers.{layer}.{name}" for layer in range(layers) for name in names]
    return {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True, "eos_token_id": 2, "pad_token_id": 0,
        "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initializer_range": 0.02, "intermediate_size": 2880,
        "layer_types": [("sliding_attention", "full_attention")[layer % 2] for layer in range(layers)],
        "max_position_embeddings": 131072, "num_attention_heads": 64, "num_experts_per_tok": 4, "experts_per_token": 4,
        "num_hidden_layers": layers, "num_key_value_heads": 8, "num_local_experts": 128, "rms_norm_eps": 1e-5, "rope_theta": 150000.0,
        "rope_scaling": yarn, "rope_parameters": yarn | {"rope_theta": 150000.0}, "sliding_window": 128, "swiglu_limit": 7.0,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 201088, "quantization_config": modelopt(ignored),
    }  # fmt: skip


MODELS = {"qwen3-30b-a3b": (48, lambda layers: config(layers, 151936, True)), "gpt-oss-120b": (8, gpt_oss)}
"""The number of layers that is measured by default, and a function that returns the `config.json`."""


def write_config(folder, *arguments):
    write(folder, config(*arguments))


def write(folder, described):
    (pathlib.Path(folder) / "config.json").write_text(json.dumps(described))


def engine(folder, contender, **options):
    """Returns the engine with a contender's kernels, or a model without quantization (`bf16`). Checks that these kernels serve."""
    os.environ["VLLM_PLUGINS"] = "nvfp4" if contender.startswith("nvfp4") else ""
    os.environ.update(ENVIRONMENTS.get(contender, {}))
    from vllm import LLM

    llm = LLM(model=str(folder), skip_tokenizer_init=True, seed=0, **CONTENDERS.get(contender, {}), **options)
    if contender in CONTENDERS:
        found = set().union(*llm.apply_model(kernels))
        wanted = contender.removesuffix("-fp8")
        assert found and all(name.lower().startswith(wanted) for name in found), found
    return llm


def kernels(model):
    """Returns the classes that compute the quantized layers, of experts and of attention. `LLM.apply_model` runs this and the next functions
    on each rank's model."""
    found = set()
    for module in model.modules():
        method = getattr(module, "scheme", None) or getattr(module, "quant_method", None)
        kind = type(module).__name__
        if not (kind.endswith("RoutedExperts") or kind in ("QKVParallelLinear", "RowParallelLinear")) or "Unquantized" in type(method).__name__:
            continue
        kernel = getattr(getattr(method, "moe_kernel", None), "fused_experts", None) or getattr(method, "kernel", None) or method
        found.add(type(kernel).__name__)
    return found


def keep_logits(model):
    """Makes the model keep its logits from here on."""
    compute, model.kept_logits = model.compute_logits, []

    def keep(hidden, *arguments):
        logits = compute(hidden, *arguments)
        if logits is not None:  # Only one of several GPUs has logits.
            model.kept_logits.append(logits.float().cpu())
        return logits

    model.compute_logits = keep


def kept_logits(model):
    """Returns the logits of the call with the most tokens."""
    return max(model.kept_logits, key=len, default=None)


def loaded(llm):
    """Returns the model inside an engine on one GPU."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.get_model()
