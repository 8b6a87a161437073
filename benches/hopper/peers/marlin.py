"""Marlin's kernel for mixtures of experts, vLLM's `moe_wna16_marlin_gemm`, then silu·up.

Only the library with the kernel is needed from vLLM's wheel: `vllm/_moe_C_stable_libtorch.abi3.so` (0.24.0 fits PyTorch
2.11). This file does the work that vLLM does around the kernel: weights to Marlin's layout (Frantar et al., "MARLIN";
vLLM's `marlin_utils`), scales to unsigned e5m3, tokens into blocks with one expert each.
"""

from __future__ import annotations

import functools
import os

import torch

from inputs import BLOCK, Inputs, Problem
from measure import Run, fastest

from . import Unavailable
from .silu import silu_mul

# vLLM's number of `ScalarType.float_(2, 1, signed, no NaN)`.
E2M1_TYPE = 562949953487106
TILE = 16
# Tokens per block. vLLM picks one by the mean number of tokens; this peer takes the fastest.
BLOCK_TOKENS = (8, 16, 32, 48, 64)
# Exponent bias of the token type, minus e2m1's bias, minus the 7 of `scales_for_marlin`.
GLOBAL_EXPONENTS = {torch.bfloat16: 2**7 - 2**1 - 7, torch.float16: 2**4 - 2**1 - 7}


def load(library: str | None) -> None:
    """Loads the kernel's library from a path."""
    if library is None or not os.path.exists(library):
        raise Unavailable("missing library: point --marlin at vLLM's _moe_C_stable_libtorch.abi3.so")
    torch.ops.load_library(library)


