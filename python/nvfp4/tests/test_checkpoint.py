"""Layers of small checkpoints as `MoeBlock`, compared with the command `nvfp4 run --op moe`.

The command is `NVFP4_COMMAND`, or the one that cargo built. Needs safetensors.
"""

import json
import os
import pathlib
import shutil
import subprocess

import pytest
import torch

safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors")

import nvfp4

ROOT = pathlib.Path(__file__).resolve().parents[3]
COMMAND = os.environ.get("NVFP4_COMMAND") or next(
    (str(path) for kind in ("release", "debug") if (path := ROOT / "target" / kind / "nvfp4").exists()), shutil.which("nvfp4")
)
pytestmark = pytest.mark.skipif(COMMAND is None, reason="no command `nvfp4`: cargo build --release -p nvfp4 --features cli")

H, L, I, E = 64, 32, 48, 4
LAYER = "model.layers.0"


def add(tensors, module, rows, columns):
    matrix = nvfp4.quantize(torch.randn(rows, columns) / columns**0.5)
    tensors |= {f"{module}.weight": matrix.values, f"{module}.weight_scale": matrix.scales, f"{module}.weight_scale_2": matrix.global_scale}


def add_mlp(tensors, module, width, intermediate, gated=True, names=("gate_proj", "up_proj", "down_proj")):
    for name in names[0 if gated else 1 : 2]:
        add(tensors, f"{module}.{name}", intermediate, width)
    add(tensors, f"{module}.{names[2]}", width, intermediate)


def qwen3_5():
    """A shared expert with a gate, in the layer of the experts; factors of the tokens (AWQ)."""
    tensors, block = {}, f"{LAYER}.mlp"
    for expert in range(E):
        add_mlp(tensors, f"{block}.experts.{expert}", H, I)
    add_mlp(tensors, f"{block}.shared_expert", H, 80)
    factors = torch.rand(H) + 0.5
    for name in [name for name in tensors if name.endswith((".gate_proj.weight", ".up_proj.weight"))]:
        tensors[f"{name.removesuffix('.weight')}.pre_quant_scale"] = factors.clone()
    tensors |= {f"{block}.gate.weight": torch.randn(E, H), f"{block}.shared_expert_gate.weight": torch.randn(1, H)}
    return tensors, {"model_type": "qwen3_5_moe", "num_experts_per_tok": 2, "hidden_act": "silu"}


def nemotron():
    tensors, block = {}, f"{LAYER}.mixer"
    for expert in range(E):
        add_mlp(tensors, f"{block}.experts.{expert}", L, I, gated=False)
    add_mlp(tensors, f"{block}.shared_experts", H, 80, gated=False)
    add(tensors, f"{block}.fc1_latent_proj", L, H)
    tensors[f"{block}.fc2_latent_proj.weight"] = torch.randn(H, L).bfloat16()
    tensors |= {f"{block}.gate.weight": torch.randn(E, H), f"{block}.gate.e_score_correction_bias": torch.randn(E)}
    return tensors, {"model_type": "nemotron_h", "num_experts_per_tok": 2, "mlp_hidden_act": "relu2", "norm_topk_prob": True,
                     "routed_scaling_factor": 2.5, "n_shared_experts": 1}  # fmt: skip


def kimi():
    tensors, block = {}, f"{LAYER}.block_sparse_moe"
    for expert in range(E):
        add_mlp(tensors, f"{block}.experts.{expert}", L, I, names=("w1", "w3", "w2"))
    add_mlp(tensors, f"{block}.shared_experts", H, 80)
    tensors[f"{block}.routed_expert_down_proj.weight"] = torch.randn(L, H).bfloat16() / 8
    tensors[f"{block}.routed_expert_up_proj.weight"] = torch.randn(H, L) / 6
    tensors[f"{block}.routed_expert_norm.weight"] = torch.rand(L).bfloat16() + 0.5
    tensors |= {f"{block}.gate.weight": torch.randn(E, H), f"{block}.gate.e_score_correction_bias": torch.randn(E)}
    return tensors, {"model_type": "kimi_linear", "num_experts_per_token": 2, "hidden_act": "situ", "activation_situ_beta": 4.0,
                     "activation_situ_linear_beta": 25.0, "moe_renormalize": True, "latent_moe_use_norm": True, "rms_norm_eps": 0.1,
                     "num_shared_experts": 1}  # fmt: skip


