"""A Triton kernel that decodes NVFP4 weights in software, written for this comparison and autotuned.

One launch computes all groups: gate and up projections and `silu(gate) * up`, or the projection of a plain problem.
Where that is faster, gate and up are one projection of twice the rows, and silu·up is a second launch.
Weights are the M side of the product, so that they go from registers into the tensor core; tokens are its N. A byte
holds an even and an odd element of K. Each step multiplies the even half and the odd half separately, so nothing is
interleaved.
"""

from __future__ import annotations

import concurrent.futures
import functools
import multiprocessing

import torch
import triton

from inputs import Inputs, Problem
from measure import Run, fastest
from triton_decode_kernel import MOST_EXPERTS, Config, configs, decode_kernel

from .silu import silu_mul


def suitable(problem: Problem, matrices: int) -> list[Config]:
    """Returns the tilings whose number of tokens is close to the groups' sizes."""
    largest = min(triton.next_power_of_2(max(problem.tokens)), 256)
    return [c for c in configs(matrices) if max(16, largest // 8) <= c.tokens <= max(16, largest)]


def compile_one(matrices: int, config: Config) -> None:
    """Compiles a tiling into Triton's cache on disk."""
    u8, f16 = torch.uint8, torch.float16
    pointers = (u8, u8, f16, f16, torch.int32, torch.float32, torch.bfloat16)
    sizes = (4096, 4096, 8)
    decode_kernel.warmup(*pointers, *sizes, EXPERTS=MOST_EXPERTS, MATRICES=matrices, **config.options(), grid=(1,))


def compile_all(processes: int) -> None:
    """Compiles every tiling in parallel processes, because Triton's compiler holds Python's lock."""
    jobs = [(matrices, config) for matrices in (1, 2) for config in configs(matrices)]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, mp_context=context) as pool:
        for job in [pool.submit(compile_one, *job) for job in jobs]:
            job.result()


def operands(inputs: Inputs, copies: int) -> list[list[torch.Tensor]]:
    """Returns copies of a launch's operands. Tokens are exact f16, split into even and odd elements of K, as a
    quantizer could write them."""
    problem = inputs.problem
    assert problem.experts <= MOST_EXPERTS and problem.n % 128 == 0 and problem.k % 256 == 0
    tokens = inputs.tokens.decode(torch.float16, factor=1.0)
    scales = inputs.weights.scales.view(torch.uint8)
    ends = torch.tensor(problem.ends, dtype=torch.int32, device="cuda")
    alpha = inputs.weights.factor * inputs.tokens.factor
    alphas = torch.full((problem.experts,), alpha, dtype=torch.float32, device="cuda")

    def copy() -> list[torch.Tensor]:
        out = torch.empty(len(tokens), problem.n, dtype=torch.bfloat16, device="cuda")
        even, odd = tokens[:, ::2].clone(), tokens[:, 1::2].clone()
        return [inputs.weights.values.clone(), scales.clone(), even, odd, ends, alphas, out]

    return [copy() for _ in range(copies)]


def launch(problem: Problem, config: Config, matrices: int, operands: list[torch.Tensor]) -> torch.Tensor:
    """Launches a tiling on the current stream."""
    out = operands[-1]
    n = out.shape[1]
    tiles = sum(triton.cdiv(tokens, config.tokens) for tokens in problem.tokens)
    decode_kernel[(tiles * (n // config.rows),)](
        *operands, n, problem.k, problem.experts, EXPERTS=MOST_EXPERTS, MATRICES=matrices, **config.options()
    )
    return out


def runs(inputs: Inputs, config: Config, sets: list[list[torch.Tensor]]) -> list[Run]:
    """Returns runs of the operation in one launch of a tiling, one run per set of operands."""
    problem = inputs.problem
    return [functools.partial(launch, problem, config, problem.matrices, operands) for operands in sets]


def contend(inputs: Inputs, copies: int) -> list[Run]:
    """Returns the fastest of all tilings, in one launch or with silu·up in a second launch."""
    problem, sets = inputs.problem, operands(inputs, copies)

    def launch_two(config: Config, operands: list[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        return silu_mul(launch(problem, config, 1, operands), out)

    candidates = [runs(inputs, config, sets) for config in suitable(problem, problem.matrices)]
    if problem.op == "gated":
        tokens = problem.ends[-1]
        wide = [torch.empty(tokens, problem.rows, dtype=torch.bfloat16, device="cuda") for _ in sets]
        for config in suitable(problem, 1):
            together = zip(sets, wide, strict=True)
            candidates.append(
                [functools.partial(launch_two, config, [*own[:-1], product], own[-1]) for own, product in together]
            )
    return candidates[fastest(candidates)]


def weight_bytes(inputs: Inputs) -> int:
    """Returns the bytes of one copy of the weights."""
    return inputs.weights.values.numel() + inputs.weights.scales.numel()
