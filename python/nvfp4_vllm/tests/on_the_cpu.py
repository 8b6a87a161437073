#!/usr/bin/env python3
"""Runs the plugin in the real vLLM 0.24.0 on a machine without a GPU: registration, configuration, selection, loading, packing.

    on_the_cpu.py            all cases, each in its own process
    on_the_cpu.py CASE       one case

Needs a virtual environment with vLLM 0.24.0 (about 10 GB), `nvfp4` and `nvfp4_vllm`, and a C compiler; it is not part of CI. The test
makes vLLM see a Hopper GPU, but weights are packed for the CPU, and the layers compute on the CPU.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "tests" / "engines"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "nvfp4" / "tests"))

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 64, 48, 4, 2

MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False, "decoder_sparse_step": 1,
    "head_dim": 16, "hidden_act": "silu", "hidden_size": HIDDEN, "intermediate_size": 64, "max_position_embeddings": 128,
    "mlp_only_layers": [], "moe_intermediate_size": INTERMEDIATE, "norm_topk_prob": True, "num_attention_heads": 4,
    "num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "num_hidden_layers": 2, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 128,
}  # fmt: skip

OTHERS = ["lm_head"] + [f"model.layers.{layer}.mlp.gate" for layer in range(2)]
ATTENTION = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(2) for name in "qkvo"]
HEAD, HEADS, KV_HEADS = 16, 4, 2


def modelopt(algorithm, ignored):
    numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    inputs = None if algorithm.startswith("W4A16") else numbers
    group = {"targets": ["Linear"], "weights": numbers, "input_activations": inputs}
    description = {"quant_method": "modelopt", "quant_algo": algorithm, "group_size": 16, "config_groups": {"group_0": group}}
    return description | {"producer": {"name": "nvfp4", "version": "0.1.0"}, "ignore": ignored}


def mixed(ignored):
    names = [f"model.layers.{layer}.mlp.experts" for layer in range(2)] + ATTENTION[:4]
    layers = {name: {"quant_algo": "W4A16_NVFP4", "group_size": 16} for name in names}
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "ignore": ignored}


def compressed_tensors(inputs, ignored):
    numbers = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    group = {"targets": ["Linear"], "format": "nvfp4-pack-quantized", "weights": numbers | {"dynamic": False}}
    group |= {"input_activations": numbers | {"dynamic": "local"} if inputs else None, "output_activations": None}
    description = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "quantization_status": "compressed"}
    return description | {"kv_cache_scheme": None, "config_groups": {"group_0": group}, "ignore": ignored}


# Configuration, engine options, expected class of each layer's experts, expected class of each layer's attention projections.
VLLMS, PLAIN = "ModelOptNvFp4FusedMoE", "UnquantizedLinearMethod"
MODELOPT, OF_TENSORS, W4A16 = "ModelOptNvfp4MoE", "CompressedTensorsNvfp4MoE", "ModelOptNvfp4W4A16Linear"
INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}
CASES = {
    "modelopt W4A4": (modelopt("NVFP4", OTHERS), {}, [MODELOPT] * 2, ["ModelOptNvfp4Linear"] * 2),
    "modelopt W4A16": (modelopt("W4A16_NVFP4", OTHERS), {}, [MODELOPT] * 2, [W4A16] * 2),
    "modelopt mixed": (mixed(OTHERS), {}, [MODELOPT] * 2, [W4A16, PLAIN]),
    "compressed-tensors W4A4": (compressed_tensors(True, OTHERS), {}, [OF_TENSORS] * 2, ["CompressedTensorsNvfp4"] * 2),
    "compressed-tensors W4A16": (compressed_tensors(False, OTHERS + ATTENTION[:4]), {}, [OF_TENSORS] * 2, [PLAIN, "CompressedTensorsNvfp4"]),
    "excluded layer": (
        modelopt("W4A16_NVFP4", OTHERS + ATTENTION + ["model.layers.0.mlp.experts"]),
        {},
        ["UnquantizedFusedMoEMethod", MODELOPT],
        [PLAIN] * 2,
    ),
    "batch invariant": (modelopt("W4A16_NVFP4", OTHERS), INVARIANT, [MODELOPT] * 2, [W4A16] * 2),
    "marlin by the user's choice": (
        modelopt("W4A16_NVFP4", OTHERS),
        {"moe_backend": "marlin", "linear_backend": "marlin"},
        [VLLMS] * 2,
        ["ModelOptNvFp4W4A16LinearMethod"] * 2,
    ),
    "intermediate size that ranks cannot share": (
        modelopt("W4A16_NVFP4", OTHERS), {"moe_intermediate_size": 56}, "mlp.experts: the intermediate size 56", None,
    ),
    "projection size that ranks cannot share": (
        # q, k and v have 32, 8 and 8 rows.
        modelopt("W4A16_NVFP4", OTHERS), {"head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 1},
        "self_attn.qkv_proj: tensor parallelism leaves 8 rows", None,
    ),
}  # fmt: skip


def run(name):
    from vllm_loads import pretend_hopper, stub_driver

    description, options, expected, expected_linear = CASES[name]
    os.environ.update({key: value for key, value in options.items() if key.startswith("VLLM_")})
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_PLUGINS="nvfp4")
    stub_driver()
    import torch

    pretend_hopper()
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        sizes = {key: value for key, value in options.items() if key in MODEL}
        (folder / "config.json").write_text(json.dumps(MODEL | sizes | {"quantization_config": description}))
        chosen = {key: value for key, value in options.items() if key.endswith("_backend")}
        arguments = EngineArgs(model=str(folder), skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, **chosen)
        config = arguments.create_engine_config()
        with set_current_vllm_config(config):
            init_distributed_environment(1, 0, f"file://{folder}/store", 0, backend="gloo")
            initialize_model_parallel(1, 1)
            torch.set_default_dtype(torch.bfloat16)
            if isinstance(expected, str):
                try:
                    initialize_model(config)
                except ValueError as error:
                    assert "is not a multiple of 16" in str(error) and expected in str(error), error
                    return
                raise AssertionError("accepted a size that is not a multiple of 16")
            with torch.device("cpu"):
                model = initialize_model(config)
            layers = [module for _, module in model.named_modules() if type(module).__name__ == "RoutedExperts"]
            found = [type(layer.quant_method).__name__ for layer in layers]
            assert found == expected, found
            fused = [module for _, module in model.named_modules() if type(module).__name__ == "QKVParallelLinear"]
            # A compressed-tensors layer has a scheme instead of a method of its own.
            found_linear = [type(getattr(layer, "scheme", layer.quant_method)).__name__ for layer in fused]
            assert found_linear == expected_linear, found_linear
            is_ours = lambda name: "Nvfp4" in name
            matrices, of_attention = load(model, [is_ours(name) for name in found], [is_ours(name) for name in found_linear], description)
            for layer, of_layer in zip(layers, matrices):
                if of_layer is not None:
                    compute(layer, of_layer)
            for layer, of_layer in zip(fused, of_attention):
                if of_layer is not None:
                    compute_linear(layer, of_layer)


def load(model, served, attention, description):
    """Loads random weights under a checkpoint's names. Returns the experts of each layer that `nvfp4` serves, and q, k and v of each
    layer whose attention `nvfp4` serves. Merged projections have different scales."""
    import nvfp4
    import torch

    of_tensors = description["quant_method"] == "compressed-tensors"
    tensors, layers, fused = [], [], []

    def random(prefix, rows, columns, size):
        matrix = nvfp4.quantize(torch.randn(rows, columns, dtype=torch.float32) * size)
        one = torch.tensor(1.0, dtype=torch.float32)
        if of_tensors:
            divisor = 1 / matrix.global_scale
            matrix = matrix._replace(global_scale=1.0 / divisor)
            parts = {"weight_packed": matrix.values, "weight_scale": matrix.scales, "weight_global_scale": divisor.reshape(1)}
            parts |= {"input_global_scale": one.reshape(1)}
        else:
            parts = {"weight": matrix.values, "weight_scale": matrix.scales, "weight_scale_2": matrix.global_scale}
            parts |= {"input_scale": one}
        tensors.extend((f"{prefix}.{part}", tensor) for part, tensor in parts.items())
        return matrix

    for layer, (experts_served, attention_served) in enumerate(zip(served, attention)):
        block = f"model.layers.{layer}"
        projections = {"gate": [], "up": [], "down": []}
        for expert in range(EXPERTS if experts_served else 0):
            for name, found in projections.items():
                rows, columns = (HIDDEN, INTERMEDIATE) if name == "down" else (INTERMEDIATE, HIDDEN)
                size = (1 + expert) * (2 if name == "up" else 1) / 8
                found.append(random(f"{block}.mlp.experts.{expert}.{name}_proj", rows, columns, size))
        stacked = [nvfp4.Quantized(*(torch.stack(parts) for parts in zip(*found))) for found in projections.values() if found]
        layers.append(stacked or None)
        shapes = (("q", HEADS, 1.0), ("k", KV_HEADS, 4.0), ("v", KV_HEADS, 0.1)) if attention_served else ()
        fused.append([random(f"{block}.self_attn.{name}_proj", heads * HEAD, HIDDEN, size) for name, heads, size in shapes] or None)
    # Linear layers of this format without input scales have no parameter for them.
    is_w4a16 = of_tensors and description["config_groups"]["group_0"]["input_activations"] is None
    tensors = [(name, tensor) for name, tensor in tensors if not (is_w4a16 and "self_attn" in name and name.endswith("input_global_scale"))]
    assert not tensors or model.load_weights(iter(tensors)), "no weight was loaded"
    return layers, fused


def compute(layer, matrices):
    """Packs a loaded layer, and compares the output of vLLM's kernel with the reference."""
    import numpy as np
    import reference
    import torch
    from vllm.v1.worker.workspace import init_workspace_manager

    method = layer.quant_method
    method.process_weights_after_loading(layer)
    names = {name for name, _ in layer.named_parameters(recurse=False)}
    assert names == {"w13_weight", "w2_weight"}, names
    assert not method.supports_eplb and not method.is_monolithic
    init_workspace_manager(torch.device("cpu"))
    tokens = torch.randn(5, HIDDEN, dtype=torch.float32).bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(5)]).int()
    weights = torch.rand(5, TOP_K, dtype=torch.float32)
    got = method.apply(layer, tokens, weights, ids, None, None)
    want, bound = reference.moe(tokens, ids, weights, *matrices)
    assert (np.abs(got.double().numpy() - want) <= bound).all()


def compute_linear(layer, matrices):
    """Packs q, k and v, which are one layer, and compares the output of vLLM's layer with the reference."""
    import numpy as np
    import reference
    import torch

    layer.quant_method.process_weights_after_loading(layer)
    assert {name for name, _ in layer.named_parameters(recurse=False)} == {"weight"}
    tokens = torch.randn(5, HIDDEN, dtype=torch.float32).bfloat16()
    got, _ = layer(tokens)
    matrix = np.concatenate([reference.numbers(matrix) for matrix in matrices])
    want = tokens.double().numpy() @ matrix.T
    bound = 2.0**-8 * np.abs(want) + 2.0**-20 * (np.abs(tokens.double().numpy()) @ np.abs(matrix.T))
    assert (np.abs(got.double().numpy() - want) <= bound).all()


def main():
    if len(sys.argv) == 2:
        run(sys.argv[1])
        print(f"{sys.argv[1]}: passed")
        return 0
    failed = 0
    for name in CASES:
        done = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True)
        print(f"{name}: {'passed' if done.returncode == 0 else 'FAILED'}", flush=True)
        if done.returncode != 0:
            failed += 1
            print(f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
