"""The kernel of the Triton peer and its tilings. It does not need PyTorch; `peers/triton_decode.py` launches it.

    python3 triton_decode_kernel.py FOLDER SHAPE              # a folder per tiling of TIMED: kernel.ptx and launch.json

The command needs Triton (3.6.0, the version of benches/lab/measurements/h200-triton.json) and no GPU. `ptx-emulator launch`
runs the kernel.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import re
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# Converts four packed bytes and their scale to eight exact f16. The three low bits of e2m1, moved to bits 9..11 of an
# f16, are the value times 2^-14. The scale is e4m3 times 2^7.
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
# Factor that undoes the scaling of `DECODE`: 2^14 times 2^-7.
DECODED_UNIT = tl.constexpr(128.0)


@triton.jit
def decode(packed, scales, rows: tl.constexpr, half_k: tl.constexpr):
    """Returns the even and the odd elements of `[rows, 2 * half_k]` as f16, in units of `1 / DECODED_UNIT`."""
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
    """Writes `out[T, n]` from tokens `even` and `odd`, each `[T, k / 2]`, and weights `[experts, MATRICES * n, k / 2]`.

    `ends` has the end of each expert's tokens. Grid: for each tile of weight rows, the tiles of all tokens.
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


# Maximum number of groups, a power of two.
MOST_EXPERTS = 16


@dataclasses.dataclass(frozen=True)
class Config:
    """A tiling: weight rows, tokens and elements of K per step; warps; stages of the pipeline."""

    rows: int
    tokens: int
    depth: int
    warps: int
    stages: int

    def accumulators(self, matrices: int) -> int:
        """Returns the number of f32 accumulators per thread."""
        return matrices * self.rows * self.tokens // (32 * self.warps)

    def __str__(self) -> str:
        return f"{self.rows}x{self.tokens}x{self.depth}_w{self.warps}_s{self.stages}"

    def tile(self) -> dict[str, int]:
        """Returns the kernel's constants."""
        return {"ROWS": self.rows, "TOKENS": self.tokens, "DEPTH": self.depth}

    def options(self) -> dict[str, int]:
        """Returns the options of a launch."""
        return self.tile() | {"num_warps": self.warps, "num_stages": self.stages}


def configs(matrices: int) -> list[Config]:
    """Returns every tiling whose accumulators leave enough registers for the decoded weights."""
    choices = itertools.product((64, 128), (16, 32, 64, 128, 256), (128, 256), (4, 8), (3, 4))
    return [
        config
        for config in itertools.starmap(Config, choices)
        if config.accumulators(matrices) <= 128 and config.rows >= 16 * config.warps
    ]


# Shapes and tilings that are timed alone, whatever the peer would choose. The time model is compared with them.
TIMED = {
    shape: [Config(64, tokens, 128, 4, 3), Config(128, tokens, 128, 8, 3), Config(64, tokens, 128, 4, 4)]
    for shape, tokens in {
        "decode-1": 16, "decode-16": 16, "moe-2": 64, "moe-4": 64,
        "dual-1": 64, "dual-3": 32, "group-2": 64, "group-4": 128,
    }.items()
}  # fmt: skip

SHAPES = Path(__file__).parents[2] / "crates/nvfp4_core/src/shapes.json"


def compiled(config: Config, matrices: int) -> Any:
    """Compiles a tiling for compute capability 9.0, for arguments that are multiples of 16, like the peer's."""
    constants = config.tile() | {"EXPERTS": MOST_EXPERTS, "MATRICES": matrices}
    kinds = ("*u8", "*u8", "*fp16", "*fp16", "*i32", "*fp32", "*bf16", "i32", "i32", "i32")
    signature = dict(zip(decode_kernel.arg_names, kinds, strict=False)) | dict.fromkeys(constants, "constexpr")
    aligned = {(index,): [["tt.divisibility", 16]] for index in range(len(kinds) - 1)}
    options = {"num_warps": config.warps, "num_stages": config.stages}
    source = ASTSource(decode_kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def write(folder: Path, shape: dict[str, Any], config: Config) -> None:
    """Writes a tiling's kernel and its launch on zeros."""
    folder.mkdir(parents=True, exist_ok=True)
    matrices = 2 if shape["op"] == "gated" else 1
    made = compiled(config, matrices)
    ptx = made.asm["ptx"]
    (folder / "kernel.ptx").write_text(ptx)
    ((n, k),) = {(n, k) for _, n, k in shape["groups"]}
    groups = [m for m, _, _ in shape["groups"]]
    tokens, weights = sum(groups), len(groups) * matrices * n * k
    sizes = {"codes": weights // 2, "scales": weights // 16}
    sizes |= {"even": tokens * k, "odd": tokens * k, "out": 2 * tokens * n}
    buffers: dict[str, Any] = {name: {"bytes": size, "fill": "zero"} for name, size in sizes.items()}
    buffers |= {"ends": {"u32": list(itertools.accumulate(groups))}, "alphas": {"f32": [1.0] * len(groups)}}
    pointers = [{"pointer": name} for name in ("codes", "scales", "even", "odd", "ends", "alphas", "out")]
    numbers = [{"i32": size} for size in (n, k, len(groups))]
    launch = {
        "ptx": "kernel.ptx",
        "entry": "decode_kernel",
        "grid": [sum(triton.cdiv(m, config.tokens) for m in groups) * (n // config.rows), 1, 1],
        "block": [int(re.search(r"\.reqntid (\d+)", ptx)[1]), 1, 1],
        "shared_bytes": made.metadata.shared,
        "buffers": buffers,
        # Triton's scratch memory comes last. The kernel uses none.
        "args": [*pointers, *numbers, {"u64": 0}, {"u64": 0}],
    }
    (folder / "launch.json").write_text(json.dumps(launch))


def main() -> None:
    """Writes the tilings of a shape."""
    from triton.backends.nvidia.compiler import CUDABackend

    # Skips the assembler: only PTX is needed.
    CUDABackend.make_cubin = lambda self, source, *rest: source.encode()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("shape", choices=TIMED)
    args = parser.parse_args()
    shape = next(shape for shape in json.loads(SHAPES.read_text()) if shape["name"] == args.shape)
    for config in TIMED[args.shape]:
        write(args.folder / str(config), shape, config)


if __name__ == "__main__":
    main()
