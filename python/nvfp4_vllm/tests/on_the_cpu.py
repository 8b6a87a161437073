#!/usr/bin/env python3
"""Runs the plugin in the real vLLM 0.24.0 on a machine without a GPU: registration, configuration, selection, loading, packing.

    on_the_cpu.py            all cases, each in a process of its own
    on_the_cpu.py CASE       one of them

Needs a virtual environment with vLLM 0.24.0 (about 10 GB), `nvfp4` and `nvfp4_vllm`, and a C compiler; it is not part of CI. vLLM
is made to believe in a Hopper card; what is packed then is packed for the CPU, and the experts compute there.
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


def modelopt(algorithm, ignored):
    numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    inputs = None if algorithm.startswith("W4A16") else numbers
    group = {"targets": ["Linear"], "weights": numbers, "input_activations": inputs}
    description = {"quant_method": "modelopt", "quant_algo": algorithm, "group_size": 16, "config_groups": {"group_0": group}}
    return description | {"producer": {"name": "nvfp4", "version": "0.1.0"}, "ignore": ignored}


def mixed(ignored):
    layers = {f"model.layers.{layer}.mlp.experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16} for layer in range(2)}
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "ignore": ignored}


def compressed_tensors(inputs, ignored):
    numbers = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    group = {"targets": ["Linear"], "format": "nvfp4-pack-quantized", "weights": numbers | {"dynamic": False}}
    group |= {"input_activations": numbers | {"dynamic": "local"} if inputs else None, "output_activations": None}
    description = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "quantization_status": "compressed"}
    return description | {"kv_cache_scheme": None, "config_groups": {"group_0": group}, "ignore": ignored}


# Configuration, options of the engine, and the class that each layer's experts have.
CASES = {
    "modelopt W4A4": (modelopt("NVFP4", OTHERS + ATTENTION), {}, ["ModelOptNvfp4MoE"] * 2),
    "modelopt W4A16": (modelopt("W4A16_NVFP4", OTHERS + ATTENTION), {}, ["ModelOptNvfp4MoE"] * 2),
    "modelopt mixed": (mixed(OTHERS + ATTENTION), {}, ["ModelOptNvfp4MoE"] * 2),
    "compressed-tensors W4A4": (compressed_tensors(True, OTHERS + ATTENTION), {}, ["CompressedTensorsNvfp4MoE"] * 2),
    "compressed-tensors W4A16": (compressed_tensors(False, OTHERS + ATTENTION), {}, ["CompressedTensorsNvfp4MoE"] * 2),
    "a layer left": (
        modelopt("W4A16_NVFP4", OTHERS + ATTENTION + ["model.layers.0.mlp.experts"]),
        {},
        ["UnquantizedFusedMoEMethod", "ModelOptNvfp4MoE"],
    ),
    "batch invariant": (modelopt("W4A16_NVFP4", OTHERS + ATTENTION), {"VLLM_BATCH_INVARIANT": "1"}, ["ModelOptNvfp4MoE"] * 2),
    "marlin, as the user asks": (modelopt("W4A16_NVFP4", OTHERS + ATTENTION), {"moe_backend": "marlin"}, ["ModelOptNvFp4FusedMoE"] * 2),
    "a size that ranks cannot share": (modelopt("W4A16_NVFP4", OTHERS + ATTENTION), {"moe_intermediate_size": 56}, "ValueError"),
}  # fmt: skip


def run(name):
    from vllm_loads import pretend_hopper, stub_driver

    description, options, expected = CASES[name]
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
        chosen = {key: value for key, value in options.items() if key == "moe_backend"}
        arguments = EngineArgs(model=str(folder), skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, **chosen)
        config = arguments.create_engine_config()
        with set_current_vllm_config(config):
            init_distributed_environment(1, 0, f"file://{folder}/store", 0, backend="gloo")
            initialize_model_parallel(1, 1)
            torch.set_default_dtype(torch.bfloat16)
            if expected == "ValueError":
                try:
                    initialize_model(config)
                except ValueError as error:
                    assert "is no multiple of 16" in str(error) and "mlp.experts" in str(error), error
                    return
                raise AssertionError("a size of 56 was taken")
            with torch.device("cpu"):
                model = initialize_model(config)
            layers = [module for _, module in model.named_modules() if type(module).__name__ == "RoutedExperts"]
            found = [type(layer.quant_method).__name__ for layer in layers]
            assert found == expected, found
            matrices = load(model, [name.endswith("MoE") and "Nvfp4" in name for name in found], description)
            for layer, of_layer in zip(layers, matrices):
                if of_layer is not None:
                    compute(layer, of_layer)


def load(model, served, description):
    """Loads random experts by the names of a checkpoint; the matrices of each layer that is served, gate and up of different
    scales."""
    import nvfp4
    import torch

    of_tensors = description["quant_method"] == "compressed-tensors"
    tensors, layers = [], []
    for layer, is_served in enumerate(served):
        if not is_served:
            layers.append(None)
            continue
        projections = {"gate": [], "up": [], "down": []}
        for expert in range(EXPERTS):
            for name, found in projections.items():
                shape = (HIDDEN, INTERMEDIATE) if name == "down" else (INTERMEDIATE, HIDDEN)
                matrix = nvfp4.quantize(torch.randn(shape, dtype=torch.float32) * (1 + expert) * (2 if name == "up" else 1) / 8)
                prefix = f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj"
                one = torch.tensor(1.0, dtype=torch.float32)
                if of_tensors:
                    divisor = 1 / matrix.global_scale
                    matrix = matrix._replace(global_scale=1.0 / divisor)
                    parts = {"weight_packed": matrix.values, "weight_scale": matrix.scales, "weight_global_scale": divisor.reshape(1)}
                    parts |= {"input_global_scale": one.reshape(1)}
                else:
                    parts = {"weight": matrix.values, "weight_scale": matrix.scales, "weight_scale_2": matrix.global_scale}
                    parts |= {"input_scale": one}
                tensors += [(f"{prefix}.{part}", tensor) for part, tensor in parts.items()]
                found.append(matrix)
        layers.append([nvfp4.Quantized(*(torch.stack(parts) for parts in zip(*found))) for found in projections.values()])
    assert not tensors or model.load_weights(iter(tensors)), "no weight was taken"
    return layers


def compute(layer, matrices):
    """Packs a loaded layer, and compares what vLLM's kernel makes of tokens with the reference."""
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
