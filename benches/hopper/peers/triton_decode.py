"""A Triton kernel that decodes NVFP4 weights in software, written for this comparison and autotuned.

One launch computes all groups, gate and up projection and `silu(gate) * up` (or the one projection of a plain problem);
where that is faster, gate and up are one projection of twice the rows and silu·up is a launch of its own.
Weights are the M side of the product, so that they go from registers into the tensor core; tokens are its N. A byte
holds an even and an odd element of K, so each step multiplies the even half and the odd half apart, and nothing is
interleaved.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import multiprocessing

import torch
import triton
import triton.language as tl

from inputs import Inputs, Problem
from measure import Run, fastest

from .silu import silu_mul

# Four packed bytes and their scale in, eight exact f16 out: e2m1 with its three low bits moved to bits 9..11 of an f16
# is the value times 2^-14, and the scale is e4m3 times 2^7.
DECODE = tl.constexpr(
    """{
    .reg .b32 t, m, s;
    prmt.b32 t, $4, 0, 0x1404;
    shl.b32 m, t, 1;
    shl.b32 s, t, 4;
    and.b32 m, m, 0x0E000E00;
    lop3.b32 $0, s, 0x80008000, m, 0xEA;
    shr.b32 m, t, 3;
    and.b32 m, m, 0x0E000E00;
    lop3.b32 $2, t, 0x80008000, m, 0xEA;
    prmt.b32 t, $4, 0, 0x3424;
    shl.b32 m, t, 1;
    shl.b32 s, t, 4;
    and.b32 m, m, 0x0E000E00;
    lop3.b32 $1, s, 0x80008000, m, 0xEA;
    shr.b32 m, t, 3;
    and.b32 m, m, 0x0E000E00;
    lop3.b32 $3, t, 0x80008000, m, 0xEA;
    mul.rn.f16x2 $0, $0, $5;
    mul.rn.f16x2 $1, $1, $6;
    mul.rn.f16x2 $2, $2, $5;
    mul.rn.f16x2 $3, $3, $6;
    }"""
)
# What `DECODE` leaves out: 2^14 and 2^-7.
DECODED_UNIT = tl.constexpr(128.0)


@triton.jit
def decode(packed, scales, rows: tl.constexpr, half_k: tl.constexpr):
    """The even and the odd elements of `[rows, 2 * half_k]` as f16, in units of `1 / DECODED_UNIT`."""
    # e4m3 moved to an f16's exponent and mantissa is the scale times 2^-8.
    exact = (scales.to(tl.uint16) << 7).to(tl.float16, bitcast=True) * 32768.0
    spread = tl.broadcast_to(exact.to(tl.float16)[:, :, None], (rows, half_k // 8, 8)).reshape(rows, half_k)
    return tl.inline_asm_elementwise(
        DECODE, "=&r,=&r,=&r,=&r,r,r,r", [packed, spread], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
    )


@triton.jit(do_not_specialize=["experts"])
def decode_kernel(
    codes, scales, even, odd, ends, alphas, out, n, k, experts,
    EXPERTS: tl.constexpr, MATRICES: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """`out[T, n]` of tokens `even` and `odd`, each `[T, k / 2]`, with weights `[experts, MATRICES * n, k / 2]`.

    `ends` says where each expert's tokens end. Grid: for each tile of weight rows, the tiles of all tokens.
    """
    expert = tl.arange(0, EXPERTS)
    end = tl.load(ends + expert, mask=expert < experts, other=0)
    start = tl.load(ends + expert - 1, mask=(expert > 0) & (expert < experts), other=0)
    tiles = tl.cdiv(tl.maximum(end - start, 0), TOKENS)
    upto = tl.cumsum(tiles, 0)
    total = tl.sum(tiles, 0)
    tile = tl.program_id(0) % total
    row = tl.program_id(0) // total * ROWS
    group = tl.sum((upto <= tile).to(tl.int32), 0)
    first = tl.sum(tl.where(upto <= tile, tiles, 0), 0)
    token = tl.sum(tl.where(expert == group, start, 0), 0) + (tile - first) * TOKENS
    last = tl.sum(tl.where(expert == group, end, 0), 0)

    half = k // 2
    rows = row + tl.arange(0, ROWS)
    tokens = token + tl.arange(0, TOKENS)
    bytes_ = tl.arange(0, DEPTH // 2)
    blocks = tl.arange(0, DEPTH // 16)
    base = (group * MATRICES * n).to(tl.int64) + rows
    code_at = codes + base[:, None] * half + bytes_[None, :]
    scale_at = scales + base[:, None] * (k // 16) + blocks[None, :]
    token_at = tokens[None, :] * half + bytes_[:, None]
    present = (tokens < last)[None, :]

    gate = tl.zeros((ROWS, TOKENS), tl.float32)
    up = tl.zeros((ROWS, TOKENS), tl.float32)
    for at in tl.range(0, half, DEPTH // 2):
        x_even = tl.load(even + token_at + at, mask=present, other=0.0)
        x_odd = tl.load(odd + token_at + at, mask=present, other=0.0)
        w_even, w_odd = decode(tl.load(code_at + at), tl.load(scale_at + at // 8), ROWS, DEPTH // 2)
        gate = tl.dot(w_even, x_even, gate)
        gate = tl.dot(w_odd, x_odd, gate)
        if MATRICES == 2:
            w_even, w_odd = decode(
                tl.load(code_at + n * half + at), tl.load(scale_at + n * (k // 16) + at // 8), ROWS, DEPTH // 2
            )
            up = tl.dot(w_even, x_even, up)
            up = tl.dot(w_odd, x_odd, up)
    alpha = tl.load(alphas + group) * DECODED_UNIT
    result = gate * alpha
    if MATRICES == 2:
        result = result * tl.sigmoid(result) * (up * alpha)
    at = tokens[None, :].to(tl.int64) * n + rows[:, None]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=present & (rows < n)[:, None])


# Room for the ends of this many groups, as a power of two.
MOST_EXPERTS = 16


@dataclasses.dataclass(frozen=True)
class Config:
    """A tiling: weight rows, tokens and elements of K of a step; warps; stages of the pipeline."""

    rows: int
    tokens: int
    depth: int
    warps: int
    stages: int

    def accumulators(self, matrices: int) -> int:
        """f32 accumulators of a thread."""
        return matrices * self.rows * self.tokens // (32 * self.warps)

    def options(self) -> dict[str, int]:
        """As the kernel takes it."""
        tile = {"ROWS": self.rows, "TOKENS": self.tokens, "DEPTH": self.depth}
        return tile | {"num_warps": self.warps, "num_stages": self.stages}


def configs(matrices: int) -> list[Config]:
    """Every tiling that is tried: those whose accumulators leave room for the decoded weights in registers."""
    choices = itertools.product((64, 128), (16, 32, 64, 128, 256), (128, 256), (4, 8), (3, 4))
    return [
        config
        for config in itertools.starmap(Config, choices)
        if config.accumulators(matrices) <= 128 and config.rows >= 16 * config.warps
    ]


def suitable(problem: Problem, matrices: int) -> list[Config]:
    """Those whose token tile is not far larger than the groups are, nor far smaller."""
    largest = min(triton.next_power_of_2(max(problem.tokens)), 256)
    return [c for c in configs(matrices) if max(16, largest // 8) <= c.tokens <= max(16, largest)]


def compile_one(matrices: int, config: Config) -> None:
    """Compiles a tiling into Triton's cache on disk."""
    u8, f16 = torch.uint8, torch.float16
    pointers = (u8, u8, f16, f16, torch.int32, torch.float32, torch.bfloat16)
    sizes = (4096, 4096, 8)
    decode_kernel.warmup(*pointers, *sizes, EXPERTS=MOST_EXPERTS, MATRICES=matrices, **config.options(), grid=(1,))


