"""A Triton kernel of NVFP4 grouped GEMMs for a B200, with `tl.dot_scaled`: the rival in benches/lab/time-model.md.

    python3 triton_dot_scaled.py FOLDER SHAPE                  # a folder per tiling: kernel.ptx and launch.json
    python3 triton_dot_scaled.py FOLDER --check PTX_EMULATOR   # compares small problems on the emulator with numpy

It needs Triton (3.9.0) and numpy, but no GPU: Triton compiles without a GPU, and `ptx-emulator launch` runs the result.

Tensor maps load values and scales. Scales are in the tensor core's layout, so that Triton moves them to tensor memory
by `tcgen05.cp`. Gate and up are one matrix whose rows alternate in halves of a tile. Each group's tokens start at a
multiple of a tile.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource

SHAPES = Path(__file__).parents[2] / "crates/nvfp4_core/src/shapes.json"
# Rows per scale tile.
SCALE_ROWS = 128
# Elements that share a scale, and elements per scale tile along K.
BLOCK = 16
SCALE_COLUMNS = 4 * BLOCK


@triton.jit
def kernel(
    tokens, token_scales, weights, weight_scales, out, groups, alpha, rows, k,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr,
    SPECIALIZED: tl.constexpr,
):  # fmt: skip
    """Computes a tile of `out`: TOKENS padded tokens of a group in `groups`, times ROWS of its `rows` of weights."""
    token = tl.program_id(0) * TOKENS
    row = tl.load(groups + tl.program_id(0)) * rows + tl.program_id(1) * ROWS
    sums = tl.zeros((TOKENS, ROWS), tl.float32)
    for at in tl.range(0, k, DEPTH, num_stages=STAGES, warp_specialize=SPECIALIZED):
        x = tokens.load([token, at // 2])
        w = weights.load([row, at // 2])
        xs = token_scales.load([0, token // 128, at // 64, 0, 0])
        ws = weight_scales.load([0, row // 128, at // 64, 0, 0])
        xs = xs.reshape(TOKENS // 128, DEPTH // 64, 32, 4, 4).trans(0, 3, 2, 1, 4).reshape(TOKENS, DEPTH // 16)
        ws = ws.reshape(ROWS // 128, DEPTH // 64, 32, 4, 4).trans(0, 3, 2, 1, 4).reshape(ROWS, DEPTH // 16)
        sums = tl.dot_scaled(x, xs, "e2m1", w.T, ws, "e2m1", sums)
    if GATED:
        gate, up = sums.reshape(TOKENS, 2, ROWS // 2).permute(0, 2, 1).split()
        gate = gate * alpha
        result = gate * tl.sigmoid(gate) * (up * alpha)
        out.store([token, tl.program_id(1) * (ROWS // 2)], result.to(tl.float16))
    else:
        out.store([token, tl.program_id(1) * ROWS], (sums * alpha).to(tl.float16))


@dataclasses.dataclass(frozen=True)
class Tiling:
    """Tokens, rows of weights and elements of K per step, stages of the pipeline, and whether warps have roles."""

    tokens: int
    rows: int
    depth: int
    stages: int
    specialized: bool

    def __str__(self) -> str:
        roles = "_roles" if self.specialized else ""
        return f"{self.tokens}x{self.rows}x{self.depth}_s{self.stages}{roles}"


# The tilings that fit a B200's shared memory, 227 KB per CTA.
TILINGS = [
    Tiling(*tile, stages, specialized)
    for tile, stages in ((t, s) for t in ((128, 128, 256), (128, 256, 256)) for s in (3, 4, 5))
    for specialized in (False, True)
    if stages * (tile[0] + tile[1]) * tile[2] * 9 // 16 <= 227 << 10
]


@dataclasses.dataclass(frozen=True)
class Problem:
    """A grouped GEMM: tokens of each group, columns of C, elements of K, and whether it has gate and up."""

    tokens: list[int]
    n: int
    k: int
    gated: bool

    @property
    def rows(self) -> int:
        """Number of rows of a group's weights."""
        return self.n * (2 if self.gated else 1)

    def groups(self, tile: int) -> list[int]:
        """Returns the group of each tile of `tile` tokens."""
        return [group for group, tokens in enumerate(self.tokens) for _ in range(-(-tokens // tile))]


def problem(name: str) -> Problem:
    """Returns a built-in shape of the library."""
    shape = next(shape for shape in json.loads(SHAPES.read_text()) if shape["name"] == name)
    ((n, k),) = {(n, k) for _, n, k in shape["groups"]}
    return Problem([m for m, _, _ in shape["groups"]], n, k, shape["op"] == "gated")


def compiled(tiling: Tiling, gated: bool) -> Any:
    """Compiles the kernel for compute capability 10.0 to PTX. The assembler is skipped."""
    CUDABackend.make_cubin = lambda self, source, *rest: source.encode()
    tokens, rows, depth = tiling.tokens, tiling.rows, tiling.depth

    def scales(of: int) -> str:
        return f"tensordesc<fp8e4nv[1,{of // SCALE_ROWS},{depth // SCALE_COLUMNS},2,256]>"

    constants = {
        "TOKENS": tokens, "ROWS": rows, "DEPTH": depth, "STAGES": tiling.stages, "GATED": gated,
        "SPECIALIZED": tiling.specialized,
    }  # fmt: skip
    signature = {
        "tokens": f"tensordesc<u8[{tokens},{depth // 2}]>",
        "token_scales": scales(tokens),
        "weights": f"tensordesc<u8[{rows},{depth // 2}]>",
        "weight_scales": scales(rows),
        "out": f"tensordesc<fp16[{tokens},{rows // 2 if gated else rows}]>",
        "groups": "*i32", "alpha": "fp32", "rows": "i32", "k": "i32",
    } | dict.fromkeys(constants, "constexpr")  # fmt: skip
    source = ASTSource(kernel, signature, constants)
    return triton.compile(source, target=GPUTarget("cuda", 100, 32), options={"num_stages": tiling.stages})


def descriptor(buffer: str, kind: str, shape: list[int], made: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns Triton's tensor map of a contiguous tensor, and the sizes and strides that follow it as arguments."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    tensor_map = {
        "buffer": buffer,
        "type": kind,
        "dims": shape[::-1],
        "strides": [stride * made["elem_size"] for stride in strides[-2::-1]],
        "box": made["block_size"][::-1],
        "swizzle": ("none", "32B", "64B", "128B")[made["swizzle"]],
    }
    return [{"tensor_map": tensor_map}, *({"i32": size} for size in shape), *({"i64": stride} for stride in strides)]


def write(
    folder: Path, problem: Problem, tiling: Tiling, alpha: float, data: dict[str, np.ndarray] | None = None
) -> None:
    """Writes the kernel and its launch, with these operands or with zeros."""
    folder.mkdir(parents=True, exist_ok=True)
    made = compiled(tiling, problem.gated)
    ptx = made.asm["ptx"]
    (folder / "kernel.ptx").write_text(ptx)
    groups = problem.groups(tiling.tokens)
    tokens, rows, k = len(groups) * tiling.tokens, len(problem.tokens) * problem.rows, problem.k
    sizes = {"tokens": tokens * k // 2, "token_scales": tokens * k // BLOCK}
    sizes |= {"weights": rows * k // 2, "weight_scales": rows * k // BLOCK}
    buffers: dict[str, Any] = {name: {"bytes": size, "fill": "zero"} for name, size in sizes.items()}
    for name, operand in (data or {}).items():
        operand.tofile(folder / f"{name}.bin")
        buffers[name] = {"file": f"{name}.bin"}
    buffers |= {"out": {"bytes": 2 * tokens * problem.n, "fill": "poison"}, "groups": {"u32": groups}}
    maps = made.metadata.tensordesc_meta
    args = [
        *descriptor("tokens", "u8", [tokens, k // 2], maps[0]),
        *descriptor("token_scales", "u8", [1, tokens // SCALE_ROWS, k // SCALE_COLUMNS, 2, 256], maps[1]),
        *descriptor("weights", "u8", [rows, k // 2], maps[2]),
        *descriptor("weight_scales", "u8", [1, rows // SCALE_ROWS, k // SCALE_COLUMNS, 2, 256], maps[3]),
        *descriptor("out", "f16", [tokens, problem.n], maps[4]),
        {"pointer": "groups"}, {"f32": alpha}, {"i32": problem.rows}, {"i32": k},
        # Triton's scratch memory. The kernel uses none.
        {"u64": 0}, {"u64": 0},
    ]  # fmt: skip
    launch = {
        "ptx": "kernel.ptx",
        "entry": "kernel",
        "grid": [len(groups), problem.rows // tiling.rows, 1],
        "block": [int(re.search(r"\.reqntid (\d+)", ptx)[1]), 1, 1],
        "shared_bytes": made.metadata.shared,
        "buffers": buffers,
        "args": args,
        "save": {"out": "out.bin"} if data else {},
    }
    (folder / "launch.json").write_text(json.dumps(launch))


VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def decoded(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Decodes packed e2m1, with the even element in the low bits, times e4m3 without subnormals."""
    values = np.stack([VALUES[codes & 15], VALUES[codes >> 4]], -1).reshape(len(codes), -1)
    return values * np.repeat((1 + (scales & 7) / 8) * 2.0 ** ((scales >> 3).astype(int) - 7), BLOCK, 1)


def blocked(scales: np.ndarray) -> np.ndarray:
    """Converts scales to the tensor core's layout: tiles of 128 rows and 4 columns."""
    rows, columns = scales.shape
    return scales.reshape(rows // SCALE_ROWS, 4, 32, columns // 4, 4).transpose(0, 3, 2, 1, 4)


def check(folder: Path, emulator: str) -> None:
    """Compares every tiling, gated and plain, on small ragged groups with numpy. Fails at the first wrong element."""
    random, alpha = np.random.default_rng(1), 2.0**-9
    for tiling, gated in itertools.product(TILINGS, (False, True)):
        problem = Problem([128, 40, 200], 256, 512, gated)
        groups, at = problem.groups(tiling.tokens), folder / f"{tiling}_{'gated' if gated else 'plain'}"
        tokens, rows = len(groups) * tiling.tokens, len(problem.tokens) * problem.rows
        x, w = (random.integers(0, 256, (of, problem.k // 2), np.uint8) for of in (tokens, rows))
        xs, ws = (random.integers(0x28, 0x40, (of, problem.k // BLOCK), np.uint8) for of in (tokens, rows))
        data = {"tokens": x, "token_scales": blocked(xs), "weights": w, "weight_scales": blocked(ws)}
        write(at, problem, tiling, alpha, data)
        subprocess.run([emulator, "launch", "launch.json"], cwd=at, check=True, capture_output=True)
        of_group = decoded(w, ws).reshape(len(problem.tokens), problem.rows, -1)
        tiles = decoded(x, xs).reshape(len(groups), tiling.tokens, -1)
        expected = alpha * np.einsum("tmk,tnk->tmn", tiles, of_group[groups]).reshape(tokens, -1)
        if gated:
            halves = expected.reshape(tokens, -1, 2, tiling.rows // 2)
            gate, up = (halves[:, :, which].reshape(tokens, problem.n) for which in (0, 1))
            expected = gate / (1 + np.exp(-gate)) * up
        out = np.fromfile(at / "out.bin", np.float16).reshape(tokens, problem.n)
        np.testing.assert_allclose(out, expected, rtol=2e-3, atol=2e-3)
        print(f"{at.name}: correct")


def main() -> None:
    """Writes the tilings of a shape, or checks all tilings."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("shape", nargs="?", help="a built-in shape, such as dual-1")
    parser.add_argument("--check", metavar="PTX_EMULATOR")
    args = parser.parse_args()
    if args.check:
        check(args.folder, args.check)
    if args.shape:
        for tiling in TILINGS:
            write(args.folder / str(tiling), problem(args.shape), tiling, 1.0)


if __name__ == "__main__":
    main()
