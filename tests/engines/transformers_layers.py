#!/usr/bin/env python3
"""Compares MoE layers of `nvfp4 run` with the modules of Transformers, for small models of many families.

    transformers_layers.py PATH/TO/nvfp4 [FAMILY …]

Needs `pip install transformers==5.24.0 torch` but no GPU. It is not part of CI. For each family, Transformers makes a small model
with random weights and saves it. `nvfp4 quantize` makes it NVFP4, and `nvfp4 dequantize --dtype f32` makes the numbers of NVFP4
readable for Transformers, which loads them into its own modules. Random tokens then go through the module of one layer in f32,
and through `nvfp4 run --op moe --activations`, whose tokens, intermediate results and output are bf16.

A layer that the command refuses counts as refused, with the reason. The script fails if an output differs by more than 1 % of its
size, or if Transformers cannot load the model. A recorded table: benches/lab/measurements/transformers-layers.txt.
"""

import json
import pathlib
import re
import struct
import subprocess
import sys
import tempfile

import torch
import transformers
from safetensors.torch import load_file, save_file

HIDDEN, INTER, EXPERTS, TOP_K, TOKENS = 64, 48, 8, 2, 33
LIMIT = 0.01

# Keys of all families; Transformers ignores the ones that a family does not have.
COMMON = dict(
    vocab_size=128, hidden_size=HIDDEN, intermediate_size=96, moe_intermediate_size=INTER, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_local_experts=EXPERTS, num_experts=EXPERTS,
    n_routed_experts=EXPERTS, moe_num_experts=EXPERTS, num_experts_per_tok=TOP_K, moe_k=TOP_K, moe_topk=TOP_K,
    max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
)  # fmt: skip
# DeepSeek's attention and groups of experts.
LATENT = dict(
    q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16, first_k_dense_replace=1,
    n_shared_experts=1, n_group=4, topk_group=2, num_key_value_heads=4, routed_scaling_factor=2.5, num_nextn_predict_layers=0,
)  # fmt: skip
LINEAR = dict(
    layer_types=["full_attention", "full_attention"], linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16,
    linear_value_head_dim=16, shared_expert_intermediate_size=32,
)  # fmt: skip
# Attention over chosen tokens.
INDEXED = dict(index_topk=16, index_head_dim=16, index_n_heads=2)
# DeepSeek-V4's attention.
COMPRESSED = INDEXED | dict(
    num_key_value_heads=1, q_lora_rank=16, o_groups=2, o_lora_rank=16, sliding_window=16, layer_types=["sliding_attention"] * 2,
    hc_mult=2, num_nextn_predict_layers=0,
)  # fmt: skip
# The second of two layers has experts.
SPARSE_LAST = dict(layer_types=["full_attention"] * 2, mlp_layer_types=["dense", "sparse"])
# Family, with a variant after a space: configuration, layer, and its modules whose outputs are added up.
FAMILIES = {
    "qwen2_moe": (dict(shared_expert_intermediate_size=32, decoder_sparse_step=1), 1, ["mlp"]),
    "qwen3_moe": (dict(norm_topk_prob=True, decoder_sparse_step=1), 1, ["mlp"]),
    "qwen3_next": (LINEAR | dict(norm_topk_prob=True), 1, ["mlp"]),
    "qwen3_5_moe_text": (LINEAR, 1, ["mlp"]),
    "mixtral": (dict(intermediate_size=INTER), 1, ["mlp"]),
    "olmoe": (dict(intermediate_size=INTER), 1, ["mlp"]),
    "flex_olmo": (dict(intermediate_size=INTER), 1, ["mlp"]),
    "phimoe": (dict(intermediate_size=INTER), 1, ["mlp"]),
    "gpt_oss": (dict(intermediate_size=INTER, layer_types=["full_attention"] * 2), 1, ["mlp"]),
    "granitemoe": (dict(intermediate_size=INTER), 1, ["block_sparse_moe"]),
    "granitemoeshared": (dict(intermediate_size=INTER, shared_intermediate_size=80), 1, ["block_sparse_moe", "shared_mlp"]),
    "granitemoehybrid": (
        dict(intermediate_size=INTER, shared_intermediate_size=80, layer_types=["attention"] * 2),
        1,
        ["block_sparse_moe", "shared_mlp"],
    ),
    "deepseek_v2": (LATENT | dict(topk_method="group_limited_greedy", routed_scaling_factor=1.0), 1, ["mlp"]),
    "deepseek_v3": (LATENT | dict(norm_topk_prob=True), 1, ["mlp"]),
    "llama4_text": (
        dict(intermediate_size=INTER, intermediate_size_mlp=96, num_experts_per_tok=1, interleave_moe_layer_step=1),
        1,
        ["feed_forward"],
    ),
    "gemma4_text": (
        dict(enable_moe_block=True, top_k_experts=TOP_K, layer_types=["full_attention"] * 2, hidden_size_per_layer_input=0,
             vocab_size_per_layer_input=128, num_kv_shared_layers=0, num_global_key_value_heads=2, global_head_dim=16),
        1,
        ["mlp"],
    ),
    "glm4_moe": (LATENT | dict(norm_topk_prob=True), 1, ["mlp"]),
    "minimax": (dict(intermediate_size=INTER, layer_types=["full_attention"] * 2), 1, ["mlp"]),
    "minimax_m2": (dict(intermediate_size=INTER), 1, ["mlp"]),
    "nemotron_h": (
        dict(layers_block_type=["attention", "moe"], moe_shared_expert_intermediate_size=32, n_shared_experts=1, n_group=1,
             topk_group=1, mlp_hidden_act="relu2", norm_topk_prob=True, routed_scaling_factor=2.5),
        1,
        ["mixer"],
    ),
    "nemotron_h latent": (
        dict(layers_block_type=["attention", "moe"], moe_shared_expert_intermediate_size=32, n_shared_experts=1, n_group=1,
             topk_group=1, mlp_hidden_act="relu2", norm_topk_prob=True, routed_scaling_factor=2.5, moe_latent_size=32),
        1,
        ["mixer"],
    ),
    "ernie4_5_moe": (
        dict(moe_num_shared_experts=1, moe_layer_start_index=0, moe_layer_end_index=1, moe_layer_interval=1), 1, ["mlp"]
    ),
    "hunyuan_v1_moe": (dict(intermediate_size=INTER), 1, ["mlp"]),
    "lfm2_moe": (dict(num_dense_layers=1, layer_types=["full_attention"] * 2, use_expert_bias=True), 1, ["feed_forward"]),
    "dots1": (LATENT | dict(norm_topk_prob=True, layer_types=["full_attention"] * 2), 1, ["mlp"]),
    "bailing_hybrid": (LATENT | dict(layer_types=["full_attention"] * 2), 1, ["mlp"]),
    "exaone_moe": (LATENT | dict(layer_types=["full_attention"] * 2, num_shared_experts=1), 1, ["mlp"]),
    "solar_open": (LATENT | dict(norm_topk_prob=True), 1, ["mlp"]),
    "afmoe": (dict(num_dense_layers=1, num_shared_experts=1, layer_types=["full_attention"] * 2), 1, ["mlp"]),
    "mimo_v2_flash": (LATENT | dict(layer_types=["full_attention"] * 2, n_shared_experts=None), 1, ["mlp"]),
    "jamba": (
        dict(intermediate_size=INTER, expert_layer_period=1, expert_layer_offset=0, attn_layer_period=1, attn_layer_offset=0,
             use_mamba_kernels=False),
        1,
        ["feed_forward"],
    ),
    "deepseek_v32": (LATENT | INDEXED | dict(norm_topk_prob=True), 1, ["mlp"]),
    "deepseek_v4": (COMPRESSED | dict(mlp_layer_types=["hash_moe", "moe"], swiglu_limit=0.5), 1, ["mlp"]),
    "deepseek_v4 by token id": (COMPRESSED | dict(mlp_layer_types=["hash_moe", "moe"], swiglu_limit=0.5), 0, ["mlp"]),
    "glm_moe_dsa": (LATENT | INDEXED | dict(norm_topk_prob=True), 1, ["mlp"]),
    "glm4_moe_lite": (LATENT | dict(norm_topk_prob=True), 1, ["mlp"]),
    "glm5_next_text": (
        LATENT | INDEXED | SPARSE_LAST | dict(norm_topk_prob=True, swiglu_limit=0.5, head_dim=0, qk_rope_head_dim=0,
                                              layer_types=["linear_attention"] * 2, linear_head_dim=16, linear_num_heads=4),
        1,
        ["mlp"],
    ),
    "minimax_m3_vl_text": (
        SPARSE_LAST | dict(intermediate_size=INTER, dense_intermediate_size=96, shared_intermediate_size=80, rotary_dim=8), 1, ["mlp"]
    ),
    "step3p7_text": (SPARSE_LAST | dict(share_expert_dim=80, moe_router_scaling_factor=3.0), 1, ["mlp"]),
    "step3p7_text clamped": (
        SPARSE_LAST | dict(share_expert_dim=80, swiglu_limits=[0, 0.5], swiglu_limits_shared=[0, 1.5]), 1, ["mlp"]
    ),
    "step3p7_text half clamped": (SPARSE_LAST | dict(share_expert_dim=80, swiglu_limits=[0, 0.5]), 1, ["mlp"]),
    "kimi_linear": (LATENT | SPARSE_LAST | dict(q_lora_rank=None, norm_topk_prob=True), 1, ["mlp"]),
    "longcat_flash": (
        LATENT | dict(num_layers=2, num_hidden_layers=4, ffn_hidden_size=96, expert_ffn_hidden_size=INTER, zero_expert_num=4, n_shared_experts=0,
                      n_group=1, topk_group=1),
        1,
        ["mlp"],
    ),
    "hy_v3": (SPARSE_LAST | dict(num_shared_experts=1), 1, ["mlp"]),
    "hy_v4": (LATENT | INDEXED | SPARSE_LAST | dict(norm_topk_prob=True, swiglu_limit=0.5), 1, ["mlp"]),
    "mistral4": (LATENT | dict(norm_topk_prob=True, n_group=1, topk_group=1), 1, ["mlp"]),
    "mistral4 groups": (LATENT | dict(norm_topk_prob=True, num_experts_per_tok=4), 1, ["mlp"]),
    "mistral_large4_text": (LATENT | INDEXED | SPARSE_LAST | dict(n_group=1, topk_group=1), 1, ["mlp"]),
    "axk1": (LATENT | dict(norm_topk_prob=True), 1, ["mlp"]),
    "axk2": (LATENT | INDEXED | SPARSE_LAST | dict(norm_topk_prob=True, n_group=None, topk_group=None), 1, ["mlp"]),
    "cohere2_moe": (SPARSE_LAST | dict(intermediate_size=INTER), 1, ["mlp"]),
    "cohere2_moe sigmoid": (SPARSE_LAST | dict(intermediate_size=INTER, expert_selection_fn="sigmoid"), 1, ["mlp"]),
    "cohere2_moe shared": (SPARSE_LAST | dict(intermediate_size=INTER, num_shared_experts=1), 1, ["mlp"]),
    "laguna": (
        SPARSE_LAST | dict(shared_expert_intermediate_size=32, moe_routed_scaling_factor=2.5, num_attention_heads_per_layer=[4, 4]),
        1,
        ["mlp"],
    ),
    "mellum": (SPARSE_LAST, 1, ["mlp"]),
    "granitemoe_swa": (
        SPARSE_LAST | dict(intermediate_size=INTER, shared_intermediate_size=80), 1, ["block_sparse_moe", "shared_mlp"]
    ),
    "dots3_note_text": (LATENT | INDEXED | SPARSE_LAST | dict(norm_topk_prob=True), 1, ["mlp"]),
    "kolibri1": (SPARSE_LAST | dict(shared_expert_intermediate_size=32), 1, ["mlp"]),
    "lara_mini": (LINEAR | dict(norm_topk_prob=True), 1, ["mlp"]),
    "beam": (SPARSE_LAST | dict(n_group=4, topk_group=2), 1, ["mlp"]),
    "sarvam_moe": (LATENT | dict(norm_topk_prob=True), 1, ["mlp"]),
    "qwen3_vl_moe_text": ({}, 1, ["mlp"]),
}  # fmt: skip


