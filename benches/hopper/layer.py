"""Measures the library's MoE layer on a Hopper GPU side by side with what else computes one from NVFP4 weights there.

    python3 layer.py --binary hopper --packages folder --out result.json
    python3 layer.py --binary hopper --packages folder --models qwen3-30b --tokens 1 8 --out part.json

As `run.py` does it: one process holds the peers, the release binary the layer, rounds alternate between all
contenders. A point is a model, a number of tokens and a routing (`layers.py`); weights are prepared once for a model.
What several calls measured is one result again by `layer_report.py --merge`.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import layer_report
from kernels import Kernels
from layer_inputs import Step, Weights, layer_error
from layers import MODELS, NVFP4, ROUTINGS, TOKENS, Model, Point, points
from measure import WARM_UP, Contender, alternate, captured, conditions, copy_rate, fastest, summary
from peers import Unavailable, layer_humming, layer_marlin, layer_scaled, layer_torch, vllm

PEERS = ("marlin", "humming", "torch", "compiled", "scaled")
# The copies of all experts that a point hits hold at least this many times the L2 cache.
ROTATED = 3
# Bytes of a weight where it is not NVFP4.
ELEMENTS = {"torch": layer_torch.ELEMENT, "compiled": layer_torch.ELEMENT, "scaled": layer_scaled.ELEMENT}
# A peer whose output is further from the reference is wrong; right ones, with bf16 between the products, reach 0.007.
LARGEST_ERROR = 1e-2
# Of the one that computes with other weights.
LARGEST_ERRORS = {"scaled": layer_scaled.LARGEST_ERROR}
# Rounds, and runs of a round; the second for points whose slowest contender takes longer than so many µs.
ROUNDS = (6, 20)
LONG, LONG_ROUNDS = 1000, (4, 8)


class Peers:
    """All peers' layers of a model, and why others are not there."""

    def __init__(self, model: Model, of: list[Point], names: list[str], rotate_bytes: int) -> None:
        self.rotate_bytes = rotate_bytes
        self.weights = Weights(model)
        self.layers: dict[str, Any] = {}
        self.missing: dict[str, str] = {}

        def copies(element: float) -> int:
            return max(point.copies(rotate_bytes, element) for point in of)

        def humming() -> layer_humming.Layer:
            layer = layer_humming.Layer(self.weights, copies(layer_humming.ELEMENT))
            layer.compile(model, sorted({point.tokens for point in of}))
            return layer

        makers: dict[str, Callable[[], Any]] = {
            "marlin": lambda: layer_marlin.Layer(self.weights, copies(layer_marlin.ELEMENT)),
            "humming": humming,
            "torch": lambda: layer_torch.Eager(self.weights, copies(layer_torch.ELEMENT)),
            "compiled": lambda: layer_torch.Compiled(
                self.layers.get("torch") or layer_torch.Eager(self.weights, copies(layer_torch.ELEMENT))
            ),
            "scaled": lambda: layer_scaled.Layer(self.weights, copies(layer_scaled.ELEMENT)),
        }
        for name in names:
            start = time.perf_counter()
            try:
                self.layers[name] = makers[name]()
                torch.cuda.synchronize()
            except Exception as why:  # whatever a peer's package raises, the others are measured
                self.missing[name] = reason(why)
            print(f"{model.name}: {name} ready in {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)

    def contenders(self, point: Point) -> tuple[dict[str, Contender], dict[str, Any]]:
        """Peers ready to run, each launch by launch and as a CUDA graph, and what a result says of them."""
        step = Step.of(point)
        reference, checked = step.reference(self.weights), step.checked()
        contenders: dict[str, Contender] = {}
        said: dict[str, Any] = {"relative_errors": {}, "missing": dict(self.missing), "ways": {}}
        for name, layer in self.layers.items():
            start = time.perf_counter()
            element, largest_error = ELEMENTS.get(name, NVFP4), LARGEST_ERRORS.get(name, LARGEST_ERROR)
            try:
                ways = layer.candidates(step, point.copies(self.rotate_bytes, element))
                right: dict[str, tuple[list[Any], list[Any]]] = {}
                for way, runs in ways.items():
                    graphs = [captured(run) for run in runs]
                    errors = [layer_error(run, checked, reference) for run in (*runs, *graphs)]
                    said["relative_errors"][f"{name} {way}".strip()] = max(
                        errors, key=lambda error: (error != error, error)
                    )
                    if all(error <= largest_error for error in errors):
                        right[way] = (runs, graphs)
                if not right:
                    raise ValueError(f"its output is wrong: relative errors {said['relative_errors']}")
                way = (
                    list(right)[fastest([graphs for _, graphs in right.values()])]
                    if len(right) > 1
                    else next(iter(right))
                )
                if way:
                    said["ways"][name] = way
                contenders[name], contenders[f"{name},graph"] = (Contender(runs) for runs in right[way])
            except Exception as why:  # as above
                said["missing"][name] = reason(why)
            seconds = time.perf_counter() - start
            if seconds > 2:
                print(f"  {point.name}: {name} took {seconds:.1f} s to prepare", file=sys.stderr, flush=True)
        return contenders, said


def reason(why: Exception) -> str:
    """Why something cannot be measured; with a traceback on standard error unless it is a package that is missing."""
    if isinstance(why, Unavailable):
        return str(why)
    traceback.print_exception(why)
    return f"{type(why).__name__}: {why}"[:300]


def measure(
    point: Point, peers: Peers, kernels: Kernels | None, formats: list[str], copy: float, folder: Path
) -> dict[str, Any]:
    """Times of all contenders at a point, the library's with its tokens in these formats."""
    ways = [way for format_ in formats for way in layer_report.WAYS[format_]]
    if kernels:
        kernels.ask(
            command="layer_tokens",
            tokens=point.tokens,
            **point.write(folder),
            copies=point.copies(peers.rotate_bytes, NVFP4),
            check=sorted({0, point.tokens - 1}),
        )
    # The binary leaves the GPU alone while peers time which of their ways is the fastest.
    ready, said = peers.contenders(point)

    def own(kernel: str, runs: int) -> list[float]:
        assert kernels
        return kernels.ask(command="round", kernel=kernel, runs=WARM_UP + runs)["us"][WARM_UP:]

    contenders: dict[str, Callable[[int], list[float]]] = {}
    if kernels:
        contenders |= {name: functools.partial(own, name) for name in ways}
    contenders |= {name: contender.round for name, contender in ready.items()}
    slowest = max((statistics.median(round_(3)) for round_ in contenders.values()), default=0.0)
    rounds, runs = LONG_ROUNDS if slowest > LONG else ROUNDS
    times = alternate({name: functools.partial(round_, runs) for name, round_ in contenders.items()}, rounds)
    host = {name: kernels.ask(command="host", kernel=name, runs=50) for name in ways} if kernels else {}
    return {
        "model": point.model.name,
        "routing": point.routing,
        "tokens": point.tokens,
        "rows": sum(point.counts()),
        "hit": point.hit,
        "bytes": point.weight_bytes(NVFP4),
        "operations": point.operations,
        "copy_bytes_per_second": copy,
        "rounds": rounds,
        "us": {name: summary(us) for name, us in times.items()},
        **said,
        "host_us": {name: summary(answer["us"]) for name, answer in host.items()},
        "launches": {name: answer["launches"] for name, answer in host.items()},
    }


def arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--binary", help="release build of `nvfp4-benches`' binary; without it, the peers alone")
    parser.add_argument("--packages", help="folder with vLLM's wheel and humming-kernels")
    parser.add_argument("--note", default="", help="kept with the result: the commit of the binary, say")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS, metavar="MODEL")
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), metavar="T")
    parser.add_argument("--routings", nargs="+", default=list(ROUTINGS), choices=ROUTINGS, metavar="ROUTING")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS, metavar="PEER", help=", ".join(PEERS))
    parser.add_argument(
        "--token-formats", nargs="+", default=["16-bit"], choices=layer_report.WAYS, metavar="FORMAT",
        help=f"as what the library's layer multiplies its tokens: {', '.join(layer_report.WAYS)}",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, help="where the result goes, as JSON")
    return parser.parse_args()


