"""Compares routers and experts of more families with Transformers' modules, and runs the examples.

python3 -m venv env && env/bin/pip install torch transformers ./python/nvfp4
env/bin/python python/nvfp4/examples/differential.py
"""

import importlib

import deepseek_v4
import nemotron_3
import qwen3_5
import torch
from common import check, check_routes, halves, randomized, rounded, routed_slack, tokens
from torch.nn import functional as F

import nvfp4


def module(family, name):
    return getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)


def config(family, name, **sizes):
    made = getattr(importlib.import_module(f"transformers.models.{family}.configuration_{family}"), name)(**sizes)
    made._experts_implementation = "eager"
    return made


def compared(name, experts, activation, activate, hidden, count, top_k, interleaved=False):
    """Compares experts of random tokens with random choices."""
    experts = randomized(experts)
    biases, tensors = None, (experts.gate_up_proj, experts.down_proj)
    if interleaved:
        # gpt-oss stores the transposed matrices, and rows of gate and up in turn.
        gate_up = experts.gate_up_proj.data.transpose(1, 2).contiguous()
        down = experts.down_proj.data.transpose(1, 2).contiguous()
        gate, up = (gate_up[:, part::2].contiguous() for part in (0, 1))
        parts = (gate, up, down)
        gate, up, quantized_down = (rounded(part) for part in parts)
        for part, numbers in enumerate(parts[:2]):
            experts.gate_up_proj.data[:, :, part::2] = numbers.transpose(1, 2)
        experts.down_proj.data = down.transpose(1, 2).contiguous()
        for bias in (experts.gate_up_proj_bias, experts.down_proj_bias):
            bias.data = bias.data.float().double()
        both = experts.gate_up_proj_bias.float()
        biases = both[:, ::2].contiguous(), both[:, 1::2].contiguous(), experts.down_proj_bias.float()
        tensors = experts.gate_up_proj.transpose(1, 2), down
        of_module = (experts.gate_up_proj_bias, experts.down_proj_bias)
    else:
        (gate, up), quantized_down = halves(rounded(experts.gate_up_proj)), rounded(experts.down_proj)
        of_module = (None, None)
    layer = nvfp4.Moe(gate, up, quantized_down, activation=activation, biases=biases)
    x = tokens(30, hidden)
    weights, ids = torch.rand(30, count).topk(top_k)
    output = layer(x, ids.int(), weights)
    reference = experts(x.double(), ids, weights.double())
    check(name, output, reference, routed_slack(x, *tensors, activate, ids, weights, of_module))


def routed(name, router, logits, hidden, **rule):
    """Compares a router with a module's."""
    x = tokens(30, hidden)
    weights, ids = nvfp4.route(logits(x).float(), **rule)
    _, want_weights, want_ids = router(x.double())[-3:]
    check_routes(name, ids, weights, want_ids, want_weights)
    print(f"{name}: the same experts and weights")


@torch.no_grad()
def main():
    for example in (qwen3_5, deepseek_v4, nemotron_3):
        example.main()

    sizes = {"hidden_size": 96, "num_experts_per_tok": 3}
    oss = config("gpt_oss", "GptOssConfig", **sizes, intermediate_size=48, num_local_experts=8)
    experts = module("gpt_oss", "GptOssExperts")(oss)
    compared("gpt-oss", experts, "gpt-oss", experts._apply_gate, 96, 8, 3, interleaved=True)

    m3 = config("minimax_m3_vl", "MiniMaxM3VLTextConfig", **sizes, intermediate_size=48, num_local_experts=8)
    experts = module("minimax_m3_vl", "MiniMaxM3VLExperts")(m3)
    compared("minimax-m3", experts, "swigluoai", experts._apply_gate, 96, 8, 3)
    router = randomized(module("minimax_m3_vl", "MiniMaxM3VLTopKRouter")(m3))
    bias = router.e_score_correction_bias.float()
    product = lambda x: F.linear(x.double(), router.weight)
    routed("minimax-m3", router, product, 96, top_k=3, scoring="sigmoid", bias=bias)

    step = config("step3p7", "Step3p7TextConfig", **sizes, moe_intermediate_size=48, num_local_experts=8)
    experts = module("step3p7", "Step3p7Experts")(step, swiglu_limit=0.5)
    compared("step-3.7", experts, "swiglu-step=0.5", experts._apply_gate, 96, 8, 3)

    gemma = config(
        "gemma4", "Gemma4TextConfig", hidden_size=96, moe_intermediate_size=48, num_experts=8, top_k_experts=3, enable_moe_block=True
    )
    experts = module("gemma4", "Gemma4TextExperts")(gemma)
    gelu = lambda product: F.gelu(product.chunk(2, -1)[0], approximate="tanh") * product.chunk(2, -1)[1]
    compared("gemma-4", experts, "gelu-tanh", gelu, 96, 8, 3)
    router = randomized(module("gemma4", "Gemma4TextRouter")(gemma))
    product = lambda x: router.proj(router.norm(x.double()) * router.scale * router.scalar_root_size)
    routed("gemma-4", router, product, 96, top_k=3, expert_scale=router.per_expert_scale.float())

    # The exact gelu with Mixtral's experts, whose activation is a word of the configuration.
    mixtral = config("mixtral", "MixtralConfig", **sizes, intermediate_size=48, num_local_experts=8, hidden_act="gelu")
    experts = module("mixtral", "MixtralExperts")(mixtral)
    gelu = lambda product: F.gelu(product.chunk(2, -1)[0]) * product.chunk(2, -1)[1]
    compared("exact gelu", experts, "gelu", gelu, 96, 8, 3)

    longcat = config("longcat_flash", "LongcatFlashConfig", hidden_size=96, n_routed_experts=16, zero_expert_num=8, moe_topk=4)
    router = randomized(module("longcat_flash", "LongcatFlashTopkRouter")(longcat))
    bias = router.e_score_correction_bias.float()
    product = lambda x: F.linear(x.float(), router.classifier.weight.float())
    rule = {"top_k": 4, "bias": bias, "renormalize": False, "scale": longcat.routed_scaling_factor}
    routed("longcat-flash", router, product, 96, **rule)
    # The same router, whose last 8 experts have no weights.
    logits = product(tokens(30, 96))
    (weights, ids), (want_weights, want_ids) = nvfp4.route(logits, null_experts=8, **rule), nvfp4.route(logits, **rule)
    assert torch.equal(ids, want_ids.where(want_ids < 16, -1)) and torch.equal(weights, want_weights)

    ernie = config("ernie4_5_moe", "Ernie4_5_MoeConfig", hidden_size=96, moe_num_experts=16, moe_k=4)
    router = randomized(module("ernie4_5_moe", "Ernie4_5_MoeTopKRouter")(ernie))
    bias = router.moe_statics.e_score_correction_bias.reshape(-1).float()
    product = lambda x: F.linear(x.float(), router.weight.float())
    routed("ernie-4.5", router, product, 96, top_k=4, bias=bias)


if __name__ == "__main__":
    main()