# Tensors with all experts: the projections that `nvfp4 quantize` writes.
FUSED = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "gate_up_proj_bias": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
    "down_proj_bias": ("down_proj",),
    "input_linear": ("w1", "w3"),
    "output_linear": ("w2",),
}


def command(nvfp4, *arguments):
    return subprocess.run([nvfp4, *map(str, arguments)], capture_output=True, text=True)


def classes_of(family, values):
    """Returns the configuration of a family, and the class of its language model."""
    if family == "step3p7_text":
        from transformers.models.step3p7 import configuration_step3p7, modeling_step3p7

        return configuration_step3p7.Step3p7TextConfig(**values), modeling_step3p7.Step3p7TextModel
    config = transformers.AutoConfig.for_model(family, **values)
    mapping = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    return config, (mapping if type(config) in mapping else transformers.MODEL_MAPPING)[type(config)]


def layers_of(model):
    """Returns the decoder layers of a model."""
    return next(m for m in model.modules() if hasattr(m, "layers") and isinstance(m.layers, torch.nn.ModuleList)).layers


def randomize(model, generator):
    """Gives all matrices, biases, norms and corrections numbers of the size that real models have after scaling."""
    with torch.no_grad():
        tensors = list(model.named_parameters()) + [(name, buffer) for name, buffer in model.named_buffers() if "bias" in name]
        for name, tensor in tensors:
            if tensor.dim() >= 2:
                is_router = "gate." in name or "router" in name
                numbers = torch.randn(tensor.shape, generator=generator) * (1.0 if is_router else 0.3)
            elif "bias" in name:
                numbers = torch.randn(tensor.shape, generator=generator) * 0.1
            elif "norm" in name or "scale" in name:
                numbers = 1 + torch.randn(tensor.shape, generator=generator) * 0.3
            else:
                continue
            tensor.copy_(numbers.to(torch.bfloat16))
        for name, table in model.named_buffers():
            if "tid2eid" in name:
                order = torch.rand(len(table), EXPERTS, generator=generator).argsort(1)
                table.copy_(order[:, : table.shape[1]])