def main() -> None:
    """Runs everything and writes the result after every point."""
    args = arguments()
    torch.set_grad_enabled(False)
    if args.packages:
        sys.path.append(args.packages)
    try:
        vllm.load(args.packages)
    except (Unavailable, OSError) as why:
        print(f"vllm: {why}", file=sys.stderr)
    rotate_bytes = ROTATED * torch.cuda.get_device_properties(0).L2_cache_size
    result: dict[str, Any] = {"conditions": [conditions(args.note)], "points": {}}
    kernels = Kernels(args.binary) if args.binary else None
    for name in args.models:
        model = MODELS[name]
        start = time.perf_counter()
        # Before every model again, since clocks differ from minute to minute.
        copy = statistics.median(copy_rate())
        torch.cuda.empty_cache()
        of = points(model, args.tokens, args.routings)
        if not of:
            continue
        if kernels:
            kernels.send(
                command="layer_weights", hidden=model.hidden, intermediate=model.intermediate, experts=model.experts,
                first=model.first, local=model.local, k=model.k, dtype="bf16",
                copies=max(point.copies(rotate_bytes, NVFP4) for point in of), token_formats=args.token_formats,
            )  # fmt: skip
        peers = Peers(model, of, args.peers, rotate_bytes)
        if kernels:
            kernels.answer()
        with tempfile.TemporaryDirectory() as folder:
            # All routings of a number of tokens behind one another: they have the same code.
            for point in sorted(of, key=lambda point: point.tokens):
                begin = time.perf_counter()
                measured = measure(point, peers, kernels, args.token_formats, copy, Path(folder))
                result["points"][point.name] = measured
                gc.collect()
                torch.cuda.empty_cache()
                if args.out:
                    args.out.write_text(json.dumps(result, indent=1) + "\n")
                print(layer_report.line(measured, time.perf_counter() - begin), file=sys.stderr, flush=True)
        del peers
        if kernels:
            kernels.ask(command="layer_drop")
        gc.collect()
        torch.cuda.empty_cache()
        print(f"{name}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    print(layer_report.text(result))


if __name__ == "__main__":
    main()
