"""One MoE block of Nemotron 3 Super: experts without a gate (ReLU²) in a latent space. A projection before them and one after them are
shared by all experts; the shared expert takes the tokens themselves.

The latent projections are bf16 here, as in the model, and PyTorch computes them; the experts and the shared expert are NVFP4 layers.
Compares with `NemotronHMoE` of Transformers in float64, on the same numbers.
"""

import torch
from common import HALF_ULP, check, check_routes, randomized, rounded, routed_slack, slack, tokens
from torch.nn import functional as F
from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMoE

import nvfp4


@torch.no_grad()
def main():
    config = NemotronHConfig(
        hidden_size=128,
        moe_latent_size=64,
        moe_intermediate_size=96,
        moe_shared_expert_intermediate_size=160,
        n_routed_experts=32,
        num_experts_per_tok=5,
        routed_scaling_factor=2.5,
        layers_block_type=["moe"],
    )
    config._experts_implementation = "eager"
    block = randomized(NemotronHMoE(config))
    before, after = block.fc1_latent_proj.weight, block.fc2_latent_proj.weight
    for projection in (before, after):
        projection.data = projection.data.bfloat16().double()
    experts = nvfp4.Moe(None, rounded(block.experts.up_proj), rounded(block.experts.down_proj), activation="relu2")
    shared = [rounded(getattr(block.shared_experts, name).weight) for name in ("up_proj", "down_proj")]
    shared = nvfp4.Moe(None, *shared, activation="relu2")

    x = tokens(40, config.hidden_size)
    logits = F.linear(x.float(), block.gate.weight.float())
    bias = block.gate.e_score_correction_bias.float()
    weights, ids = nvfp4.route(logits, 5, scoring="sigmoid", bias=bias, scale=config.routed_scaling_factor)
    latent = F.linear(x, before.bfloat16())
    routed = experts(latent, ids, weights)
    one = torch.zeros(len(x), 1, dtype=torch.int32), torch.ones(len(x), 1)
    output = F.linear(routed.float(), after.float()) + shared(x, *one).float()

    _, want_weights, want_ids = block.gate(x.double())
    check_routes("nemotron-3", ids, weights, want_ids, want_weights)
    relu2 = lambda product: product.relu() ** 2
    # The reference starts from the latent tokens that were computed, because their rounding is not this library's.
    want = block.experts(latent.double(), want_ids, want_weights)
    bound = routed_slack(latent, block.experts.up_proj, block.experts.down_proj, relu2, ids, weights)
    bound = F.linear(bound + HALF_ULP * (want.abs() + bound), after.abs())
    bound += slack(x, block.shared_experts.up_proj.weight, block.shared_experts.down_proj.weight, relu2, torch.ones(len(x)).double())
    reference = F.linear(want, after) + block.shared_experts(x.double())
    check("nemotron-3", output, reference, bound)


if __name__ == "__main__":
    main()