def output(layer, names, tokens):
    """Returns the sum of the outputs of some modules of a layer.

    The layer of Gemma 4 has no module for this sum. It runs whole, without its attention, up to the norm behind the sum.
    """
    if hasattr(layer, "post_feedforward_layernorm_2"):
        sums = []
        layer.post_feedforward_layernorm.register_forward_pre_hook(lambda _, inputs: sums.append(inputs[0]))
        layer.self_attn.forward = lambda hidden_states, **_: (torch.zeros_like(hidden_states), None)
        layer(tokens[None])
        return sums[0].reshape(tokens.shape)
    total = 0
    for name in names:
        module = getattr(layer, name)
        if hasattr(module, "post_mlp_layernorm"):
            # In the checkpoint of A.X-K1, this norm lies behind the block.
            module.post_mlp_layernorm = torch.nn.Identity()
        ids = dict(input_ids=torch.arange(len(tokens))[None]) if getattr(module, "is_hash", False) else {}
        result = module(tokens[None], **ids)
        result = result[0] if isinstance(result, tuple) else result
        total = total + result.reshape(tokens.shape)
    return total


def fuse(source, large):
    """Puts experts that `nvfp4 quantize` wrote apart back into the tensors of the source, whose layout Transformers reads."""
    original, numbers = load_file(source / "model.safetensors"), load_file(large / "model.safetensors")
    for name, tensor in original.items():
        prefix, _, last = name.removesuffix(".weight").rpartition(".")
        if tensor.dim() < 2 or name in numbers or last not in FUSED:
            continue
        prefix = prefix if prefix.endswith("experts") else f"{prefix}.experts"
        kind = "bias" if last.endswith("_bias") else "weight"
        parts = [[numbers.pop(f"{prefix}.{e}.{part}.{kind}") for e in range(tensor.shape[0])] for part in FUSED[last]]
        parts = [torch.stack(part) for part in parts]
        in_turn = "gpt_oss" in json.loads((source / "config.json").read_text())["model_type"]
        fused = torch.stack(parts, 2).flatten(1, 2) if in_turn else torch.cat(parts, 1)
        numbers[name] = (fused if fused.shape == tensor.shape else fused.transpose(1, 2)).contiguous()
    save_file(numbers, large / "model.safetensors", {"format": "pt"})


