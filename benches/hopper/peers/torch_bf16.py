"""PyTorch with weights decoded to bf16 beforehand: `torch._grouped_mm`, or `torch.mm` for one group, then silu·up."""

from __future__ import annotations

import torch

from inputs import Inputs
from measure import Run

from .silu import silu_mul


def contend(inputs: Inputs, copies: int) -> list[Run]:
    """Reads 2 bytes per weight where the others read 9/16."""
    problem = inputs.problem
    weights = torch.stack([inputs.weights.group(group).decode(torch.bfloat16) for group in range(problem.experts)])
    tokens = inputs.tokens.decode(torch.bfloat16)
    ends = torch.tensor(problem.ends, dtype=torch.int32, device="cuda")

    def run(tokens: torch.Tensor, weights: torch.Tensor) -> Run:
        out = torch.empty(len(tokens), problem.n, dtype=torch.bfloat16, device="cuda")
        single = torch.empty(len(tokens), problem.rows, dtype=torch.bfloat16, device="cuda")

        def launch() -> torch.Tensor:
            if problem.experts == 1:
                product = torch.mm(tokens, weights[0].T, out=single)
            else:
                product = torch._grouped_mm(tokens, weights.transpose(1, 2), offs=ends)
            if problem.op == "gated":
                return silu_mul(product, out)
            return product

        return launch

    return [run(tokens.clone(), weights.clone()) for _ in range(copies)]


def weight_bytes(inputs: Inputs) -> int:
    """Returns the bytes of one copy of the weights."""
    return 4 * inputs.weights.values.numel()
