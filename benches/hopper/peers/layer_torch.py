"""PyTorch on weights decoded to bf16 beforehand: sort by expert, gather, `torch._grouped_mm`, silu·up, again
`torch._grouped_mm`, weighted sum. Eager, and the same function under `torch.compile`."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from inputs import Quantized
from layer_inputs import Step, Weights
from layers import BF16
from measure import Run

ELEMENT = BF16


def by_expert(
    ids: torch.Tensor, experts: torch.Tensor, expert_map: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each choice's expert, choices in the order of experts, and where each expert's end. `experts` counts from 0."""
    owners = ids.flatten()
    if expert_map is not None:
        owners = expert_map[owners]
        # Those elsewhere behind all others.
        owners = torch.where(owners < 0, len(experts), owners)
    ordered, order = torch.sort(owners)
    return owners, order, torch.searchsorted(ordered, experts, right=True, out_int32=True)


def weighted_sum(
    partial: torch.Tensor, order: torch.Tensor, weights: torch.Tensor, elsewhere: torch.Tensor | None
) -> torch.Tensor:
    """The rows of experts, in the order of experts, summed for each token; those of choices elsewhere count nothing."""
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    rows = partial[inverse].view(*weights.shape, -1)
    if elsewhere is not None:
        # No group has them, so nothing was written there.
        rows = rows.masked_fill(elsewhere.view(*weights.shape, 1), 0)
    return (rows * weights.to(rows.dtype).unsqueeze(-1)).sum(dim=1)


def layer(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, gate_up: torch.Tensor,
    down: torch.Tensor, expert_map: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """`[T, H]` of tokens and matrices `gate_up[E, 2I, H]`, `down[E, H, I]`; `experts` counts from 0 to E - 1."""
    owners, order, ends = by_expert(ids, experts, expert_map)
    products = torch._grouped_mm(x[order // ids.shape[1]], gate_up.transpose(1, 2), offs=ends)
    gate, up = products.chunk(2, dim=-1)
    partial = torch._grouped_mm(torch.nn.functional.silu(gate) * up, down.transpose(1, 2), offs=ends)
    return weighted_sum(partial, order, weights, None if expert_map is None else owners == len(experts))


class Eager:
    """A model's layer, with copies of its weights."""

    def __init__(self, weights: Weights, copies: int) -> None:
        self.sets: list[tuple[torch.Tensor, ...]] = [decoded(weights)]
        self.sets += [tuple(part.clone() for part in self.sets[0]) for _ in range(copies - 1)]

    def function(self) -> Callable[..., torch.Tensor]:
        """What runs the layer."""
        return layer

    def candidates(self, step: Step, copies: int) -> dict[str, list[Run]]:
        """One way to run it, on each copy."""
        function = self.function()
        experts = torch.arange(step.point.model.local, dtype=torch.int32, device=step.tokens.device)

        def run(tokens: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
            return function(tokens, step.ids, step.weights, experts, gate_up, down, step.expert_map)

        return {"": [functools.partial(run, step.tokens.clone(), *pair) for pair in self.sets[:copies]]}


class Compiled(Eager):
    """The same weights under `torch.compile`.

    It compiles once for each number of tokens, and sizes are constants of the code, as in a model whose graphs are
    captured for fixed sizes. Routing is not: what was compiled serves all.
    """

    def __init__(self, eager: Eager) -> None:
        self.sets = eager.sets
        # The former model's code counts against the number of sizes that a function is compiled for.
        torch._dynamo.reset()
        self.compiled = torch.compile(layer, fullgraph=True, dynamic=False)

    def function(self) -> Callable[..., torch.Tensor]:
        """What runs the layer."""
        return self.compiled


def decoded(weights: Weights) -> tuple[torch.Tensor, torch.Tensor]:
    """Both projections in bf16, which holds every weight exactly."""

    def decode(matrices: Quantized) -> torch.Tensor:
        return torch.stack([matrices.group(expert).decode(torch.bfloat16) for expert in range(len(matrices.values))])

    return decode(weights.gate_up), decode(weights.down)
