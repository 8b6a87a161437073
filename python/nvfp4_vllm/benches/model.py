"""Models of Qwen3-30B-A3B's shape with random weights, and the engine that runs them. The benchmarks share this module."""

import json
import os
import pathlib

# Set before vLLM is imported. The engine runs in this process, so that the benchmarks can inspect it.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1",
    VLLM_USE_FLASHINFER_SAMPLER="0", VLLM_USE_DEEP_GEMM="0",
)  # fmt: skip

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, HEADS, KV_HEADS, HEAD = 2048, 768, 128, 8, 32, 4, 128


def config(layers, vocabulary, quantized):
    """Returns the model's `config.json`."""
    numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    quantization = {
        "quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "group_size": 16,
        "producer": {"name": "nvfp4", "version": "0.1.0"},
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": numbers, "input_activations": None}},
        "ignore": ["lm_head"] + [f"model.layers.{layer}.mlp.gate" for layer in range(layers)],
    }  # fmt: skip
    described = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False, "bos_token_id": 1,
        "eos_token_id": 2, "decoder_sparse_step": 1, "head_dim": HEAD, "hidden_act": "silu", "hidden_size": HIDDEN,
        "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": layers,
        "mlp_only_layers": [], "moe_intermediate_size": INTERMEDIATE, "norm_topk_prob": True, "num_attention_heads": HEADS,
        "num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "num_hidden_layers": layers, "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": vocabulary,
    }  # fmt: skip
    return described | ({"quantization_config": quantization} if quantized else {})


def write_config(folder, *arguments):
    (pathlib.Path(folder) / "config.json").write_text(json.dumps(config(*arguments)))


def engine(folder, contender, **options):
    """Returns the engine with a contender's kernels (`nvfp4`, `marlin`, or a model without quantization). Checks that these serve."""
    os.environ["VLLM_PLUGINS"] = "nvfp4" if contender == "nvfp4" else ""
    if contender == "marlin":
        options |= {"moe_backend": "marlin", "linear_backend": "marlin"}
    from vllm import LLM

    llm = LLM(model=str(folder), skip_tokenizer_init=True, seed=0, **options)
    methods = set().union(*llm.apply_model(quant_methods))
    is_ours = [name in ("ModelOptNvfp4MoE", "Nvfp4Linear") for name in methods]
    expected = [contender == "nvfp4"] * 2
    assert is_ours == expected or contender not in ("nvfp4", "marlin"), methods
    return llm


def quant_methods(model):
    """Returns the classes that compute the layers, of experts and of attention. `LLM.apply_model` runs this and the next functions on each
    rank's model."""
    layers = ("RoutedExperts", "QKVParallelLinear", "RowParallelLinear")
    # `__name__` of our class of experts is that of vLLM's.
    return {type(module.quant_method).__qualname__ for module in model.modules() if type(module).__name__ in layers}


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