def permutation() -> list[int]:
    """Returns the order of the 1024 weights of four 16 × 16 tiles: eight per thread of a tensor-core fragment."""
    order = []
    for thread in range(32):
        rows = [2 * (thread % 4) + offset for offset in (0, 1, 8, 9)]
        fragment = [16 * row + thread // 4 + 8 * half for half in (0, 1) for row in rows]
        order += [place + 256 * tile for tile in range(4) for place in fragment]
    eights = [order[at : at + 8] for at in range(0, len(order), 8)]
    return [eight[index] for eight in eights for index in (0, 2, 4, 6, 1, 3, 5, 7)]


def weights_for_marlin(values: torch.Tensor) -> torch.Tensor:
    """Converts packed `[rows, K/2]` to `[K/16, 2 * rows]` words."""
    rows, k = values.shape[0], 2 * values.shape[1]
    codes = torch.stack((values & 15, values >> 4), dim=-1).view(rows, k).T
    tiles = codes.reshape(k // TILE, TILE, rows // TILE, TILE).permute(0, 2, 1, 3).reshape(-1, 1024)
    ordered = tiles[:, torch.tensor(permutation(), device=values.device)].reshape(k // TILE, -1, 8)
    shifts = 4 * torch.arange(8, device=values.device)
    return (ordered.long() << shifts).sum(-1).to(torch.uint32).view(torch.int32)


def scales_for_marlin(scales: torch.Tensor, factor: float) -> torch.Tensor:
    """Converts e4m3 `[rows, K/16]` times a power of two to the bytes `[K/16, rows]` that Marlin decodes."""
    rows = scales.shape[0]
    linear = scales.float().T.reshape(-1, 64)
    order = [i + 8 * j for i in range(8) for j in range(8)]
    permuted = linear[:, order].reshape(-1, 4)[:, [0, 2, 1, 3]].reshape(-1, rows)
    shifted = (permuted * (factor * 2.0**7)).half()
    shifted[shifted < 2] = 0
    return (shifted.view(torch.int16) << 1).view(torch.float8_e4m3fn)[:, 1::2].contiguous()


def sort(problem: Problem, block: int) -> list[torch.Tensor]:
    """Returns tokens in blocks of one expert each, padded with an invalid token; each block's expert; the length."""
    tokens, owners, start = [], [], 0
    for expert, end in enumerate(problem.ends):
        blocks = -(-(end - start) // block)
        tokens += [*range(start, end), *[problem.ends[-1]] * (blocks * block - (end - start))]
        owners += [expert] * blocks
        start = end
    return [torch.tensor(x, dtype=torch.int32, device="cuda") for x in (tokens, owners, [len(tokens)])]


def multiply(
    a: torch.Tensor, out: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, units: torch.Tensor,
    workspace: torch.Tensor, blocks: list[torch.Tensor], router: torch.Tensor, block: int, k: int, weigh: bool,
    sizes: tuple[int, int, int],
) -> None:  # fmt: skip
    """Writes rows of `a` times their experts' matrices to `out`. Each row is used `k` times; `sizes` are M, N and K."""
    operator = torch.ops._moe_C.moe_wna16_marlin_gemm
    # Older versions of vLLM have two operands for sorted weights and a flag for them, which NVFP4 does not use.
    older = len(operator.default._schema.arguments) > 26
    sorted_weights, whole = ([None, None], [True]) if older else ([], [])
    operator(
        a, out, values, None, scales, None, units, None, *sorted_weights, workspace, *blocks, router, block, k, weigh,
        E2M1_TYPE, *sizes, *whole, False, True, False, -1, -1, -1,
    )  # fmt: skip


def contend(inputs: Inputs, copies: int) -> list[Run]:
    """All groups in one launch, with gate and up side by side in its output; the faster of bf16 and f16."""
    if not hasattr(torch.ops._moe_C, "moe_wna16_marlin_gemm"):
        raise Unavailable("its library is not loaded")
    candidates = [runs for dtype in GLOBAL_EXPONENTS for runs in contend_in(inputs, copies, dtype)]
    return candidates[fastest(candidates)]


def contend_in(inputs: Inputs, copies: int, dtype: torch.dtype) -> list[list[Run]]:
    """Returns a candidate for each number of tokens per block."""
    problem = inputs.problem
    experts = range(problem.experts)
    # In bf16, the largest power of two that keeps every scale within e4m3's range, so small scales keep their bits.
    # f16 has no room for it.
    largest = inputs.weights.scales.float().max() if dtype == torch.bfloat16 else torch.tensor(448.0)
    factor = torch.exp2(torch.floor(torch.log2(448 / largest))).item()
    values = torch.stack([weights_for_marlin(inputs.weights.values[expert]) for expert in experts])
    scales = torch.stack([scales_for_marlin(inputs.weights.scales[expert], factor) for expert in experts])
    unit = inputs.weights.factor / factor * 2.0 ** GLOBAL_EXPONENTS[dtype]
    units = torch.full((problem.experts,), unit, dtype=torch.float32, device="cuda")
    tokens = inputs.tokens.decode(dtype)
    router = torch.ones(len(tokens), 1, dtype=torch.float32, device="cuda")
    processors = torch.cuda.get_device_properties(0).multi_processor_count

    def copy() -> list[torch.Tensor]:
        product = torch.empty(len(tokens), problem.rows, dtype=dtype, device="cuda")
        out = torch.empty(len(tokens), problem.n, dtype=dtype, device="cuda")
        workspace = torch.zeros(4 * processors, dtype=torch.int32, device="cuda")
        return [tokens.clone(), values.clone(), scales.clone(), product, out, workspace]

    def launch(block: int, blocks: list[torch.Tensor], operands: list[torch.Tensor]) -> torch.Tensor:
        tokens, values, scales, product, out, workspace = operands
        sizes = (len(tokens), problem.rows, problem.k)
        multiply(tokens, product, values, scales, units, workspace, blocks, router, block, 1, False, sizes)
        return silu_mul(product, out) if problem.op == "gated" else product

    sets = [copy() for _ in range(copies)]
    sorted_by = {block: sort(problem, block) for block in BLOCK_TOKENS}
    return [
        [functools.partial(launch, block, blocks, operands) for operands in sets] for block, blocks in sorted_by.items()
    ]


def weight_bytes(inputs: Inputs) -> int:
    """Returns the bytes of one copy of the weights."""
    return inputs.weights.values.numel() + inputs.weights.values.numel() * 2 // BLOCK