def compile_all(processes: int) -> None:
    """Compiles every tiling in so many processes: Triton's compiler holds Python's lock."""
    jobs = [(matrices, config) for matrices in (1, 2) for config in configs(matrices)]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, mp_context=context) as pool:
        for job in [pool.submit(compile_one, *job) for job in jobs]:
            job.result()


def contend(inputs: Inputs, copies: int) -> list[Run]:
    """Tokens come as exact f16 in halves, the even and the odd elements of K, as a quantiser could write them."""
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

    def launch(config: Config, matrices: int, operands: list[torch.Tensor]) -> torch.Tensor:
        out = operands[-1]
        n = out.shape[1]
        tiles = sum(triton.cdiv(tokens, config.tokens) for tokens in problem.tokens)
        decode_kernel[(tiles * (n // config.rows),)](
            *operands, n, problem.k, problem.experts, EXPERTS=MOST_EXPERTS, MATRICES=matrices, **config.options()
        )
        return out

    def launch_two(config: Config, operands: list[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        return silu_mul(launch(config, 1, operands), out)

    sets = [copy() for _ in range(copies)]
    candidates: list[list[Run]] = []
    for config in suitable(problem, problem.matrices):
        candidates.append([functools.partial(launch, config, problem.matrices, operands) for operands in sets])
    if problem.op == "gated":
        wide = [torch.empty(len(tokens), problem.rows, dtype=torch.bfloat16, device="cuda") for _ in sets]
        for config in suitable(problem, 1):
            together = zip(sets, wide, strict=True)
            candidates.append(
                [functools.partial(launch_two, config, [*own[:-1], product], own[-1]) for own, product in together]
            )
    return candidates[fastest(candidates)]


def weight_bytes(inputs: Inputs) -> int:
    """Bytes of one copy of the weights."""
    return inputs.weights.values.numel() + inputs.weights.scales.numel()
