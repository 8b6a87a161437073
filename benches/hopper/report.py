"""Prints a result of `run.py` as a table with its goals. Needs only the JSON, no GPU.

python3 report.py result.json
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

KERNEL = "gated_sm90"
KERNEL_GRAPH = f"{KERNEL},graph"
# Prefix of the library's own contenders, which are not peers.
OWN = "gated_"
# This contender reads another checkpoint than the kernel. It is measured, but is not a peer.
OTHER_CHECKPOINT = "torch fp8"
AGAINST_PEERS = ("moe-1", "moe-2", "moe-3", "moe-4", "decode-1", "decode-4", "decode-16")
PEER_RATIO = 1.5
OF_COPY = ("decode-1", "decode-4")
COPY_SHARE = 0.75
OF_F16 = ("moe-1",)
F16_SHARE = 0.65


def geomean(values: Iterable[float]) -> float:
    """Returns the geometric mean.

    >>> round(geomean([1.0, 4.0]), 3)
    2.0
    """
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def median(shape: dict[str, Any], name: str) -> float:
    """Returns a contender's microseconds."""
    return shape["us"][name]["median"]


def best_peer(shape: dict[str, Any]) -> str | None:
    """Returns the fastest contender that reads the same checkpoint and is not the library's."""
    peers = [name for name in shape["us"] if not name.startswith(OWN) and name != OTHER_CHECKPOINT]
    return min(peers, key=lambda name: median(shape, name), default=None)


def ratio(shape: dict[str, Any]) -> float | None:
    """Returns the best peer's time relative to the kernel's."""
    peer = best_peer(shape)
    return median(shape, peer) / median(shape, KERNEL) if peer else None


def copy_share(result: dict[str, Any], shape: dict[str, Any]) -> float:
    """Returns the kernel's rate of bytes read and written, relative to the copy's rate."""
    return shape["bytes"] / (median(shape, KERNEL) * 1e-6) / result["ceilings"]["copy_bytes_per_second"]


def f16_share(result: dict[str, Any], shape: dict[str, Any]) -> float:
    """Returns the kernel's rate of operations, relative to the f16 product's rate."""
    return shape["operations"] / (median(shape, KERNEL) * 1e-6) / result["ceilings"]["f16_operations_per_second"]


def goals(result: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Returns name, reached value and required value of each goal whose shapes were all measured."""
    shapes = result["shapes"]
    found = []
    if all(name in shapes and best_peer(shapes[name]) for name in AGAINST_PEERS):
        reached = geomean(ratio(shapes[name]) or 0.0 for name in AGAINST_PEERS)
        found.append(("best peer / kernel, geometric mean of moe-* and decode-*", reached, PEER_RATIO))
    for name in OF_COPY:
        if name in shapes:
            found.append((f"share of copy bandwidth at {name}", copy_share(result, shapes[name]), COPY_SHARE))
    for name in OF_F16:
        if name in shapes:
            found.append((f"share of the f16 matrix rate at {name}", f16_share(result, shapes[name]), F16_SHARE))
    return found


def print_merged(
    doc: str | None, text: Callable[[dict[str, Any]], str], merged: Callable[[list[dict[str, Any]]], dict[str, Any]]
) -> None:
    """Runs a report's command: merges the given results, prints the report, and writes the merged result."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n", 1)[0])
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--merge", type=Path, metavar="FILE", help="write all results as one to this file")
    args = parser.parse_args()
    result = merged([json.loads(path.read_text()) for path in args.results])
    if args.merge:
        args.merge.write_text(json.dumps(result, indent=1) + "\n")
    print(text(result))


def columns(rows: list[list[str]]) -> str:
    """Aligns rows of text: the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for first, *others in rows:
        lines.append(
            [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        )
    return "\n".join("  ".join(line).rstrip() for line in lines)


def table(result: dict[str, Any]) -> str:
    """Returns a table with one row per shape: microseconds of every contender, then the kernel's rates and shares."""
    names: list[str] = []
    for shape in result["shapes"].values():
        names += [name for name in shape["us"] if name not in names]
    rows = [["µs", *names, "best/kernel", "TFLOP/s", "GB/s", "of f16", "of copy"]]
    for title, shape in result["shapes"].items():
        seconds = median(shape, KERNEL) * 1e-6
        times = [f"{median(shape, name):.1f}" if name in shape["us"] else "–" for name in names]
        compared = ratio(shape)
        rows.append(
            [
                title,
                *times,
                f"{compared:.2f}" if compared else "–",
                f"{shape['operations'] / seconds / 1e12:.0f}",
                f"{shape['bytes'] / seconds / 1e9:.0f}",
                f"{f16_share(result, shape):.0%}",
                f"{copy_share(result, shape):.0%}",
            ]
        )
    return columns(rows)


def means(result: dict[str, Any]) -> str:
    """Returns each contender's time relative to the kernel's, as geometric means of families of shapes."""
    families = {title.rsplit("-", 1)[0]: None for title in result["shapes"]}
    names = [name for name in next(iter(result["shapes"].values()))["us"] if name != KERNEL]
    rows = [["times the kernel's", *names]]
    for family in families:
        shapes = [shape for title, shape in result["shapes"].items() if title.rsplit("-", 1)[0] == family]
        cells = []
        for name in names:
            there = all(name in shape["us"] for shape in shapes)
            mean = geomean(median(shape, name) / median(shape, KERNEL) for shape in shapes) if there else None
            cells.append(f"{mean:.2f}" if mean else "–")
        rows.append([f"{family}-*", *cells])
    return columns(rows)


def text(result: dict[str, Any]) -> str:
    """Returns the whole report."""
    made = result["conditions"]
    ceilings = result["ceilings"]
    lines = [
        f"{made['gpu']}; torch {made['torch']}, triton {made['triton']}; {made['date']}; {made['note']}",
        f"copy {ceilings['copy_bytes_per_second'] / 1e12:.2f} TB/s read plus written, "
        f"f16 product {ceilings['f16_operations_per_second'] / 1e12:.0f} TFLOP/s; "
        f"medians of {result['rounds']} × {result['runs']} runs",
        "",
        table(result),
        "",
        means(result),
        "",
    ]
    for what, reached, wanted in goals(result):
        lines.append(f"{what}: {reached:.2f}, goal {wanted:.2f}: {'met' if reached >= wanted else 'missed'}")
    if any(OTHER_CHECKPOINT in shape["us"] for shape in result["shapes"].values()):
        lines.append(f"{OTHER_CHECKPOINT}: another checkpoint with less exact numbers, not counted as a peer")
    for title, shape in result["shapes"].items():
        lines += [f"{title}: {name} not measured: {why}" for name, why in shape["missing"].items()]
    for kernel in dict.fromkeys(name for shape in result["shapes"].values() for name in shape["host_us"]):
        shapes = [shape for shape in result["shapes"].values() if kernel in shape["host_us"]]
        us = [shape["host_us"][kernel]["median"] for shape in shapes]
        launches = max(shape["launches"][kernel] for shape in shapes)
        lines.append(f"{kernel}: launches per run {launches}, host time per run {min(us):.1f} to {max(us):.1f} µs")
    return "\n".join(lines)


if __name__ == "__main__":
    print(text(json.loads(Path(sys.argv[1]).read_text())))
