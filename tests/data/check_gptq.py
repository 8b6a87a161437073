#!/usr/bin/env python3
"""Checks `nvfp4 quantize --calibrate-hessian` against GPTQ in numpy. Needs numpy from PyPI.

    check_gptq.py PATH/TO/nvfp4 [SEED] [MODELS]

Each model has a dense layer of random sizes and types, and tokens whose columns depend on each other, recorded by module, by tensor,
by block or by a pattern, in one file or several. The reference is the published algorithm: the upper Cholesky factor of the damped
inverse, with each error spread over the columns after it; the command computes the same decisions from a factor of the sums
themselves. All bytes must be equal, except in a few rows in which f64 rounded a tie differently. With every rule for scales, products
with other tokens must have a smaller error than after rounding to nearest; a weight without activations must have its bytes.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
from check_quantize import E2M1, nearest, quantized, scale_of
from tensors import E4M3, F32, load, numbers, save, stored, values_of

BLOCK = "model.layers.0.mlp"
RULES = ("max", "mse", "four-over-six")


def gptq(weights, tokens, factor):
    """Returns packed values and block scales by GPTQ with blocks of 16 columns and the scales of rounding to nearest."""
    n, k = weights.shape
    sums = tokens.T @ tokens
    sums += 0.01 * np.mean(np.diag(sums)) * np.eye(k)
    upper = np.linalg.cholesky(np.linalg.inv(sums)).T
    left, codes, scales = weights.astype(np.float64), np.zeros((n, k), np.uint8), np.zeros((n, k // 16), np.uint8)
    for first in range(0, k, 16):
        _, scales[:, first // 16 : first // 16 + 1] = quantized(left[:, first : first + 16].astype(F32), factor)
        unit = E4M3[scales[:, first // 16]] * factor
        for column in range(first, first + 16):
            scaled = left[:, column].astype(F32) / unit + F32(0)
            code = nearest(np.minimum(np.abs(scaled), F32(6)), E2M1)
            codes[:, column] = code | (np.signbit(scaled).astype(np.uint8) << 3)
            number = np.where(np.signbit(scaled), -1, 1) * E2M1[code] * unit.astype(np.float64)
            error = (left[:, column] - number) / upper[column, column]
            left[:, column + 1 :] -= np.outer(error, upper[column, column + 1 :])
    return codes[:, 0::2] | codes[:, 1::2] << 4, scales


def tokens_of(rng, mixing, count):
    """Returns tokens whose columns depend on each other, with a few large columns."""
    return rng.standard_normal((count, mixing.shape[0])) @ mixing


def parts(tensors, module):
    """Returns packed values, scales, global scale and the numbers of a weight."""
    codes, scales = tensors[f"{module}.weight"], tensors[f"{module}.weight_scale"]
    factor = tensors[f"{module}.weight_scale_2"]
    return codes, scales, factor, numbers(values_of(codes), scales, factor).astype(np.float64)


def check(command, rng, folder, place):
    """Compares one model; returns the number of rows, of different rows, and the errors relative to rounding to nearest."""
    hidden, inner = 16 * int(rng.integers(2, 10)), 16 * int(rng.integers(2, 10))
    types = ["F32", "F16", "BF16"]
    sizes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    weights, model = {}, {}
    for name, size in sizes.items():
        model[f"{BLOCK}.{name}.weight"], weights[name] = stored(rng.standard_normal(size) / 8, types[rng.integers(3)])
    mixings, recorded, tokens = {}, {}, {}
    # Both projections of the block read the same tokens.
    names = {"gate_proj": [BLOCK, f"{BLOCK}.gate_up_proj.input", "model.layers.*.mlp", "hidden"],
             "down_proj": [f"{BLOCK}.down_proj", f"{BLOCK}.down_proj.weight", "*.down_proj.input"]}  # fmt: skip
    for name, choices in names.items():
        k = sizes[name][1]
        mixings[name] = (np.eye(k) / 2 + rng.standard_normal((k, k)) / np.sqrt(k)) * rng.uniform(0.2, 2, k)
        called = choices[rng.integers(len(choices))]
        recorded[called], tokens[name] = stored(tokens_of(rng, mixings[name], int(rng.integers(4 * k, 8 * k))), types[rng.integers(3)])
    tokens["up_proj"], mixings["up_proj"] = tokens["gate_proj"], mixings["gate_proj"]
    save(folder / "model.safetensors", model)
    left_out = rng.random() < 0.3
    if left_out:
        recorded.popitem()
    if is_folder := rng.random() < 0.5:
        (folder / "recorded").mkdir()
        for index, (name, tensor) in enumerate(recorded.items()):
            save(folder / "recorded" / f"{index}.safetensors", {name: tensor})
    else:
        save(folder / "recorded.safetensors", recorded)

    def quantize(out, *more):
        line = [command, "quantize", "model.safetensors", out, "--json", *more]
        done = subprocess.run(line, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, (place, line, done.stderr)
        return json.loads(done.stdout), load(folder / out)

    rows = different = 0
    ratios = []
    for rule in RULES:
        _, plain = quantize("plain.safetensors", "--scales", rule)
        given = ("--calibrate-hessian", "recorded" if is_folder else "recorded.safetensors")
        report, result = quantize("result.safetensors", "--scales", rule, *given)
        assert bool([note for note in report["notes"] if "1 of 3 weights" in note]) == left_out, (place, report["notes"])
        for weight in report["quantised"]:
            name = weight["module"].rsplit(".", 1)[1]
            codes, scales, factor, got = parts(result, f"{BLOCK}.{name}")
            nearest_codes, nearest_scales, _, rounded = parts(plain, f"{BLOCK}.{name}")
            if left_out and name == "down_proj":
                assert weight["activations"] is None and (codes == nearest_codes).all() and (scales == nearest_scales).all(), place
                continue
            assert weight["activations"] in recorded, (place, weight)
            if rule == "max":
                expected = gptq(weights[name], tokens[name], factor)
                same = (codes == expected[0]).all(-1) & (scales == expected[1]).all(-1)
                rows, different = rows + len(same), different + int((~same).sum())
                pair = max(np.abs(weights[each]).max() for each in (["gate_proj", "up_proj"] if name != "down_proj" else [name]))
                assert factor == scale_of(pair), (place, name)
            others = tokens_of(rng, mixings[name], 64)
            error = lambda quantized: np.linalg.norm(others @ (weights[name] - quantized).T)
            ratios.append(error(got) / error(rounded))
    return rows, different, ratios


def main():
    command = str(pathlib.Path(sys.argv[1]).resolve())
    seed, count = (int(argument) for argument in (sys.argv[2:] + ["0", "20"][len(sys.argv) - 2 :])[:2])
    rows = different = 0
    ratios = []
    for index in range(count):
        with tempfile.TemporaryDirectory() as folder:
            found = check(command, np.random.default_rng([seed, index]), pathlib.Path(folder), (seed, index))
        rows, different, ratios = rows + found[0], different + found[1], ratios + found[2]
    assert different <= 0.01 * rows, f"{different} of {rows} rows differ"
    assert max(ratios) < 1 and np.median(ratios) < 0.9, (max(ratios), np.median(ratios))
    print(f"{count} models: {different} of {rows} rows differ from numpy; errors of products with other tokens are "
          f"{np.median(ratios):.2f} (median), {max(ratios):.2f} (largest) of those after rounding to nearest")  # fmt: skip


if __name__ == "__main__":
    main()
