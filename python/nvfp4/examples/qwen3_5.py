"""One MoE block of Qwen3.5: softmax over all experts, and a shared expert that a sigmoid of its own projection gates.

Compares `nvfp4.Moe` on the CPU with `Qwen3_5MoeSparseMoeBlock` of Transformers in float64, on the same NVFP4 numbers.
"""

import torch
from common import check, check_routes, halves, randomized, rounded, routed_slack, slack, tokens
from torch.nn import functional as F
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeSparseMoeBlock

import nvfp4


@torch.no_grad()
def main():
    config = Qwen3_5MoeTextConfig(
        hidden_size=128, moe_intermediate_size=64, shared_expert_intermediate_size=96, num_experts=16, num_experts_per_tok=4
    )
    config._experts_implementation = "eager"
    block = randomized(Qwen3_5MoeSparseMoeBlock(config))
    gate, up = halves(rounded(block.experts.gate_up_proj))
    shared = [rounded(getattr(block.shared_expert, name).weight) for name in ("gate_proj", "up_proj", "down_proj")]
    layer = nvfp4.Moe(gate, up, rounded(block.experts.down_proj), shared=shared)

    x = tokens(40, config.hidden_size)
    logits = F.linear(x.double(), block.gate.weight).float()
    weights, ids = nvfp4.route(logits, config.num_experts_per_tok)
    gates = block.shared_expert_gate(x.double()).sigmoid().reshape(-1).float()
    output = layer(x, ids, weights, shared_weights=gates)

    _, want_weights, want_ids = block.gate(x.double())
    check_routes("qwen3.5", ids, weights, want_ids, want_weights)
    silu = lambda product: F.silu(product.chunk(2, -1)[0]) * product.chunk(2, -1)[1]
    bound = routed_slack(x, block.experts.gate_up_proj, block.experts.down_proj, silu, ids, weights)
    both = torch.cat([block.shared_expert.gate_proj.weight, block.shared_expert.up_proj.weight])
    bound += slack(x, both, block.shared_expert.down_proj.weight, silu, gates.double())
    check("qwen3.5", output, block(x.double().unsqueeze(0))[0], bound)


if __name__ == "__main__":
    main()
