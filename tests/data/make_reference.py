#!/usr/bin/env python3
"""Makes reference.json: NVFP4 codes, layouts, quantization and a gated GEMM, computed without this project's code.

Needs numpy and ml_dtypes (0.5 or newer) from PyPI. Formats come from ml_dtypes (float4_e2m1fn, float8_e4m3fn). The scale layout is
cuBLAS's "1D block scaling factors layout", made by numpy's reshape and transpose. Quantization is ModelOpt's arithmetic in
numpy's f32. The GEMM uses exact rational numbers.

    make_reference.py            writes reference.json next to this file
    make_reference.py --check    fails if reference.json differs from the output of this script
"""

import decimal
import json
import pathlib
import sys
from fractions import Fraction

import ml_dtypes
import numpy as np

E2M1 = ml_dtypes.float4_e2m1fn
E4M3 = ml_dtypes.float8_e4m3fn
BLOCK = 16
MAX_SCALE = np.float32(448)
SMALLEST_SCALE = np.float32(2.0**-9)
PATH = pathlib.Path(__file__).with_name("reference.json")

# The streams of RandomState are frozen. The streams of numpy's newer generators may change between versions.
random = np.random.RandomState(4)


def floats(shape, exponents):
    """Makes f32 numbers with exponents in a range, without library functions whose last bit depends on the machine."""
    mantissas = 1 + random.random_sample(shape)
    return np.ldexp(mantissas, random.randint(*exponents, size=shape)).astype(np.float32)


def bits(numbers, dtype):
    return [int(x) for x in np.asarray(numbers).view(dtype).ravel()]


def to_hex(codes):
    return np.asarray(codes, dtype=np.uint8).tobytes().hex()


def decoded(dtype, count):
    """Returns the f32 bits of every code; None for NaN."""
    values = np.arange(count, dtype=np.uint8).view(dtype).astype(np.float32)
    return [None if np.isnan(x) else int(x.view(np.uint32)) for x in values]


def encoded(dtype, largest, signed):
    """Returns f32 bits with their codes: every value, every midpoint, their neighbors, f32 subnormals, and random numbers."""
    codes = np.arange(16 if dtype is E2M1 else 256, dtype=np.uint8).view(dtype).astype(np.float32)
    values = np.unique(np.abs(codes[codes >= 0]))  # of 0 and -0 always 0: which one a sort puts first depends on the CPU
    points = np.concatenate([values, (values[1:] + values[:-1]) / np.float32(2)])
    numbers = np.concatenate(
        [
            points,
            np.nextafter(points, np.float32(np.inf)),
            np.nextafter(points[points > 0], np.float32(0)),
            np.float32([1e-45, 1e-38, 2.0**-126, largest * 1.5, 3e38]),
            floats(200, (-12, 9)),
        ]
    )
    if signed:
        numbers = np.concatenate([numbers, -numbers])
    # Above the largest value ml_dtypes may return NaN, but quantizers saturate.
    saturated = np.clip(numbers, -np.float32(largest), np.float32(largest))
    return [[int(x), int(c)] for x, c in zip(numbers.view(np.uint32), saturated.astype(dtype).view(np.uint8))]


