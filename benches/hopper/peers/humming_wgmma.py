"""Humming, vLLM's wgmma kernels for quantized weights, from its wheel (`humming-kernels`), then silu·up.

The package compiles its kernel for the problem (NVRTC) and picks the tiling for this GPU by its own rules.
"""

from __future__ import annotations

import torch

from inputs import Inputs
from measure import Run, fastest

from . import Unavailable
from .silu import silu_mul


def contend(inputs: Inputs, copies: int) -> list[Run]:
    """All groups in one launch, with gate and up side by side in its output; the faster of bf16 and f16."""
    try:
        import humming.layer  # noqa: F401 (checks that the package exists)
    except ImportError as error:
        raise Unavailable(f"missing package: --packages must name humming-kernels' folder ({error})") from error
    candidates = [[layer(inputs, dtype) for _ in range(copies)] for dtype in (torch.bfloat16, torch.float16)]
    return candidates[fastest(candidates)]


def layer(inputs: Inputs, dtype: torch.dtype) -> Run:
    """Returns a run on a copy of the layer, with tokens and output of a type."""
    from humming.layer import HummingLayer
    from humming.tune import get_heuristics_config

    problem = inputs.problem
    grouped = problem.experts > 1
    lead = (problem.experts,) if grouped else ()
    layer = HummingLayer(
        shape_n=problem.rows,
        shape_k=problem.k,
        weight_config={"quant_method": "modelopt", "quant_algo": "nvfp4"},
        num_experts=problem.experts if grouped else None,
        torch_dtype=dtype,
    ).cuda()
    layer.weight.data.copy_(inputs.weights.values.view(*lead, problem.rows, -1))
    layer.weight_scale.data.copy_(inputs.weights.scales.view(*lead, problem.rows, -1))
    layer.weight_scale_2.data.fill_(inputs.weights.factor)
    layer.transform()

    tokens = inputs.tokens.decode(dtype)
    ends = torch.tensor([0, *problem.ends], dtype=torch.int64, device="cuda") if grouped else None
    product = torch.empty(len(tokens), problem.rows, dtype=dtype, device="cuda")
    out = torch.empty(len(tokens), problem.n, dtype=dtype, device="cuda")
    kind = "grouped_contiguous" if grouped else "dense"
    # The tiling that `forward` picks by default for this number of tokens, without compiling the tilings for others.
    tiling = get_heuristics_config(layer.humming_config, shape_m=len(tokens), gemm_type=kind)

    def launch() -> torch.Tensor:
        layer(tokens, outputs=product, expert_layout=ends, compute_config={"gemm_type": kind}, tuning_config=tiling)
        return silu_mul(product, out) if problem.op == "gated" else product

    return launch


def weight_bytes(inputs: Inputs) -> int:
    """Returns the bytes of one copy of the weights."""
    return inputs.weights.values.numel() + inputs.weights.scales.numel()