def drop_identities(folder):
    """Removes the weights of identity experts. Transformers allocates gate and up for them; LongCat-Flash's files have none."""
    tensors = load_file(folder / "model.safetensors")
    number = re.compile(r"\.experts\.(\d+)\.")
    kept = {name: tensor for name, tensor in tensors.items() if not ((at := number.search(name)) and int(at[1]) >= EXPERTS)}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


def compare(nvfp4, family, folder):
    """Returns what became of a family, and a number or words about it."""
    values, index, names = FAMILIES[family]
    config, cls = classes_of(family.split()[0], COMMON | values)
    config._experts_implementation = config._attn_implementation = "eager"
    generator = torch.Generator().manual_seed(0)
    model = cls._from_config(config, dtype=torch.float32)
    randomize(model, generator)
    source, small, large = folder / "source", folder / "nvfp4", folder / "f32"
    # Transformers would give the gates of Hy4's blocks the name of its attention's gates.
    model.to(torch.bfloat16).save_pretrained(source, save_original_format=not family.startswith("hy_v4"))
    for step in (("quantize", source, small), ("dequantize", small, large, "--dtype", "f32")):
        done = command(nvfp4, *step)
        if done.returncode:
            return f"{step[0]} refused", done.stderr.strip().replace(f"{folder}/", "")
    fuse(source, large)
    loaded = cls.from_pretrained(large, dtype=torch.float32, output_loading_info=True)
    model, info = loaded
    if any(info[key] for key in ("missing_keys", "mismatched_keys", "unexpected_keys")):
        return "failed", f"Transformers cannot load all tensors: {info}"
    tokens = torch.randn(TOKENS, HIDDEN, generator=generator).to(torch.bfloat16)
    save_file({"hidden": tokens, "token_ids": torch.arange(TOKENS, dtype=torch.int32)}, folder / "tokens.safetensors")
    if family == "longcat_flash":
        drop_identities(small)
    arguments = ("--layer", index, "--activations", folder / "tokens.safetensors", "--output", folder / "out.safetensors")
    done = command(nvfp4, "run", "--backend", "cpu", "--op", "moe", "--weights", small, *arguments, "--repeat", 1)
    if done.returncode:
        return "refused", done.stderr.strip().replace(f"{folder}/", "")
    got = load_file(folder / "out.safetensors")["output"].float()
    with torch.no_grad():
        expected = output(layers_of(model)[index], names, tokens.float())
    error = ((got - expected).norm() / expected.norm()).item()
    return ("same" if error < LIMIT else "failed"), f"{error:.2%}"


def main():
    nvfp4, *chosen = sys.argv[1:]
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    failed = []
    for family in chosen or FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            try:
                verdict, words = compare(nvfp4, family, pathlib.Path(folder))
            except Exception as error:  # noqa: BLE001: one family must not end the table
                verdict, words = "failed", f"{type(error).__name__}: {error}".replace("\n", " ")
        print(f"{family:25} {verdict:8} {words[:300]}", flush=True)
        if verdict == "failed":
            failed.append(family)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