def blocked_layout(rows, columns):
    """Returns row-major scales, and the same scales in tiles of 128 x 4, stored as 32 x (4 x 4) bytes."""
    linear = random.randint(1, 127, size=(rows, columns)).astype(np.uint8)
    padded = np.zeros((-(-rows // 128) * 128, -(-columns // 4) * 4), dtype=np.uint8)
    padded[:rows, :columns] = linear
    tiles = padded.reshape(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    blocked = tiles.transpose(0, 3, 2, 1, 4)
    return {"rows": rows, "columns": columns, "linear": to_hex(linear), "blocked": to_hex(np.ascontiguousarray(blocked))}


def pack(codes):
    """Packs two codes per byte, the even element along K in the low nibble."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def quantized(rows, k):
    """Quantizes by ModelOpt's NVFP4 algorithm. The blocks have very different magnitudes; one block is all zeros."""
    signs = random.choice(np.float32([-1, 1]), size=(rows, k // BLOCK, BLOCK))
    blocks = floats(signs.shape, (-4, 0)) * floats((rows, k // BLOCK, 1), (-24, 0)) * signs
    blocks[1, 1] = 0
    blocks[2, 0, :2] = [-0.0, 0.0]
    global_scale = np.abs(blocks).max() / np.float32(6 * 448)
    scales = np.abs(blocks).max(axis=2) / (np.float32(6) * global_scale)
    scales[scales == 0] = 1
    scales = np.clip(scales, SMALLEST_SCALE, MAX_SCALE).astype(E4M3)
    scaled = blocks / (scales.astype(np.float32) * global_scale)[..., None]
    codes = scaled.astype(E2M1).view(np.uint8)
    codes[scaled == 0] = 0
    assert scaled.dtype == np.float32
    return {
        "rows": rows,
        "k": k,
        "numbers": bits(blocks, np.uint32),
        "values": to_hex(pack(codes.reshape(rows, k))),
        "scales": to_hex(scales.view(np.uint8)),
        "global": int(global_scale.view(np.uint32)),
    }


def operand(rows, k, global_scale):
    """Makes a random operand. Returns its JSON, its numbers without the global scale as rationals, and the global scale."""
    codes = random.randint(0, 16, size=(rows, k)).astype(np.uint8)
    scales = random.randint(0, 0x7F, size=(rows, k // BLOCK)).astype(np.uint8)
    global_scale = np.float32(global_scale)
    values = codes.view(E2M1).astype(np.float64)
    factors = scales.view(E4M3).astype(np.float64).repeat(BLOCK, axis=1)
    exact = [[Fraction(v) * Fraction(f) for v, f in zip(*row)] for row in zip(values, factors)]
    described = {
        "values": to_hex(pack(codes)),
        "scales": to_hex(scales),
        "global": int(global_scale.view(np.uint32)),
    }
    return described, exact, Fraction(float(global_scale))


def rounded(value, dtype):
    """Rounds an exact decimal to a 16-bit type. The decimal must be far from a tie, so that every library's exp rounds alike."""
    nearest = np.float64(float(value)).astype(dtype)
    for toward in (-np.inf, np.inf):
        neighbor = np.nextafter(nearest, np.array(toward).astype(dtype))
        tie = (decimal.Decimal(float(nearest)) + decimal.Decimal(float(neighbor))) / 2
        assert abs(value - tie) > abs(value) * decimal.Decimal("1e-12"), "the value is too close to a tie; choose another seed"
    assert np.isfinite(nearest)
    return int(nearest.view(np.uint16))


def gated_gemm(m, n, k):
    """Computes silu(a1 * A.B1') * (a2 * A.B2') with exact pre-activations. The result is rounded once."""
    decimal.getcontext().prec = 60
    a, tokens, global_a = operand(m, k, 3.1)
    gate, gates, global_gate = operand(n, k, 1.3e-5)
    up, ups, global_up = operand(n, k, 1.1e-4)
    pre, f16, bf16 = [], [], []
    for token in tokens:
        for weights in zip(gates, ups):
            sums = [sum(x * y for x, y in zip(token, weight)) for weight in weights]
            exact = [s * global_a * g for s, g in zip(sums, (global_gate, global_up))]
            pre.append([int(np.float64(float(x)).view(np.uint64)) for x in exact])
            x, y = (decimal.Decimal(e.numerator) / decimal.Decimal(e.denominator) for e in exact)
            value = x / (1 + (-x).exp()) * y
            f16.append(rounded(value, np.float16))
            bf16.append(rounded(value, ml_dtypes.bfloat16))
    return {"m": m, "n": n, "k": k, "a": a, "gate": gate, "up": up, "pre": pre, "f16": f16, "bf16": bf16}


def main():
    reference = {
        "e2m1_decoded": decoded(E2M1, 16),
        "e4m3_decoded": decoded(E4M3, 256),
        "e2m1_encoded": encoded(E2M1, 6, signed=True),
        "e4m3_encoded": encoded(E4M3, 448, signed=False),
        "blocked": [blocked_layout(*sizes) for sizes in [(1, 1), (128, 4), (130, 5), (257, 9)]],
        "quantized": quantized(8, 64),
        "gated": gated_gemm(5, 8, 48),
    }
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in reference.items())
    text = f"{{\n{lines}\n}}\n"
    if sys.argv[1:] == ["--check"]:
        if PATH.read_text() != text:
            sys.exit(f"{PATH} differs from the output of {sys.argv[0]}; run {sys.argv[0]} and check the difference")
    elif sys.argv[1:]:
        sys.exit(__doc__)
    else:
        PATH.write_text(text)


main()
