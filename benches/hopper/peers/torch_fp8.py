"""PyTorch with another checkpoint: weights rounded to e4m3 with one scale per row, and so are tokens.

`torch._scaled_grouped_mm`, or `torch._scaled_mm` for a single group, then silu·up. It shows the cost of an FP8
checkpoint, whose numbers differ from NVFP4's.
"""

from __future__ import annotations

import torch

from inputs import Inputs
from measure import Run

from .silu import silu_mul

LARGEST = 448.0
# Weights and tokens are each rounded once more, to four significant bits, 2.6 % each; gate times up has 6.5 %.
LARGEST_ERROR = 8e-2


def rounded(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns e4m3 codes and one scale per row."""
    scales = (numbers.abs().amax(-1, keepdim=True).float() / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    return (numbers.float() / scales).to(torch.float8_e4m3fn), scales.squeeze(-1)


def contend(inputs: Inputs, copies: int) -> list[Run]:
    """Uses the tensor core's sums (`use_fast_accum`), as engines do."""
    problem = inputs.problem
    groups = [rounded(inputs.weights.group(group).decode(torch.bfloat16)) for group in range(problem.experts)]
    weights, weight_scales = (torch.stack(parts) for parts in zip(*groups, strict=True))
    tokens, token_scales = rounded(inputs.tokens.decode(torch.bfloat16))
    ends = torch.tensor(problem.ends, dtype=torch.int32, device="cuda")

    def run(tokens: torch.Tensor, weights: torch.Tensor) -> Run:
        out = torch.empty(len(tokens), problem.n, dtype=torch.bfloat16, device="cuda")
        how = {"out_dtype": torch.bfloat16, "use_fast_accum": True}

        def launch() -> torch.Tensor:
            if problem.experts == 1:
                product = torch._scaled_mm(tokens, weights[0].T, token_scales[:, None], weight_scales, **how)
            else:
                product = torch._scaled_grouped_mm(
                    tokens, weights.transpose(1, 2), token_scales, weight_scales, offs=ends, **how
                )
            if problem.op == "gated":
                return silu_mul(product, out)
            return product

        return launch

    return [run(tokens.clone(), weights.clone()) for _ in range(copies)]


def weight_bytes(inputs: Inputs) -> int:
    """Returns the bytes of one copy of the weights."""
    return 2 * inputs.weights.values.numel()
