#!/usr/bin/env python3
"""Compares the rules of `nvfp4 quantize --scales` with NVIDIA's ModelOpt, byte by byte, and compares their speed.

    modelopt_scales.py PATH/TO/nvfp4

Needs `pip install nvidia-modelopt==0.47.0 huggingface_hub torch` but no GPU. It is not part of CI. The searches are ModelOpt's own
classes (`NVFP4MSECalibrator`, `MseCalibrator` with the multipliers of its four-over-six preset), and so is the rounding
(`NVFP4QTensor`). ModelOpt rounds with a Triton kernel during a search, which needs a GPU; here its `NVFP4QTensor` does that.
A recorded run: benches/lab/measurements/modelopt-scales.txt.

`max` must be equal to the last byte. In the other rules, two scales of a block can have the same error up to the last bits of a
sum of 16 squares, whose order differs. So a different scale passes only if ModelOpt's scale and the command's scale have the same
error within 1e-5.
"""

import json
import pathlib
import struct
import subprocess
import sys
import tempfile
import time

import numpy as np
import torch
from modelopt import __version__ as modelopt_version
from modelopt.torch.quantization.calib.mse import MseCalibrator, NVFP4MSECalibrator
from modelopt.torch.quantization.qtensor import NVFP4QTensor

FP8_MAX = {"max": 448.0, "mse": 448.0, "four-over-six": 256.0}
MODULE = "model.layers.0.mlp.down_proj"
# Alternating runs of both, whose best counts.
ROUNDS = 3