def gemma():
    tensors = {}
    for expert in range(E):
        add_mlp(tensors, f"{LAYER}.experts.{expert}", H, I)
    add_mlp(tensors, f"{LAYER}.mlp", H, 80)
    for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"):
        tensors[f"{LAYER}.{name}.weight"] = torch.rand(H).bfloat16() + 0.5
    tensors |= {f"{LAYER}.router.proj.weight": torch.randn(E, H), f"{LAYER}.router.scale": 4 * torch.rand(H),
                f"{LAYER}.router.per_expert_scale": torch.rand(E)}  # fmt: skip
    return tensors, {"model_type": "gemma4_text", "top_k_experts": 2, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 0.1}


def unquantized(tensors, block, forms):
    """Replaces the NVFP4 projections of a block by others in bf16, float32 or FP8, with some biases."""
    for name in sorted({name.rsplit(".", 1)[0] for name in tensors if name.startswith(f"{block}.")}):
        form = forms[name.rsplit(".", 1)[1]]
        rows, columns = tensors[f"{name}.weight"].shape
        for part in ("weight", "weight_scale", "weight_scale_2", "pre_quant_scale"):
            tensors.pop(f"{name}.{part}", None)
        numbers = torch.randn(rows, 2 * columns) / (2 * columns) ** 0.5
        if form == torch.float8_e4m3fn:
            scales = numbers.abs().amax(1, keepdim=True) / 448
            tensors[f"{name}.weight_scale"], numbers = scales, numbers / scales
        else:
            tensors[f"{name}.bias"] = torch.randn(rows).bfloat16()
        tensors[f"{name}.weight"] = numbers.to(form)
    return tensors


FORMS = {"gate_proj": torch.bfloat16, "up_proj": torch.float32, "down_proj": torch.float8_e4m3fn}


def qwen3_5_mixed():
    """A shared expert in other precisions, with a gate. The factors of the tokens belong to the routed experts alone."""
    tensors, config = qwen3_5()
    return unquantized(tensors, f"{LAYER}.mlp.shared_expert", FORMS), config


def nemotron_bf16():
    tensors, config = nemotron()
    return unquantized(tensors, f"{LAYER}.mixer.shared_experts", dict.fromkeys(FORMS, torch.bfloat16)), config


def kimi_fp8():
    tensors, config = kimi()
    return unquantized(tensors, f"{LAYER}.block_sparse_moe.shared_experts", dict.fromkeys(FORMS, torch.float8_e4m3fn)), config


def gemma_mixed():
    tensors, config = gemma()
    return unquantized(tensors, f"{LAYER}.mlp", FORMS), config


def step():
    """A shared expert in bf16, with another limit than the routed experts."""
    tensors, block = {}, f"{LAYER}.moe"
    for expert in range(E):
        add_mlp(tensors, f"{block}.experts.{expert}", H, I)
    add_mlp(tensors, f"{LAYER}.share_expert", H, 80)
    tensors = unquantized(tensors, f"{LAYER}.share_expert", dict.fromkeys(FORMS, torch.bfloat16))
    tensors |= {f"{block}.gate.weight": torch.randn(E, H), f"{block}.router_bias": torch.randn(E)}
    return tensors, {"model_type": "step3p5", "moe_top_k": 2, "hidden_act": "silu", "norm_expert_weight": True, "moe_router_activation": "sigmoid",
                     "swiglu_limits": [0.5], "swiglu_limits_shared": [0.25], "share_expert_dim": 80}  # fmt: skip


