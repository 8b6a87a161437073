"""Compares CPU forwards from PyTorch with the library's own time for the same layer, run by the command `nvfp4`.

Runs alternate, so that other load on the machine affects both. Prints a table of minimum times, and exits with status 1
if a forward takes more than 1.1 times the library's own time plus 30 µs.

    cargo build --release && python python/nvfp4/cpu_time.py target/release/nvfp4
"""

import argparse
import json
import subprocess
import sys
import time

import torch

import nvfp4

# Qwen3-30B-A3B.
EXPERTS, INTERMEDIATE, HIDDEN, TOP_K = 128, 768, 2048, 8
FACTOR, MICROSECONDS = 1.1, 30
ROUNDS = 5


def library(command, operation, tokens):
    """The library's minimum time in µs."""
    arguments = [command, "run", "--backend", "cpu", *operation, "--tokens", str(tokens), "--repeat", "20", "--json"]
    return json.loads(subprocess.run(arguments, check=True, capture_output=True, text=True).stdout)["time_us"]["min"]


def forward(layer, call):
    """The minimum time of a forward in µs."""
    least = float("inf")
    for _ in range(20):
        begin = time.perf_counter_ns()
        layer(*call)
        least = min(least, time.perf_counter_ns() - begin)
    return least / 1e3


def matrices(rows, columns):
    tensor = nvfp4.quantize(torch.randn(rows, columns) / columns**0.5)
    values, scales = (part.expand(EXPERTS, *part.shape).contiguous() for part in tensor[:2])
    return nvfp4.Quantized(values, scales, tensor.global_scale.repeat(EXPERTS))


def moe_call(tokens):
    weights, ids = torch.randn(tokens, EXPERTS).softmax(-1).topk(TOP_K)
    return torch.randn(tokens, HIDDEN).bfloat16(), ids.int(), weights


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", help="path of `nvfp4`, of a release build")
    command = parser.parse_args().command
    gate, up, down = matrices(INTERMEDIATE, HIDDEN), matrices(INTERMEDIATE, HIDDEN), matrices(HIDDEN, INTERMEDIATE)
    moe = nvfp4.Moe(gate, up, down)
    n, k = 4096, 4096
    linear = nvfp4.Linear(nvfp4.quantize(torch.randn(n, k) / k**0.5))
    cases = [
        ("moe", moe, ["--op", "moe", "--shape", "qwen3-30b-a3b"], moe_call),
        ("linear", linear, ["--op", "linear", "--shape", f"16,{n},{k}"], lambda m: (torch.randn(m, k).bfloat16(),)),
    ]
    print(f"{'layer':<8}{'tokens':>8}{'PyTorch, µs':>14}{'library, µs':>14}{'ratio':>8}  goal")
    all_met = True
    for name, layer, operation, make_call in cases:
        for tokens in (1, 8, 64):
            call = make_call(tokens)
            layer(*call)
            ours = theirs = float("inf")
            for _ in range(ROUNDS):
                ours, theirs = min(ours, forward(layer, call)), min(theirs, library(command, operation, tokens))
            met = ours <= FACTOR * theirs + MICROSECONDS
            all_met &= met
            print(f"{name:<8}{tokens:>8}{ours:>14,.0f}{theirs:>14,.0f}{ours / theirs:>8.2f}  {'met' if met else 'NOT met'}")
    sys.exit(0 if all_met else 1)


if __name__ == "__main__":
    main()
