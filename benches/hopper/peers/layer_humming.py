"""vLLM's chain with Humming's products (`humming-kernels`), in both ways that vLLM offers.

Indexed, vLLM's default: align, a product that gathers its rows, silu·up, product, weighted sum. Grouped: sorts and
copies the rows by expert, then runs the same products on contiguous rows, and a sum that restores the order. The
package picks the tilings.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import torch

from inputs import Quantized
from layer_inputs import Step, Weights
from layers import NVFP4, Model
from measure import Run

from . import Unavailable, vllm

ELEMENT = NVFP4
# Maximum number of rows for which the package has tilings.
MOST_ROWS = 65408
# Padding as in vLLM.
PAD_ROWS, PAD_K = 256, 128


class Matrices:
    """All experts' matrices of a projection in Humming's layout."""

    def __init__(self, matrices: Quantized) -> None:
        from humming.layer import HummingLayer

        experts, rows, half = matrices.values.shape
        with torch.device(matrices.values.device):
            layer = HummingLayer(
                shape_n=rows,
                shape_k=2 * half,
                weight_config={"quant_method": "modelopt", "quant_algo": "nvfp4"},
                num_experts=experts,
                torch_dtype=torch.bfloat16,
                pad_n_to_multiple=PAD_ROWS,
                pad_k_to_multiple=PAD_K,
            )
        layer.weight.data.copy_(matrices.values)
        layer.weight_scale.data.copy_(matrices.scales)
        layer.weight_scale_2.data.fill_(matrices.factor)
        layer.transform()
        self.config = layer.humming_config
        self.locks = layer.locks
        self.operands = {
            name: getattr(layer, name).data
            for name in ("weight", "weight_scale", "weight_scale_2")
            if getattr(layer, name, None) is not None
        }

    def clone(self) -> Matrices:
        """Returns a copy at other addresses."""
        other = object.__new__(Matrices)
        other.__dict__ = self.__dict__ | {"operands": {name: data.clone() for name, data in self.operands.items()}}
        return other

    def tiling(self, rows: int, kind: str) -> dict[str, Any]:
        """Returns the package's tiling for `rows` rows in total."""
        from humming.tune import get_heuristics_config

        return get_heuristics_config(self.config, shape_m=max(1, min(rows, MOST_ROWS)), gemm_type=kind)

    def multiply(self, a: torch.Tensor, out: torch.Tensor, tiling: str, kind: str, **where: Any) -> None:
        """Writes rows of `a` times their experts' matrices to `out`."""
        from humming.forward import humming_forward

        humming_forward(
            self.config, a, outputs=out, locks=self.locks, compute_config=json.dumps({"gemm_type": kind}),
            tuning_config=tiling, **self.operands, **where,
        )  # fmt: skip


