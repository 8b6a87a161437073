"""Measures the library's kernels on a Hopper GPU beside other implementations of NVFP4 grouped GEMMs.

    python3 run.py --binary hopper [--marlin _moe_C_stable_libtorch.abi3.so] [--packages folder] --out result.json

One process runs the peers, the library's release binary runs the kernels. Rounds alternate between all contenders, so
that clocks and other load affect all of them alike. `measure.py` and `benches/src/bin/hopper/` define a time; the
README lists what is not timed. Every contender is checked against an exact reference before its time counts.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import report
from inputs import Inputs, Problem
from kernels import Kernels
from measure import WARM_UP, Contender, alternate, conditions, copy_rate, f16_rate, relative_error, summary
from peers import Peer, Unavailable, humming_wgmma, marlin, torch_bf16, torch_fp8, triton_decode

KERNELS = [report.KERNEL, report.KERNEL_GRAPH, "gated_simt"]
PEERS: dict[str, Peer] = {
    "torch bf16": torch_bf16,
    report.OTHER_CHECKPOINT: torch_fp8,
    "triton": triton_decode,
    "marlin": marlin,
    "humming": humming_wgmma,
}
SHAPES = [f"{kind}-{i}" for kind in ("moe", "dual", "group") for i in range(1, 5)] + [f"decode-{m}" for m in (1, 4, 16)]
# All copies of the weights together are at least this many times as large as the L2 cache.
ROTATED = 3
# Maximum relative error of a peer. bf16 rounds gate, up and product by 2^-9 each.
LARGEST_ERROR = 1e-2


def prepare_peers(
    problem: Problem, rotate_bytes: int, names: list[str]
) -> tuple[dict[str, Contender], dict[str, float], dict[str, str]]:
    """Returns peers ready to run, their errors against the reference, and the reasons why other peers are missing."""
    inputs = Inputs(problem)
    reference = inputs.reference()
    contenders, errors, missing = {}, {}, {}
    for name in names:
        peer = PEERS[name]
        copies = max(2, -(-rotate_bytes // peer.weight_bytes(inputs)))
        try:
            runs = peer.contend(inputs, copies)
            error = max(relative_error(run, reference) for run in runs)
        except Unavailable as why:
            missing[name] = str(why)
            continue
        except Exception as why:  # a peer may raise anything; the other peers are still measured
            traceback.print_exc()
            missing[name] = f"{type(why).__name__}: {why}"[:300]
            continue
        errors[name] = error
        if error <= getattr(peer, "LARGEST_ERROR", LARGEST_ERROR):
            contenders[name] = Contender(runs)
        else:
            missing[name] = f"its output is wrong: relative error {error:.2e}"
    return contenders, errors, missing


def measure_shape(kernels: Kernels, shape: str, rotate_bytes: int, args: argparse.Namespace) -> dict[str, Any]:
    """Returns the times of all contenders on a shape."""
    rounds, runs = args.rounds, args.runs
    sizes = kernels.ask(command="describe", shape=shape)
    kernels.send(command="prepare", shape=shape, kernels=args.kernels, rotate_bytes=rotate_bytes)
    problem = Problem.from_groups(shape, sizes["op"], sizes["input"], sizes["groups"])
    peers, errors, missing = prepare_peers(problem, rotate_bytes, args.peers)
    kernels.answer()

    def kernel_round(kernel: str) -> Callable[[], list[float]]:
        return lambda: kernels.ask(command="round", kernel=kernel, runs=WARM_UP + runs)["us"][WARM_UP:]

    contenders = {kernel: kernel_round(kernel) for kernel in args.kernels}
    contenders |= {name: functools.partial(peer.round, runs) for name, peer in peers.items()}
    times = alternate(contenders, rounds)
    host = {kernel: kernels.ask(command="host", kernel=kernel, runs=100) for kernel in args.kernels}
    return {
        **sizes,
        "us": {name: summary(us) for name, us in times.items()},
        "relative_errors": errors,
        "missing": missing,
        "host_us": {kernel: summary(answer["us"]) for kernel, answer in host.items()},
        "launches": {kernel: answer["launches"] for kernel, answer in host.items()},
    }


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--binary", default="target/release/hopper", help="release build of `nvfp4-benches`' binary")
    parser.add_argument("--marlin", help="vLLM's _moe_C_stable_libtorch.abi3.so")
    parser.add_argument("--packages", help="folder with more Python packages, for instance humming-kernels")
    parser.add_argument("--note", default="", help="stored with the result, for example the binary's commit")
    parser.add_argument(
        "--kernels", nargs="+", default=KERNELS, metavar="VARIANT", help="variants as in `nvfp4 run --variant`"
    )
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS, metavar="PEER", help=", ".join(PEERS))
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="NAME")
    parser.add_argument("--rounds", type=int, default=6, help="rounds per contender")
    parser.add_argument("--runs", type=int, default=20, help="runs per round")
    parser.add_argument("--out", type=Path, help="file for the result, as JSON")
    return parser.parse_args()


def main() -> None:
    """Measures all shapes, writes the result after every shape, and prints the table."""
    args = arguments()
    if args.packages:
        sys.path.append(args.packages)
    try:
        marlin.load(args.marlin)
    except (Unavailable, OSError) as why:
        print(f"marlin: {why}", file=sys.stderr)
    triton_decode.compile_all(min(16, os.cpu_count() or 1))
    rotate_bytes = ROTATED * torch.cuda.get_device_properties(0).L2_cache_size
    ceilings: dict[str, list[float]] = {"copy_bytes_per_second": [], "f16_operations_per_second": []}
    result: dict[str, Any] = {
        "conditions": conditions(args.note),
        "rounds": args.rounds,
        "runs": args.runs,
        "shapes": {},
    }
    kernels = Kernels(args.binary)
    for shape in args.shapes:
        start = time.perf_counter()
        # Measured before every shape, because clocks vary from minute to minute.
        ceilings["copy_bytes_per_second"] += copy_rate()
        ceilings["f16_operations_per_second"] += f16_rate()
        result["ceilings"] = {name: statistics.median(values) for name, values in ceilings.items()}
        result["shapes"][shape] = measure_shape(kernels, shape, rotate_bytes, args)
        gc.collect()
        torch.cuda.empty_cache()
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n")
        print(f"{shape}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    print(report.text(result))


if __name__ == "__main__":
    main()
