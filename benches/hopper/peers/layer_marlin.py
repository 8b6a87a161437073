"""vLLM's chain with Marlin's kernel, as in its `fused_marlin_moe`: align, product, silu·up, product, sum."""

from __future__ import annotations

import functools

import torch

from inputs import Quantized
from layer_inputs import Step, Weights
from layers import NVFP4
from measure import Run

from . import vllm
from .marlin import GLOBAL_EXPONENTS, multiply, scales_for_marlin, weights_for_marlin

ELEMENT = NVFP4


def factor_for_marlin(scales: torch.Tensor) -> float:
    """Returns the largest power of two that keeps every scale within e4m3's range, so small scales keep their bits."""
    return torch.exp2(torch.floor(torch.log2(448 / scales.float().max()))).item()


def padded(matrices: Quantized, rows: int, k: int, parts: int) -> Quantized:
    """Appends zeros to each of the `parts` row ranges of a matrix, and to K."""

    def pad(numbers: torch.Tensor, columns: int) -> torch.Tensor:
        experts, have, width = numbers.shape
        bytes_ = numbers.view(torch.uint8).view(experts, parts, have // parts, width)
        grown = torch.nn.functional.pad(bytes_, (0, columns - width, 0, rows - have // parts))
        return grown.view(experts, parts * rows, columns).view(numbers.dtype)

    return Quantized(pad(matrices.values, k // 2), pad(matrices.scales, k // 16), matrices.factor)


class Matrices:
    """All experts' matrices of a projection in Marlin's layout."""

    def __init__(self, matrices: Quantized) -> None:
        experts, self.rows, half = matrices.values.shape
        self.k = 2 * half
        factor = factor_for_marlin(matrices.scales)
        self.values = torch.stack([weights_for_marlin(matrices.values[expert]) for expert in range(experts)])
        self.scales = torch.stack([scales_for_marlin(matrices.scales[expert], factor) for expert in range(experts)])
        unit = matrices.factor / factor * 2.0 ** GLOBAL_EXPONENTS[torch.bfloat16]
        self.units = torch.full((experts,), unit, dtype=torch.float32, device=matrices.values.device)

    def clone(self) -> Matrices:
        """Returns a copy at other addresses."""
        other = object.__new__(Matrices)
        other.__dict__ = self.__dict__ | {"values": self.values.clone(), "scales": self.scales.clone()}
        return other

    def multiply(
        self, a: torch.Tensor, out: torch.Tensor, k: int, step: Step, blocks: list[torch.Tensor], block: int,
        workspace: torch.Tensor, weigh: bool,
    ) -> None:  # fmt: skip
        """Writes rows of `a` times their experts' matrices to `out`. Each row of `a` is used `k` times."""
        sizes = (len(a), self.rows, self.k)
        multiply(a, out, self.values, self.scales, self.units, workspace, blocks, step.weights, block, k, weigh, sizes)


class Layer:
    """A model's layer, with copies of its weights."""

    def __init__(self, weights: Weights, copies: int) -> None:
        vllm.loaded()
        model = weights.model
        # vLLM pads the intermediate size to a multiple that Marlin's tiles need.
        multiple = 64 if model.hidden % 128 == 0 else 128
        self.intermediate = -(-model.intermediate // multiple) * multiple
        gate_up = Matrices(padded(weights.gate_up, self.intermediate, model.hidden, parts=2))
        down = Matrices(padded(weights.down, model.hidden, self.intermediate, parts=1))
        self.sets = [(gate_up, down), *((gate_up.clone(), down.clone()) for _ in range(copies - 1))]

    def candidates(self, step: Step, copies: int) -> dict[str, list[Run]]:
        """Returns the only way to run the layer, on each copy."""
        model = step.point.model
        tokens = step.point.tokens
        rows = tokens * model.k
        block = vllm.block_rows(rows, model.local)
        device = step.tokens.device
        # Layers share the memory between their launches, and so do copies.
        first = torch.empty(rows * max(2 * self.intermediate, model.hidden), dtype=torch.bfloat16, device=device)
        second = torch.empty(rows, self.intermediate, dtype=torch.bfloat16, device=device)
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        workspace = torch.zeros(4 * processors, dtype=torch.int32, device=device)
        gate_up = first[: rows * 2 * self.intermediate].view(rows, -1)
        partial = first[: rows * model.hidden].view(rows, -1)

        def launch(matrices: tuple[Matrices, Matrices], x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            blocks = vllm.align(step.ids, block, model.experts, step.expert_map)
            matrices[0].multiply(x, gate_up, model.k, step, blocks, block, workspace, weigh=False)
            torch.ops._C.silu_and_mul(second, gate_up)
            if step.expert_map is not None:
                partial.zero_()
            matrices[1].multiply(second, partial, 1, step, blocks, block, workspace, weigh=True)
            torch.ops._moe_C.moe_sum(partial.view(tokens, model.k, model.hidden), out)
            return out

        return {
            "": [
                functools.partial(launch, matrices, step.tokens.clone(), torch.empty_like(step.tokens))
                for matrices in self.sets[:copies]
            ]
        }
