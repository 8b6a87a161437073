"""Measures the library's linear layers on a Hopper GPU beside other implementations of a product with one matrix.

    python3 linear.py --binary hopper --marlin _moe_C_stable_libtorch.abi3.so --packages folder --out result.json

It works like `run.py`, with the same peers: one process runs the peers, the release binary runs the layers, and rounds
alternate between all contenders.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import field
import field_report
import linear_report
from inputs import Problem
from kernels import Kernels
from layers import NVFP4
from measure import WARM_UP, alternate, conditions, copy_rate, f16_rate, summary
from peers import Unavailable, marlin
from run import ROTATED, prepare_peers

PEERS = ("torch bf16", "torch fp8", "marlin", "humming")
# N x K of projections of models.
MATRICES = ("4096x7168", "7168x2048", "5120x5120")
TOKENS = (1, 4, 16, 64, 256, 512, 4096)
ROUNDS, RUNS = 6, 20


def measure(
    kernels: Kernels, matrix: str, tokens: int, rotate_bytes: int, rates: dict[str, float], args: argparse.Namespace
) -> dict[str, Any]:
    """Returns the times of all contenders on a matrix with `tokens` tokens, and the card's `rates`."""
    n, k = (int(size) for size in matrix.split("x"))
    names = [linear_report.OWN[format_] for format_ in args.token_formats]
    kernels.send(command="linear", m=tokens, n=n, k=k, token_formats=args.token_formats, rotate_bytes=rotate_bytes)
    problem = Problem(f"{matrix} {tokens}", "plain", "gaussian", (tokens,), n, k)
    peers, errors, missing = prepare_peers(problem, rotate_bytes, args.peers)
    kernels.answer()

    def own(name: str) -> list[float]:
        return kernels.ask(command="round", kernel=name, runs=WARM_UP + RUNS)["us"][WARM_UP:]

    contenders: dict[str, Callable[[], list[float]]] = {name: functools.partial(own, name) for name in names}
    contenders |= {name: functools.partial(peer.round, RUNS) for name, peer in peers.items()}
    times = alternate(contenders, ROUNDS)
    host = {name: kernels.ask(command="host", kernel=name, runs=50) for name in names}
    return {
        "n": n,
        "k": k,
        "tokens": tokens,
        "bytes": round(n * k * NVFP4 + 2 * tokens * (n + k)),
        "operations": 2 * tokens * n * k,
        **rates,
        "us": {name: summary(us) for name, us in times.items()},
        "relative_errors": errors,
        "missing": missing,
        "host_us": {name: summary(answer["us"]) for name, answer in host.items()},
    }


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--binary", required=True, help="release build of `nvfp4-benches`' binary")
    parser.add_argument("--marlin", help="vLLM's _moe_C_stable_libtorch.abi3.so")
    parser.add_argument("--packages", help="folder with more Python packages, for instance humming-kernels")
    parser.add_argument("--note", default="", help="stored with the result, for example the binary's commit")
    parser.add_argument("--matrices", nargs="+", default=list(MATRICES), metavar="NxK")
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), metavar="M")
    parser.add_argument(
        "--field", choices=field.MATRICES, help="a half of the field (field.py), instead of matrices and tokens"
    )
    parser.add_argument("--part", default="1/1", metavar="I/N", help="the field's I-th of N parts")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS, metavar="PEER", help=", ".join(PEERS))
    parser.add_argument(
        "--token-formats", nargs="+", default=list(linear_report.OWN), choices=linear_report.OWN, metavar="FORMAT",
        help=f"token formats of the library's layer: {', '.join(linear_report.OWN)}",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, help="file for the result, as JSON")
    return parser.parse_args()


def main() -> None:
    """Measures all points and writes the result after every point."""
    args = arguments()
    torch.set_grad_enabled(False)
    if args.packages:
        sys.path.append(args.packages)
    try:
        marlin.load(args.marlin)
    except (Unavailable, OSError) as why:
        print(f"marlin: {why}", file=sys.stderr)
    rotate_bytes = ROTATED * torch.cuda.get_device_properties(0).L2_cache_size
    result: dict[str, Any] = {"conditions": conditions(args.note), "runs": ROUNDS * RUNS, "points": {}}
    kernels = Kernels(args.binary)
    pairs = [(matrix, tokens) for matrix in args.matrices for tokens in args.tokens]
    if args.field:
        pairs = field.part(field.MATRICES[args.field], args.part)
    for matrix, of in itertools.groupby(pairs, key=lambda pair: pair[0]):
        # Measured before every matrix, because clocks vary from minute to minute.
        rates = {
            "copy_bytes_per_second": statistics.median(copy_rate()),
            "f16_operations_per_second": statistics.median(f16_rate()),
        }
        torch.cuda.empty_cache()
        for _, tokens in of:
            start = time.perf_counter()
            result["points"][f"{matrix} {tokens}"] = measure(kernels, matrix, tokens, rotate_bytes, rates, args)
            gc.collect()
            torch.cuda.empty_cache()
            if args.out:
                args.out.write_text(json.dumps(result, indent=1) + "\n")
            print(f"{matrix} {tokens}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    print(field_report.text(field_report.merged([result])) if args.field else linear_report.text(result))


if __name__ == "__main__":
    main()
