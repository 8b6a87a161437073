#!/usr/bin/env python3
"""Checks `nvfp4 dequantize` and `nvfp4 convert` against numpy on random models. Needs numpy from PyPI.

    check_dequantize.py PATH/TO/nvfp4 [SEED] [MODELS]

Each model has random sizes, random names of a family, and a random form: NVFP4 by ModelOpt or compressed-tensors, experts apart
or in one tensor as [E, N, K/2] or [E, K/2, N], global scales for all, per expert or per part, a factor per column (AWQ); FP8 with
scales of any type and name per block, row or tensor; or MXFP4, apart or in gpt-oss's `_blocks`. Every number of the output in f32,
bf16 or f16 must be equal to the product in numpy, rounded once more; after a conversion to the other format and layout, every
number must be equal within one rounding of the global scale.
"""

import pathlib
import subprocess
import sys
import tempfile

import numpy as np
from tensors import E4M3, F32, bf16, load, numbers, nvfp4, save, stored, values_of

FAMILIES = {
    "mlp": ("gate_proj", "up_proj", "down_proj"),
    "block_sparse_moe": ("w1", "w3", "w2"),
    "feed_forward": ("w1", "w3", "w2"),
    "ffn": ("w1", "w3", "w2"),
}
FLOATS = ["F32", "BF16", "F16"]


def apart(rng, tensors, expected, module, n, k, is_modelopt):
    """Adds one NVFP4 matrix."""
    codes, scales, values = nvfp4(rng, n, k)
    factor = F32(2.0 ** rng.integers(-12, 3) * rng.uniform(1, 2))
    result = numbers(values, scales, factor)
    if is_modelopt:
        tensors[f"{module}.weight"] = ("U8", codes)
        tensors[f"{module}.weight_scale_2"] = ("F32", factor)
        if rng.random() < 0.2:
            tensors[f"{module}.pre_quant_scale"], columns = stored(rng.uniform(0.5, 2, k), FLOATS[rng.integers(3)])
            result = result * columns.astype(F32)
    else:
        divisor = F32(1) / factor
        result = numbers(values, scales, F32(1) / divisor)
        tensors[f"{module}.weight_packed"] = ("U8", codes)
        tensors[f"{module}.weight_global_scale"] = ("F32", np.array([divisor]))
    tensors[f"{module}.weight_scale"] = ("F8_E4M3", scales)
    expected[f"{module}.weight"] = result


