"""Measures the host time of a call: the operator, its parts, and the library's own launch. Prints medians of 10⁴ calls in µs.

On the CPU a call has no tokens, so only checks and PyTorch's dispatch are timed.
"""

import argparse
import statistics
import time

import torch

import nvfp4


def median(call, repeats, between):
    times = []
    for repeat in range(repeats):
        begin = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - begin)
        if repeat % 64 == 63:
            between()
    return statistics.median(times) / 1e3


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=None, help="16 on a GPU, 0 on the CPU")
    parser.add_argument("--repeats", type=int, default=10_000)
    arguments = parser.parse_args()
    device, (experts, intermediate, hidden, top_k) = arguments.device, (128, 768, 2048, 8)
    tokens = arguments.tokens if arguments.tokens is not None else (16 if device == "cuda" else 0)
    if device == "cpu":
        experts, intermediate, hidden = 8, 16, 16  # the first call prepares the weights
    between = torch.cuda.synchronize if device == "cuda" else (lambda: None)

    def matrix(rows, columns):
        tensor = nvfp4.quantize(torch.randn(rows, columns, device=device))
        return nvfp4.Quantized(*(part.expand(experts, *part.shape).contiguous() for part in tensor))

    layer = nvfp4.Moe(matrix(intermediate, hidden), matrix(intermediate, hidden), matrix(hidden, intermediate))
    states = torch.randn(tokens, hidden, device=device).bfloat16()
    weights, ids = torch.rand(tokens, experts, device=device).topk(min(top_k, experts))
    call = (states, ids.int(), weights)
    out = torch.empty_like(states)
    workspace = torch.empty(layer.workspace_bytes(tokens, top_k), dtype=torch.uint8, device=device)
    operator, native = torch.ops.nvfp4.moe.default, nvfp4._native.moe
    sizes = (layer.weights, layer.experts, layer.intermediate)
    with torch.inference_mode():
        for name, run in {
            "module": lambda: layer(*call),
            "module, out and workspace given": lambda: layer(*call, out=out, workspace=workspace),
            "operator, out and workspace given": lambda: operator(out, *call, *sizes, workspace=workspace),
            "native function, out and workspace given": lambda: native(out, *call, *sizes, workspace=workspace),
            "torch.empty_like, to compare": lambda: torch.empty_like(states),
        }.items():
            median(run, 200, between)
            print(f"{name:42} {median(run, arguments.repeats, between):7.2f} µs", flush=True)


if __name__ == "__main__":
    main()