def save(path, weight):
    """Writes a file with one bf16 weight."""
    data = weight.view(torch.int16).numpy().tobytes()
    header = {f"{MODULE}.weight": {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": [0, len(data)]}}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def load(path):
    """Returns the tensors of a file as bytes."""
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    parts = {name: info["data_offsets"] for name, info in header.items()}
    return {name: raw[8 + length + start : 8 + length + end] for name, (start, end) in parts.items()}


def modelopt(weight, rule):
    """Returns ModelOpt's codes, block scales and global scale, and the seconds of the search."""
    n, k = weight.shape
    weight = weight.float()
    global_amax = weight.abs().max()
    double_scale = global_amax / (6.0 * FP8_MAX[rule])
    blocks = weight.view(-1, 16)
    amax = blocks.abs().amax(dim=1)

    def scales(amax):
        scale = amax / 6.0
        scale[scale == 0] = 1.0
        return NVFP4QTensor._cast_per_block_scale_to_fp8(scale, global_amax / 6.0, FP8_MAX[rule])

    def rounded(x, amax):
        scale = scales(amax).view(-1, 1)
        quantized, _, _ = NVFP4QTensor.quantize(x.clone(), 16, scale, double_scale)
        return quantized.dequantize(torch.float32, scale=scale, double_scale=double_scale, block_sizes={-1: 16})

    seconds = 0.0
    if rule == "max":
        scale, _ = NVFP4QTensor.get_weights_scaling_factor(weight, 16, double_scale)
    else:
        if rule == "mse":
            search = NVFP4MSECalibrator(amax, global_amax, axis=0, quant_func=rounded)
        else:
            multipliers = dict(start_multiplier=1.0, stop_multiplier=1.5, step_size=0.5)
            search = MseCalibrator(amax, axis=0, quant_func=rounded, **multipliers)
        start = time.perf_counter()
        search.collect(blocks)
        best = search.compute_amax()
        seconds = time.perf_counter() - start
        scale = scales(best).view(n, k // 16)
    quantized, _, _ = NVFP4QTensor.quantize(weight.clone(), 16, scale, double_scale)
    return quantized._quantized_data.numpy(), scale.view(torch.uint8).numpy(), double_scale.item(), seconds


def block_errors(weight, codes, scales, double_scale):
    """Returns the squared error of each block in f64."""
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    numbers = np.stack([values[codes & 15], values[codes >> 4]], -1).reshape(-1, 16)
    factors = torch.from_numpy(scales.copy()).view(torch.float8_e4m3fn).double().numpy().reshape(-1, 1) * double_scale
    return ((numbers * factors - weight.double().numpy().reshape(-1, 16)) ** 2).sum(1)


def weights():
    """Yields names and bf16 matrices."""
    torch.manual_seed(1)
    gaussian = torch.randn(128, 1024)
    yield "Gaussian", gaussian * 0.02
    yield "heavy tails", torch.distributions.StudentT(3.0).sample((128, 1024)) * 0.02
    outliers = gaussian.clone()
    outliers[:, ::97] *= 40
    yield "outlier columns", outliers
    zeros = gaussian.clone()
    zeros[:, 32:256] = 0
    yield "blocks of zeros", zeros
    yield "small numbers", gaussian * 1e-6 * (10.0 ** torch.randint(-4, 5, (128, 1024)))


def quantize(nvfp4, folder, weight, rule):
    """Returns the command's codes, block scales and global scale."""
    save(folder / "in.safetensors", weight)
    line = [nvfp4, "quantize", "in.safetensors", "out.safetensors", "--scales", rule, "--quiet"]
    subprocess.run(line, cwd=folder, check=True)
    tensors = load(folder / "out.safetensors")
    n, k = weight.shape
    codes = np.frombuffer(tensors[f"{MODULE}.weight"], np.uint8).reshape(n, k // 2)
    scales = np.frombuffer(tensors[f"{MODULE}.weight_scale"], np.uint8).reshape(n, k // 16)
    return codes, scales, np.frombuffer(tensors[f"{MODULE}.weight_scale_2"], np.float32)[0]


def compare(nvfp4, folder):
    """Compares all rules; returns whether they agree."""
    agree = True
    for name, weight in weights():
        weight = weight.bfloat16()
        for rule in FP8_MAX:
            codes, scales, double_scale, _ = modelopt(weight, rule)
            got_codes, got_scales, got_double = quantize(nvfp4, folder, weight, rule)
            same = (codes.reshape(-1, 8) == got_codes.reshape(-1, 8)).all(1) & (scales.ravel() == got_scales.ravel())
            is_, got = (block_errors(weight, *parts) for parts in ((codes, scales, double_scale), (got_codes, got_scales, got_double)))
            error = np.sqrt(got.sum() / (weight.double().numpy() ** 2).sum())
            tied = np.isclose(is_, got, rtol=1e-5, atol=0)
            passed = np.float32(double_scale) == got_double and (same | (tied & (rule != "max"))).all()
            agree &= bool(passed)
            print(
                f"{name:16} {rule:14} equal blocks {same.mean():9.5%}, others of equal error {(tied & ~same).sum():5},"
                f" relative error {error:.4%} {'ok' if passed else 'FAILED'}"
            )
    return agree


def speed(nvfp4, folder):
    """Prints the best of several alternating runs: numbers per second of each search, and bytes per second from file to file."""
    small, large = (torch.randn(n, k).bfloat16() * 0.02 for n, k in ((256, 1024), (8192, 8192)))
    save(folder / "in.safetensors", large)
    best = {}
    for _ in range(ROUNDS):
        for rule in FP8_MAX:
            if rule != "max":
                *_, seconds = modelopt(small, rule)
                best["ModelOpt", rule] = max(best.get(("ModelOpt", rule), 0), small.numel() / seconds)
            line = [nvfp4, "quantize", "in.safetensors", "out.safetensors", "--scales", rule, "--quiet"]
            start = time.perf_counter()
            subprocess.run(line, cwd=folder, check=True)
            best["nvfp4", rule] = max(best.get(("nvfp4", rule), 0), large.numel() / (time.perf_counter() - start))
    for rule in FP8_MAX:
        ours, theirs = best["nvfp4", rule], best.get(("ModelOpt", rule))
        beside = f"; ModelOpt's search {theirs / 1e6:.3f} million, {ours / theirs:.1f} times" if theirs else ""
        print(f"{rule:14} {ours / 1e6:.1f} million numbers per second, file to file ({2 * ours / 1e9:.2f} GB/s read){beside}")


def main():
    nvfp4 = str(pathlib.Path(sys.argv[1]).resolve())
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        agree = compare(nvfp4, folder)
        print(f"modelopt {modelopt_version}, torch {torch.__version__}, {torch.get_num_threads()} threads")
        speed(nvfp4, folder)
    sys.exit(0 if agree else 1)


if __name__ == "__main__":
    main()