def fused(rng, tensors, expected, module, experts, n, k, parts):
    """Adds all experts of a projection in one tensor."""
    transposed = rng.random() < 0.5
    shape = [(), (experts,), (experts, parts)][rng.integers(3 if parts > 1 else 2)]
    factors = rng.uniform(0.001, 0.1, shape).astype(F32)
    spread = np.broadcast_to(factors.reshape(shape + (1,) * (2 - len(shape))) if shape else factors, (experts, parts))
    codes, scales, values = (np.stack(part) for part in zip(*(nvfp4(rng, n, k) for _ in range(experts))))
    of_rows = np.repeat(spread, n // parts, -1)
    result = values * np.repeat(E4M3[scales] * of_rows[..., None], 16, -1)
    order = (0, 2, 1) if transposed else (0, 1, 2)
    tensors[module] = ("U8", codes.transpose(order))
    tensors[f"{module}_weight_scale"] = ("F8_E4M3", scales.transpose(order))
    tensors[f"{module}_weight_scale_2"] = ("F32", factors)
    expected[module] = result.transpose(order)


def fp8(rng, tensors, expected, module, n, k):
    """Adds one FP8 matrix."""
    codes = rng.integers(0, 0x7F, (n, k), np.uint8)
    grid = [(1, 1), (n, 1), (-(-n // 128), -(-k // 128))][rng.integers(3)]
    rows, columns = (-(-size // count) if count > 1 else size for size, count in zip((n, k), grid))
    rows, columns = (128 if grid not in ((1, 1), (n, 1)) else side for side in (rows, columns))
    tensors[f"{module}.weight"] = ("F8_E4M3", codes)
    if rng.random() < 0.25:
        exponents = rng.integers(110, 130, grid, np.uint8)
        scale, factors = ("F8_E8M0", exponents), powers(exponents)
    else:
        scale, factors = stored(rng.uniform(0.001, 0.1, grid), FLOATS[rng.integers(3)])
    tensors[f"{module}.{['weight_scale_inv', 'weight_scale', 'scale'][rng.integers(3)]}"] = scale
    factors = factors.astype(F32)
    expected[f"{module}.weight"] = E4M3[codes] * np.repeat(np.repeat(factors, rows, 0), columns, 1)[:n, :k]


def powers(exponents):
    """Returns the numbers of E8M0."""
    return 2.0 ** (exponents.astype(int) - 127)


def mxfp4(rng, shape):
    """Returns codes, exponents and numbers of MXFP4 matrices `[.., N, K]`."""
    codes = rng.integers(0, 256, (*shape[:-1], shape[-1] // 2), np.uint8)
    exponents = rng.integers(100, 135, (*shape[:-1], shape[-1] // 32), np.uint8)
    return codes, exponents, values_of(codes) * np.repeat(powers(exponents), 32, -1)


def blocks(rng, tensors, expected, module, experts, n, k):
    """Adds all experts of a projection in MXFP4, as gpt-oss stores them."""
    codes, exponents, result = mxfp4(rng, (experts, n, k))
    tensors[f"{module}_blocks"] = ("U8", codes.reshape(experts, n, k // 32, 16))
    tensors[f"{module}_scales"] = ("U8", exponents)
    expected[module] = result.transpose(0, 2, 1)


def mxfp4_apart(rng, tensors, expected, module, n, k):
    """Adds one MXFP4 matrix, with the names of DeepSeek-V4 or of compressed-tensors."""
    codes, exponents, expected[f"{module}.weight"] = mxfp4(rng, (n, k))
    value, scale = [("weight", "scale"), ("weight_packed", "weight_scale")][rng.integers(2)]
    tensors[f"{module}.{value}"] = (["U8", "I8"][rng.integers(2)] if value == "weight" else "U8", codes)
    tensors[f"{module}.{scale}"] = (["U8", "F8_E8M0"][rng.integers(2)], exponents)


def model(rng):
    """Returns the tensors of a random model, the expected numbers, and whether its weights are all NVFP4."""
    tensors, expected = {}, {}
    block, names = list(FAMILIES.items())[rng.integers(len(FAMILIES))]
    form = ["modelopt", "compressed-tensors", "fused", "fp8", "mxfp4", "blocks"][rng.integers(6)]
    unit = 32 if form in ("mxfp4", "blocks") else 16
    experts, hidden, inner = int(rng.integers(1, 4)), int(unit * rng.integers(1, 6)), int(unit * rng.integers(1, 6))
    for layer in range(int(rng.integers(1, 3))):
        before = f"model.layers.{layer}.{block}.experts"
        if form == "fused":
            fused(rng, tensors, expected, f"{before}.gate_up_proj", experts, 2 * inner, hidden, 2)
            fused(rng, tensors, expected, f"{before}.down_proj", experts, hidden, inner, 1)
            continue
        if form == "blocks":
            blocks(rng, tensors, expected, f"{before}.gate_up_proj", experts, 2 * inner, hidden)
            blocks(rng, tensors, expected, f"{before}.down_proj", experts, hidden, inner)
            continue
        for expert in range(experts):
            for name, sizes in zip(names, [(inner, hidden), (inner, hidden), (hidden, inner)]):
                module = f"{before}.{expert}.{name}"
                if form == "fp8":
                    fp8(rng, tensors, expected, module, *sizes)
                elif form == "mxfp4":
                    mxfp4_apart(rng, tensors, expected, module, *sizes)
                else:
                    apart(rng, tensors, expected, module, *sizes, form == "modelopt")
    tensors["model.norm.weight"] = ("F32", rng.uniform(0, 1, hidden).astype(F32))
    return tensors, expected, form


def main():
    command = str(pathlib.Path(sys.argv[1]).resolve())
    seed, count = (int(argument) for argument in (sys.argv[2:] + ["0", "60"][len(sys.argv) - 2 :])[:2])
    numbers_seen = 0
    for index in range(count):
        rng = np.random.default_rng([seed, index])
        tensors, expected, form = model(rng)
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            save(folder / "in.safetensors", tensors)

            def run(*line):
                return subprocess.run([command, *line], cwd=folder, capture_output=True, text=True)

            # Larger numbers have no f16, which `dequantize` refuses.
            largest = max(np.abs(wanted).max() for wanted in expected.values())
            dtype = FLOATS[rng.integers(3 if largest < 65000 else 2)]
            done = run("dequantize", "in.safetensors", "out.safetensors", "--dtype", dtype.lower(), "--quiet")
            assert done.returncode == 0, (seed, index, form, done.stderr)
            got = load(folder / "out.safetensors")
            assert set(got) == set(expected) | {"model.norm.weight"}, (seed, index, form, set(got) ^ set(expected))
            for name, wanted in expected.items():
                wanted = wanted.astype(F32)
                wanted = {"F32": wanted, "BF16": bf16(wanted), "F16": wanted.astype(np.float16)}[dtype]
                assert np.array_equal(got[name], wanted), (seed, index, form, dtype, name)
                numbers_seen += wanted.size
            if form in ("fp8", "mxfp4", "blocks"):
                continue
            target = ["modelopt", "compressed-tensors"][rng.integers(2)]
            has_columns = any("pre_quant_scale" in name for name in tensors)
            layout = ["apart", "fused"][rng.integers(2)]
            line = ("convert", "in.safetensors", "converted.safetensors", "--to", target, "--experts", layout, "--quiet")
            done = run(*line)
            if has_columns and (target == "compressed-tensors" or layout == "fused"):
                assert done.returncode == 2 and "NVFP4_AWQ" in done.stderr, (seed, index, form, line, done)
                continue
            assert done.returncode == 0, (seed, index, form, line, done.stderr)
            verified = run("verify", "converted.safetensors", "--source", "in.safetensors", "--max-relative-rms", "1e-6")
            assert verified.returncode == 0, (seed, index, form, line, verified.stdout, verified.stderr)
    print(f"{count} models, {numbers_seen} numbers: all are as expected")


if __name__ == "__main__":
    main()
