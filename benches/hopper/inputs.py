"""Inputs of the peers: a problem's NVFP4 weights and tokens, made on the GPU from a seed, and the exact reference.

The distributions are the same as in the library's generators. Global scales are powers of two, so every decoded number is
exact in bf16, and all peers compute with the same numbers.
"""

from __future__ import annotations

import dataclasses
import itertools

import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLOCK = 16


@dataclasses.dataclass(frozen=True)
class Problem:
    """Sizes of an operation. Every group has its own M; N and K are common."""

    name: str
    op: str
    generator: str
    tokens: tuple[int, ...]
    n: int
    k: int

    @classmethod
    def from_groups(cls, name: str, op: str, generator: str, groups: list[list[int]]) -> Problem:
        """Makes a problem from `[M, N, K]` of each group.

        >>> Problem.from_groups("x", "gated", "gaussian", [[3, 64, 128], [5, 64, 128]])
        Problem(name='x', op='gated', generator='gaussian', tokens=(3, 5), n=64, k=128)
        """
        (sizes,) = {(n, k) for _, n, k in groups}
        return cls(name, op, generator, tuple(m for m, _, _ in groups), *sizes)

    @property
    def experts(self) -> int:
        """Number of groups."""
        return len(self.tokens)

    @property
    def matrices(self) -> int:
        """Number of weight matrices per group: 2 (gate and up) or 1."""
        return 2 if self.op == "gated" else 1

    @property
    def rows(self) -> int:
        """Number of rows of a group's weights, gate above up."""
        return self.matrices * self.n

    @property
    def ends(self) -> list[int]:
        """Index after each group's last token."""
        return [sum(self.tokens[: group + 1]) for group in range(self.experts)]


@dataclasses.dataclass(frozen=True)
class Quantized:
    """`values[..., K/2]`, two e2m1 per byte; `scales[..., K/16]`, e4m3; `factor`, a power of two for all numbers."""

    values: torch.Tensor
    scales: torch.Tensor
    factor: float

    def group(self, index: int) -> Quantized:
        """Returns the matrix of one group."""
        return Quantized(self.values[index], self.scales[index], self.factor)

    def decode(self, dtype: torch.dtype, factor: float | None = None) -> torch.Tensor:
        """Returns the numbers `[..., K]`, with `factor` instead of the matrix's own factor if it is given."""
        table = torch.tensor([*E2M1, *(-x for x in E2M1)], dtype=dtype, device=self.values.device)
        nibbles = torch.stack((self.values & 15, self.values >> 4), dim=-1).flatten(-2)
        scales = self.scales.to(torch.float32).to(dtype) * (self.factor if factor is None else factor)
        blocks = table[nibbles.int()].unflatten(-1, (-1, BLOCK))
        return (blocks * scales.unsqueeze(-1)).flatten(-2)


def quantize(numbers: torch.Tensor) -> Quantized:
    """Rounds to NVFP4 with the largest magnitudes of the tensor and of each block, like ModelOpt."""
    factor = 2.0 ** torch.ceil(torch.log2(numbers.abs().amax() / (E2M1[-1] * 448))).item()
    blocks = numbers.unflatten(-1, (-1, BLOCK))
    scales = (blocks.abs().amax(-1) / (E2M1[-1] * factor)).clamp(min=2.0**-9).to(torch.float8_e4m3fn)
    units = blocks / (scales.float() * factor).unsqueeze(-1)
    middles = torch.tensor([(a + b) / 2 for a, b in itertools.pairwise(E2M1)], device=numbers.device)
    codes = (torch.bucketize(units.abs(), middles) | torch.signbit(units).int() << 3).to(torch.uint8).flatten(-2)
    return Quantized(codes[..., ::2] | codes[..., 1::2] << 4, scales, factor)


def generate(generator: str, shape: tuple[int, ...], deviation: float, random: torch.Generator) -> Quantized:
    """Returns a matrix, or one per group, with the distribution of the library's generator of that name."""
    device = random.device
    if generator == "gaussian":
        parts = [quantize(torch.randn(shape[1:], generator=random, device=device) * deviation) for _ in range(shape[0])]
        # All groups share the largest factor: the scales of the other groups can be halved until they fit it.
        factor = max(part.factor for part in parts)
        scales = [(part.scales.float() * (part.factor / factor)).to(torch.float8_e4m3fn) for part in parts]
        return Quantized(torch.stack([part.values for part in parts]), torch.stack(scales), factor)
    values = torch.randint(256, (*shape[:-1], shape[-1] // 2), generator=random, device=device, dtype=torch.uint8)
    blocks = (*shape[:-1], shape[-1] // BLOCK)
    if generator == "public-group":
        drawn = torch.randint(1, 3, blocks, generator=random, device=device).float()
    else:
        drawn = torch.rand(blocks, generator=random, device=device)
    return Quantized(values & 0xBB, drawn.to(torch.float8_e4m3fn), 1.0)


class Inputs:
    """Weights `[experts, rows, K]` and tokens `[T, K]` of a problem, with the reference output."""

    def __init__(self, problem: Problem, seed: int = 0) -> None:
        random = torch.Generator("cuda").manual_seed(seed)
        self.problem = problem
        shape = (problem.experts, problem.rows, problem.k)
        self.weights = generate(problem.generator, shape, problem.k**-0.5, random)
        self.tokens = generate(problem.generator, (1, problem.ends[-1], problem.k), 1.0, random).group(0)

    def reference(self) -> torch.Tensor:
        """Returns `silu(A B1') * (A B2')` or `A B'` of every group in f64, `[T, N]`."""
        problem, out, start = self.problem, [], 0
        tokens = self.tokens.decode(torch.float64)
        for group, end in enumerate(problem.ends):
            products = tokens[start:end] @ self.weights.group(group).decode(torch.float64).T
            if problem.op == "gated":
                gate, up = products.chunk(2, dim=-1)
                products = torch.nn.functional.silu(gate) * up
            out.append(products)
            start = end
        return torch.cat(out)