def step_nvfp4():
    """A shared expert in NVFP4, with another limit than the routed experts."""
    tensors, config = step()
    tensors = {name: tensor for name, tensor in tensors.items() if "share_expert" not in name}
    add_mlp(tensors, f"{LAYER}.share_expert", H, 80)
    return tensors, config


def longcat():
    """Two of six experts are identities."""
    tensors, block = {}, f"{LAYER}.mlp"
    for expert in range(E):
        add_mlp(tensors, f"{block}.experts.{expert}", H, I)
    tensors |= {f"{block}.router.classifier.weight": torch.randn(E + 2, H), f"{block}.router.e_score_correction_bias": torch.randn(E + 2) / 8}
    return tensors, {"model_type": "longcat_flash", "moe_topk": 3, "hidden_act": "silu", "zero_expert_num": 2, "routed_scaling_factor": 6.0}


def cohere():
    """The average of routed and shared experts."""
    tensors, block = {}, f"{LAYER}.mlp"
    for expert in range(E):
        add_mlp(tensors, f"{block}.experts.{expert}", H, I)
    add_mlp(tensors, f"{block}.shared_experts", H, 80)
    tensors[f"{block}.gate.weight"] = torch.randn(E, H)
    return tensors, {"model_type": "cohere2_moe", "num_experts_per_tok": 2, "hidden_act": "silu", "norm_topk_prob": True,
                     "expert_selection_fn": "sigmoid", "num_shared_experts": 1}  # fmt: skip


def save(folder, tensors, config):
    folder.mkdir()
    safetensors.save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "model", [qwen3_5, nemotron, kimi, gemma, qwen3_5_mixed, nemotron_bf16, kimi_fp8, gemma_mixed, step, step_nvfp4, longcat, cohere]
)
@pytest.mark.parametrize("token_format", ["16-bit", "nvfp4"])
def test_layer_equals_the_command(model, token_format, tmp_path, device):
    if (device, token_format) == ("cuda", "nvfp4") and torch.cuda.get_device_capability() < (10, 0):
        pytest.skip("only Blackwell multiplies NVFP4 tokens")
    tensors, config = model()
    save(tmp_path / "model", tensors, config)
    hidden = torch.randn(19, H).bfloat16()
    safetensors.save_file({"hidden": hidden}, tmp_path / "tokens.safetensors")
    line = [COMMAND, "run", "--backend", "cpu", "--op", "moe", "--weights", "model", "--layer", "0", "--repeat", "1", "--token-format", token_format]
    line += ["--activations", "tokens.safetensors", "--output", "out.safetensors"]
    subprocess.run(line, cwd=tmp_path, check=True, capture_output=True)
    want = safetensors.load_file(tmp_path / "out.safetensors")["output"].double()
    block = nvfp4.MoeBlock(tmp_path / "model", 0, device=device, token_format=token_format)
    got = block(hidden.to(device)).double().cpu()
    error = ((got - want).norm(dim=1) / want.norm(dim=1)).max()
    # An element rounded to the other side can move a whole block of an NVFP4 token.
    assert error < (0.006 if token_format == "16-bit" else 0.05), error
    assert f"{LAYER}.mlp.down_proj.weight" in block.used or model not in (gemma, gemma_mixed)
    with pytest.raises(ValueError, match=r"expected \[T, 64\]"):
        block(hidden[:, :32].to(device))


def test_layers_that_are_not_computed_are_refused(tmp_path):
    tensors, config = gemma()
    missing = f"{LAYER}.post_feedforward_layernorm_1.weight"
    save(tmp_path / "missing", {name: tensor for name, tensor in tensors.items() if name != missing}, config)
    with pytest.raises(ValueError, match="post_feedforward_layernorm_1"):
        nvfp4.MoeBlock(tmp_path / "missing", 0)
    save(tmp_path / "factors", tensors | {f"{LAYER}.experts.1.down_proj.pre_quant_scale": torch.full((I,), 0.5)}, config)
    with pytest.raises(nvfp4.Error, match="does not change tokens inside of experts"):
        nvfp4.MoeBlock(tmp_path / "factors", 0)
