"""Measures the library's MoE layer on a Hopper GPU beside other implementations with NVFP4 weights.

    python3 layer.py --binary hopper --packages folder --out result.json
    python3 layer.py --binary hopper --packages folder --models qwen3-30b --tokens 1 8 --out part.json
    python3 layer.py --binary hopper --packages folder --field held-out --part 1/4 --out field.json

It works like `run.py`: one process runs the peers, the release binary runs the layer, and rounds alternate between all
contenders. A point is a model, a number of tokens and a routing (`layers.py`). Weights are prepared once per model.
`layer_report.py --merge` merges the results of several calls.
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

import field
import field_report
import layer_report
from kernels import Kernels
from layer_inputs import Step, Weights, layer_error
from layers import MODELS, NVFP4, ROUTINGS, TOKENS, Model, Point, draw, points
from measure import WARM_UP, Contender, alternate, captured, conditions, copy_rate, f16_rate, fastest, summary
from peers import LayerPeer, Unavailable, layer_humming, layer_marlin, layer_scaled, layer_torch, vllm

PEERS = ("marlin", "humming", "torch", "compiled", "scaled")
# The copies of all experts that a point hits are at least this many times as large as the L2 cache.
ROTATED = 3
# Bytes per weight of the peers whose weights are not NVFP4.
ELEMENTS = {"torch": layer_torch.ELEMENT, "compiled": layer_torch.ELEMENT, "scaled": layer_scaled.ELEMENT}
# Maximum relative error of a peer. Correct peers, with bf16 between the products, reach 0.007.
LARGEST_ERROR = 1e-2
# Maximum relative error of the peer that computes with other weights.
LARGEST_ERRORS = {"scaled": layer_scaled.LARGEST_ERROR}
# Rounds, and runs per round. The second pair is for points whose slowest contender takes longer than `LONG` µs.
ROUNDS = (6, 20)
LONG, LONG_ROUNDS = 1000, (4, 8)


class Peers:
    """All peers' layers of a model, and the reasons why other peers are missing."""

    def __init__(self, model: Model, of: list[Point], names: list[str], rotate_bytes: int) -> None:
        self.rotate_bytes = rotate_bytes
        self.weights = Weights(model)
        self.layers: dict[str, LayerPeer] = {}
        self.missing: dict[str, str] = {}

        def copies(element: float) -> int:
            return max(point.copies(rotate_bytes, element) for point in of)

        def humming() -> layer_humming.Layer:
            layer = layer_humming.Layer(self.weights, copies(layer_humming.ELEMENT))
            layer.compile(model, sorted({point.tokens for point in of}))
            return layer

        makers: dict[str, Callable[[], LayerPeer]] = {
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
            except Exception as why:  # a peer may raise anything; the other peers are still measured
                self.missing[name] = reason(why)
            print(f"{model.name}: {name} ready in {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)

    def contenders(self, point: Point) -> tuple[dict[str, Contender], dict[str, Any]]:
        """Returns the peers that are ready to run, launch by launch and as a CUDA graph, and fields of the result."""
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
            except Exception as why:  # a peer may raise anything; the other peers are still measured
                said["missing"][name] = reason(why)
            seconds = time.perf_counter() - start
            if seconds > 2:
                print(f"  {point.name}: {name} took {seconds:.1f} s to prepare", file=sys.stderr, flush=True)
        return contenders, said


def reason(why: Exception) -> str:
    """Returns why a peer cannot be measured. Prints a traceback to standard error unless a package is missing."""
    if isinstance(why, Unavailable):
        return str(why)
    traceback.print_exception(why)
    return f"{type(why).__name__}: {why}"[:300]


def measure(
    point: Point, peers: Peers, kernels: Kernels | None, formats: list[str], rates: dict[str, float], folder: Path
) -> dict[str, Any]:
    """Returns the times of all contenders at a point, with the library's layer in these token formats, and `rates`."""
    ways = [way for format_ in formats for way in layer_report.WAYS[format_]]
    if kernels:
        kernels.ask(
            command="layer_tokens",
            tokens=point.tokens,
            **point.write(folder),
            copies=point.copies(peers.rotate_bytes, NVFP4),
            check=sorted({0, point.tokens - 1}),
        )
    # The binary does not use the GPU while the peers choose the fastest of their ways.
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
        **rates,
        "rounds": rounds,
        "us": {name: summary(us) for name, us in times.items()},
        **said,
        "host_us": {name: summary(answer["us"]) for name, answer in host.items()},
        "launches": {name: answer["launches"] for name, answer in host.items()},
    }


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--binary", help="release build of `nvfp4-benches`' binary; omit it to measure only peers")
    parser.add_argument("--packages", help="folder with vLLM's wheel and humming-kernels")
    parser.add_argument("--note", default="", help="stored with the result, for example the binary's commit")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=field.ALL_LAYERS, metavar="MODEL")
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), metavar="T")
    parser.add_argument("--routings", nargs="+", default=list(ROUTINGS), choices=ROUTINGS, metavar="ROUTING")
    parser.add_argument(
        "--field", choices=field.LAYERS, help="a half of the field (field.py), instead of models, tokens and routings"
    )
    parser.add_argument("--part", default="1/1", metavar="I/N", help="the field's I-th of N parts")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS, metavar="PEER", help=", ".join(PEERS))
    parser.add_argument(
        "--token-formats", nargs="+", default=["16-bit"], choices=layer_report.WAYS, metavar="FORMAT",
        help=f"token formats of the library's layer: {', '.join(layer_report.WAYS)}",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, help="file for the result, as JSON")
    return parser.parse_args()


def measured_points(args: argparse.Namespace) -> list[tuple[Model, list[Point]]]:
    """Returns the models with their points."""
    if args.field is None:
        chosen = [(field.ALL_LAYERS[name], args.tokens, args.routings) for name in args.models]
        found = [(model, points(model, tokens, routings)) for model, tokens, routings in chosen]
    else:
        of = field.LAYERS[args.field]
        pairs = field.part(list(of), args.part)
        found = [
            (model, [draw(model, tokens, "uniform") for name, tokens in pairs if name == model.name])
            for model in of.values()
        ]
    return [(model, of) for model, of in found if of]


def main() -> None:
    """Measures all points and writes the result after every point."""
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
    for model, of in measured_points(args):
        start = time.perf_counter()
        # Measured before every model, because clocks vary from minute to minute.
        rates = {
            "copy_bytes_per_second": statistics.median(copy_rate()),
            "f16_operations_per_second": statistics.median(f16_rate()),
        }
        torch.cuda.empty_cache()
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
            # Points with the same number of tokens are consecutive, because their routings share compiled code.
            for point in sorted(of, key=lambda point: point.tokens):
                begin = time.perf_counter()
                measured = measure(point, peers, kernels, args.token_formats, rates, Path(folder))
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
        print(f"{model.name}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    print(field_report.text(result) if args.field else layer_report.text(result))


if __name__ == "__main__":
    main()
