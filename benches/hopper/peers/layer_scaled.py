"""PyTorch with another checkpoint: weights rounded to e4m3 with one scale per row, and so are tokens and intermediate.

Like `layer_torch.py`, with `torch._scaled_grouped_mm` instead of `torch._grouped_mm`. It shows the cost of an FP8
checkpoint, whose numbers differ from NVFP4's. It runs under `torch.compile`, so that rounding is one kernel.
"""

from __future__ import annotations

import functools

import torch

from layer_inputs import Step, Weights
from measure import Run

from .layer_torch import by_expert, decoded, weighted_sum
from .torch_fp8 import rounded

ELEMENT = 1
# Weights, tokens and the intermediate are each rounded once more, to four significant bits.
LARGEST_ERROR = 0.12
HOW = {"out_dtype": torch.bfloat16, "use_fast_accum": True}


def layer(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor,
    gate_up: torch.Tensor, gate_up_scales: torch.Tensor, down: torch.Tensor, down_scales: torch.Tensor,
    expert_map: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Returns `[T, H]` for tokens, `gate_up[E, 2I, H]` and `down[E, H, I]` in e4m3, with one scale per matrix row."""
    owners, order, ends = by_expert(ids, experts, expert_map)
    codes, scales = rounded(x)
    rows = order // ids.shape[1]
    products = torch._scaled_grouped_mm(
        codes[rows], gate_up.transpose(1, 2), scales[rows], gate_up_scales, offs=ends, **HOW
    )
    gate, up = products.chunk(2, dim=-1)
    codes, scales = rounded(torch.nn.functional.silu(gate) * up)
    partial = torch._scaled_grouped_mm(codes, down.transpose(1, 2), scales, down_scales, offs=ends, **HOW)
    return weighted_sum(partial, order, weights, None if expert_map is None else owners == len(experts))


class Layer:
    """A model's layer, with copies of its weights."""

    def __init__(self, weights: Weights, copies: int) -> None:
        first = tuple(part for matrices in decoded(weights) for part in rounded(matrices))
        self.sets = [first] + [tuple(part.clone() for part in first) for _ in range(copies - 1)]
        torch._dynamo.reset()
        self.compiled = torch.compile(layer, fullgraph=True, dynamic=False)

    def candidates(self, step: Step, copies: int) -> dict[str, list[Run]]:
        """Returns the only way to run the layer, on each copy."""
        experts = torch.arange(step.point.model.local, dtype=torch.int32, device=step.tokens.device)

        def run(tokens: torch.Tensor, *matrices: torch.Tensor) -> torch.Tensor:
            return self.compiled(tokens, step.ids, step.weights, experts, *matrices, step.expert_map)

        return {"": [functools.partial(run, step.tokens.clone(), *matrices) for matrices in self.sets[:copies]]}
