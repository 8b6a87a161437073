"""Inputs of a layer's peers: NVFP4 weights and bf16 tokens made on the GPU from a seed, and the exact reference.

Values are uniform over all e2m1 codes, scales over all e4m3 numbers from 1/4 to 1. The global scale is a power of two,
so every decoded weight is exact in bf16, and all peers compute with the same numbers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch

from inputs import BLOCK, Quantized
from layers import Model, Point

# e4m3 codes of 0.25 and 1.
SCALE_BYTES = (0x28, 0x38)
# Root mean square of the drawn values times the drawn scales.
MAGNITUDE = 1.8
# Number of tokens whose output is compared with the reference, spread over the batch.
CHECKED = 16


class Weights:
    """A model's local experts: `gate_up[local, 2 * intermediate, hidden]`, `down[local, hidden, intermediate]`."""

    def __init__(self, model: Model, seed: int = 0, device: str = "cuda") -> None:
        random = torch.Generator(device).manual_seed(seed)
        self.model = model
        self.gate_up = draw((model.local, 2 * model.intermediate, model.hidden), random)
        self.down = draw((model.local, model.hidden, model.intermediate), random)


def draw(shape: tuple[int, int, int], random: torch.Generator) -> Quantized:
    """Draws matrices whose product with normal numbers is again about normal."""
    *rows, k = shape
    values = torch.randint(256, (*rows, k // 2), generator=random, device=random.device, dtype=torch.uint8)
    low, high = SCALE_BYTES
    scales = torch.randint(
        low, high + 1, (*rows, k // BLOCK), generator=random, device=random.device, dtype=torch.uint8
    )
    return Quantized(values, scales.view(torch.float8_e4m3fn), 2.0 ** -round(math.log2(MAGNITUDE * k**0.5)))


@dataclasses.dataclass
class Step:
    """A point's inputs on the device. `expert_map` is None if all experts are local."""

    point: Point
    tokens: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    expert_map: torch.Tensor | None

    @classmethod
    def of(cls, point: Point, seed: int = 0, device: str = "cuda") -> Step:
        """Draws normal tokens, and uploads them with the point's routing."""
        model = point.model
        random = torch.Generator(device).manual_seed(seed)
        tokens = torch.randn(point.tokens, model.hidden, generator=random, device=device).bfloat16()
        ids = torch.tensor(point.ids, dtype=torch.int32, device=device)
        weights = torch.tensor(point.weights, dtype=torch.float32, device=device)
        all_local = model.local == model.experts
        expert_map = None if all_local else torch.tensor(model.expert_map(), dtype=torch.int32, device=device)
        return cls(point, tokens, ids, weights, expert_map)

    def checked(self) -> list[int]:
        """Returns the indices of the compared tokens."""
        tokens = self.point.tokens
        return sorted({i * (tokens - 1) // max(1, CHECKED - 1) for i in range(CHECKED)})

    def reference(self, weights: Weights) -> torch.Tensor:
        """Returns the output of the compared tokens in f64, without roundings between the steps."""
        model, rows = self.point.model, self.checked()
        out = torch.zeros(len(rows), model.hidden, dtype=torch.float64, device=self.tokens.device)
        users: dict[int, list[tuple[int, float]]] = {}
        for place, row in enumerate(rows):
            for expert, weight in zip(self.point.ids[row], self.weights[row].tolist(), strict=True):
                if model.is_local(expert):
                    users.setdefault(expert - model.first, []).append((place, weight))
        tokens = self.tokens[rows].double()
        for expert, pairs in users.items():
            gate_up = weights.gate_up.group(expert).decode(torch.float64)
            down = weights.down.group(expert).decode(torch.float64)
            places = torch.tensor([place for place, _ in pairs], device=out.device)
            factors = torch.tensor([factor for _, factor in pairs], dtype=torch.float64, device=out.device)
            gate, up = (tokens[places] @ gate_up.T).chunk(2, dim=-1)
            partial = (torch.nn.functional.silu(gate) * up) @ down.T
            out.index_add_(0, places, partial * factors.unsqueeze(-1))
        return out


def layer_error(run: Callable[[], torch.Tensor], rows: list[int], reference: torch.Tensor) -> float:
    """‖out − reference‖ / ‖reference‖ over the compared rows, with an output that was NaN before; NaN if a row has one.

    If the reference is zero (no local expert), the error is infinite unless the output is zero too.
    """
    run().fill_(float("nan"))
    out = run()
    if not bool(torch.isfinite(out).all()):
        return math.nan
    error = torch.linalg.vector_norm(out[rows].double() - reference).item()
    size = torch.linalg.vector_norm(reference).item()
    if size == 0:
        return 0.0 if error == 0 else math.inf
    return error / size
