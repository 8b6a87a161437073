"""Two MoE blocks of DeepSeek-V4: one whose router compares √softplus plus biases, and one of the first layers, whose experts follow
from token ids. Gate and up are clamped, and a shared expert processes every token.

Compares `nvfp4.Moe` on the CPU with `DeepseekV4SparseMoeBlock` of Transformers in float64, on the same NVFP4 numbers.
"""

import torch
from common import check, check_routes, halves, randomized, rounded, routed_slack, slack, tokens
from torch.nn import functional as F
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4SparseMoeBlock

import nvfp4

VOCABULARY = 50


@torch.no_grad()
def run(kind):
    config = DeepseekV4Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        moe_intermediate_size=64,
        n_routed_experts=24,
        num_experts_per_tok=6,
        num_hidden_layers=1,
        mlp_layer_types=[kind],
        layer_types=["heavily_compressed_attention"],
        swiglu_limit=1.0,  # small, so that it clamps
    )
    config._experts_implementation = "eager"
    block = randomized(DeepseekV4SparseMoeBlock(config, 0))
    gate, up = halves(rounded(block.experts.gate_up_proj))
    shared = [rounded(getattr(block.shared_experts, name).weight) for name in ("gate_proj", "up_proj", "down_proj")]
    activation = f"silu-limit={config.swiglu_limit}"
    layer = nvfp4.Moe(gate, up, rounded(block.experts.down_proj), shared=shared, activation=activation)

    x = tokens(40, config.hidden_size)
    logits = F.linear(x.double(), block.gate.weight).float()
    rule = {"scoring": "sqrt-softplus", "scale": config.routed_scaling_factor}
    if kind == "hash_moe":
        table = torch.stack([torch.randperm(config.n_routed_experts)[: config.num_experts_per_tok] for _ in range(VOCABULARY)])
        block.gate.tid2eid = table
        token_ids = torch.randint(VOCABULARY, (len(x),))
        rule |= {"table": table.int(), "token_ids": token_ids.int()}
        _, want_weights, want_ids = block.gate(x.double(), token_ids)
        reference = block(x.double().unsqueeze(0), token_ids.unsqueeze(0))[0]
    else:
        rule |= {"bias": block.gate.e_score_correction_bias.float()}
        _, want_weights, want_ids = block.gate(x.double())
        reference = block(x.double().unsqueeze(0))[0]
    weights, ids = nvfp4.route(logits, config.num_experts_per_tok, **rule)
    output = layer(x, ids, weights)

    check_routes(kind, ids, weights, want_ids, want_weights)
    clamped = block.experts._apply_gate
    bound = routed_slack(x, block.experts.gate_up_proj, block.experts.down_proj, clamped, ids, weights)
    both = torch.cat([block.shared_experts.gate_proj.weight, block.shared_experts.up_proj.weight])
    bound += slack(x, both, block.shared_experts.down_proj.weight, clamped, torch.ones(len(x), dtype=torch.float64))
    check(f"deepseek-v4, {kind}", output, reference, bound)


def main():
    run("moe")
    run("hash_moe")


if __name__ == "__main__":
    main()