def local_rows(model: Model, tokens: int) -> int:
    """Returns the number of rows that vLLM expects on this GPU, from the number of tokens alone."""
    return -(-tokens * model.k * model.local // model.experts)


class Layer:
    """A model's layer, with copies of its weights."""

    def __init__(self, weights: Weights, copies: int) -> None:
        vllm.loaded()
        try:
            import humming.layer  # noqa: F401 (checks that the package exists)
        except ImportError as error:
            raise Unavailable(f"missing package: --packages must name humming-kernels' folder ({error})") from error
        gate_up, down = Matrices(weights.gate_up), Matrices(weights.down)
        self.sets = [(gate_up, down), *((gate_up.clone(), down.clone()) for _ in range(copies - 1))]

    def compile(self, model: Model, tokens: list[int]) -> None:
        """Compiles the kernels for all these numbers of tokens, in parallel."""
        from humming.kernel.humming import HummingKernel

        for matrices in self.sets[0]:
            for kind in ("indexed", "grouped_contiguous"):
                tilings = [[0, MOST_ROWS, matrices.tiling(local_rows(model, count), kind)] for count in tokens]
                HummingKernel.prepare_kernels(
                    matrices.config.to_str(), json.dumps({"gemm_type": kind}), json.dumps(tilings)
                )

    def candidates(self, step: Step, copies: int) -> dict[str, list[Run]]:
        """Returns both ways to run the layer, each on every copy."""
        return {
            kind: [
                functools.partial(run, *matrices, step.tokens.clone(), torch.empty_like(step.tokens))
                for matrices in self.sets[:copies]
            ]
            for kind, run in (("indexed", self.indexed(step)), ("grouped", self.grouped(step)))
        }

    def indexed(self, step: Step) -> Any:
        """Returns the indexed way: rows stay in place, and lists name the expert of each row."""
        model, tokens = step.point.model, step.point.tokens
        rows, valid = tokens * model.k, local_rows(model, tokens)
        gate_up, middle, partial = buffers(step)
        tilings = [matrices.tiling(valid, "indexed") for matrices in self.sets[0]]
        blocks = [tiling["block_shape"][0] for tiling in tilings]
        texts = [json.dumps(tiling) for tiling in tilings]

        def launch(first: Matrices, second: Matrices, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            def lists(block: int) -> dict[str, Any]:
                parts = vllm.align(step.ids, block, model.experts, step.expert_map)
                names = ("sorted_ids", "expert_ids", "num_tokens_padded")
                return dict(zip(names, parts, strict=True)) | {"valid_shape_m": valid}

            where = lists(blocks[0])
            first.multiply(x, gate_up, texts[0], "indexed", top_k=model.k, **where)
            torch.ops._C.silu_and_mul(middle, gate_up)
            # vLLM assumes that both tilings have the same number of rows per block. If not, this makes new lists.
            where = where if blocks[1] == blocks[0] else lists(blocks[1])
            second.multiply(middle, partial, texts[1], "indexed", top_k=1, **where)
            vllm.weighted_sum(partial.view(tokens, -1, model.hidden), step.weights, step.ids, step.expert_map, out)
            return out

        assert len(partial) == rows
        return launch

    def grouped(self, step: Step) -> Any:
        """Returns the grouped way: rows are copied so that each expert's rows are contiguous."""
        model, tokens = step.point.model, step.point.tokens
        rows, valid = tokens * model.k, local_rows(model, tokens)
        gate_up, middle, partial = buffers(step)
        device = step.tokens.device
        texts = [json.dumps(matrices.tiling(valid, "grouped_contiguous")) for matrices in self.sets[0]]

        def numbers(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        gathered = torch.empty(rows, model.hidden, dtype=torch.bfloat16, device=device)
        place = torch.arange(rows, dtype=torch.int32, device=device).view(tokens, model.k)
        ends = torch.empty(model.local + 1, dtype=torch.int64, device=device)
        inverse, order = numbers(rows), numbers(rows)
        scratch = [numbers(tokens, model.k) for _ in range(3)]
        size = torch.ops._moe_C.moe_permute_sort_workspace_size(rows, model.experts)
        sorter = torch.empty(size, dtype=torch.int8, device=device)

        def launch(first: Matrices, second: Matrices, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            order.fill_(rows)
            torch.ops._moe_C.moe_permute_with_scratch(
                x, step.ids, place, step.expert_map, model.experts, model.local, model.k, gathered, ends,
                inverse.view(tokens, model.k), order, sorter, *scratch,
            )  # fmt: skip
            where = {"expert_layout": ends, "valid_shape_m": valid}
            first.multiply(gathered, gate_up, texts[0], "grouped_contiguous", **where)
            torch.ops._C.silu_and_mul(middle, gate_up)
            second.multiply(middle, partial, texts[1], "grouped_contiguous", **where)
            torch.ops._moe_C.moe_unpermute(partial.view(tokens, model.k, -1), step.weights, inverse, ends, model.k, out)
            return out

        return launch


def buffers(step: Step) -> list[torch.Tensor]:
    """Returns buffers for gate and up, the activation and the down projection. All copies share them, as layers do."""
    model = step.point.model
    rows = step.point.tokens * model.k
    return [
        torch.empty(rows, width, dtype=torch.bfloat16, device=step.tokens.device)
        for width in (2 * model.intermediate, model.intermediate, model.hidden)
    ]
