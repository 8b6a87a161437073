"""PyTorch with weights decoded to bf16 beforehand: sort by expert, gather, `torch._grouped_mm`, silu·up,
`torch._grouped_mm`, weighted sum. Eager, and under `torch.compile`."""

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
    """Returns each choice's expert, the choices sorted by expert, and each expert's end. `experts` counts from 0."""
    owners = ids.flatten()
    if expert_map is not None:
        owners = expert_map[owners]
        # Experts on other GPUs come after all local experts.
        owners = torch.where(owners < 0, len(experts), owners)
    ordered, order = torch.sort(owners)
    return owners, order, torch.searchsorted(ordered, experts, right=True, out_int32=True)


def weighted_sum(
    partial: torch.Tensor, order: torch.Tensor, weights: torch.Tensor, elsewhere: torch.Tensor | None
) -> torch.Tensor:
    """Sums the experts' rows, which are sorted by expert, per token. Rows of experts on other GPUs count as zero."""
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    rows = partial[inverse].view(*weights.shape, -1)
    if elsewhere is not None:
        # No group has these rows, so nothing was written there.
        rows = rows.masked_fill(elsewhere.view(*weights.shape, 1), 0)
    return (rows * weights.to(rows.dtype).unsqueeze(-1)).sum(dim=1)


def layer(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, gate_up: torch.Tensor,
    down: torch.Tensor, expert_map: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Returns `[T, H]` for tokens and `gate_up[E, 2I, H]`, `down[E, H, I]`; `experts` counts from 0 to E - 1."""
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
        """Returns the function that runs the layer."""
        return layer

    def candidates(self, step: Step, copies: int) -> dict[str, list[Run]]:
        """Returns the only way to run the layer, on each copy."""
        function = self.function()
        experts = torch.arange(step.point.model.local, dtype=torch.int32, device=step.tokens.device)

        def run(tokens: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
            return function(tokens, step.ids, step.weights, experts, gate_up, down, step.expert_map)

        return {"": [functools.partial(run, step.tokens.clone(), *pair) for pair in self.sets[:copies]]}


class Compiled(Eager):
    """The same weights under `torch.compile`.

    It compiles once per number of tokens. Sizes are constants of the code, as in a model whose graphs are captured for
    fixed sizes. The compiled code serves any routing.
    """

    def __init__(self, eager: Eager) -> None:
        self.sets = eager.sets
        # The previous model's code would count against the number of sizes that a function may be compiled for.
        torch._dynamo.reset()
        self.compiled = torch.compile(layer, fullgraph=True, dynamic=False)

    def function(self) -> Callable[..., torch.Tensor]:
        """Returns the function that runs the layer."""
        return self.compiled


def decoded(weights: Weights) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns both projections in bf16, which holds every weight exactly."""

    def decode(matrices: Quantized) -> torch.Tensor:
        return torch.stack([matrices.group(expert).decode(torch.bfloat16) for expert in range(len(matrices.values))])

    return decode(weights.gate_up), decode(weights.down)
