"""Prints a result of `linear.py` as a table with its goals. Needs only the JSON, no GPU.

python3 linear_report.py result.json
python3 linear_report.py --merge all.json first.json second.json
"""

from __future__ import annotations

from typing import Any

from report import OTHER_CHECKPOINT, columns, geomean, median, print_merged

# Names of the library's layer by token format.
OWN = {"16-bit": "linear", "fp8": "linear-fp8"}
# Maximum number of tokens, and minimum time of the best rival relative to the layer's. From 512 tokens on, rivals reach
# the GPU's power limit.
GOALS = ((256, 1.0), (1 << 30, 0.95))

Json = dict[str, Any]


def rivals(point: Json) -> dict[str, float]:
    """Returns each rival's microseconds, without contenders that compute with other weights."""
    return {name: median(point, name) for name in point["us"] if name not in OWN.values() and name != OTHER_CHECKPOINT}


def ratio(point: Json, token_format: str = "16-bit") -> float | None:
    """Returns the best rival's time relative to the layer's."""
    own, times = OWN[token_format], rivals(point)
    return min(times.values()) / median(point, own) if times and own in point["us"] else None


def goal(tokens: int) -> float:
    """Returns the required ratio.

    >>> [goal(tokens) for tokens in (1, 256, 257)]
    [1.0, 1.0, 0.95]
    """
    return next(least for most, least in GOALS if tokens <= most)


def table(result: Json) -> str:
    """Returns a table with one row per point: microseconds of every contender, and the ratio to the best rival."""
    points = result["points"]
    names = list(dict.fromkeys(name for point in points.values() for name in point["us"]))
    rows = [["µs", *names, "best/linear", "goal", "TFLOP/s"]]
    for title, point in points.items():
        compared, operations = ratio(point), 2 * point["tokens"] * point["n"] * point["k"]
        rows.append(
            [
                title,
                *(f"{median(point, name):.1f}" if name in point["us"] else "–" for name in names),
                f"{compared:.2f}" if compared else "–",
                f"{goal(point['tokens']):.2f}",
                f"{operations / median(point, OWN['16-bit']) / 1e6:.0f}" if OWN["16-bit"] in point["us"] else "–",
            ]
        )
    return columns(rows)


def text(result: Json) -> str:
    """Returns the whole report."""
    made = result["conditions"]
    lines = [
        f"{made['gpu']}; torch {made['torch']}, triton {made['triton']}; {made['date']}; {made['note']}",
        f"medians of {result['runs']} runs",
        "",
        table(result),
        "",
    ]
    compared = {title: (goal(point["tokens"]), ratio(point)) for title, point in result["points"].items()}
    for least in dict.fromkeys(least for least, _ in compared.values()):
        of = {title: value for title, (wanted, value) in compared.items() if wanted == least and value}
        if of:
            worst = min(of, key=lambda title: of[title])
            met = "met" if of[worst] >= least else "missed"
            reached = f"least {of[worst]:.2f} ({worst}), geometric mean {geomean(list(of.values())):.2f}"
            lines.append(f"best rival / linear, goal {least:.2f}: {reached}: {met}")
    for title, point in result["points"].items():
        lines += [f"{name} not measured at {title}: {why}" for name, why in point["missing"].items()]
    for name in OWN.values():
        us = [point["host_us"][name]["median"] for point in result["points"].values() if name in point["host_us"]]
        if us:
            lines.append(f"{name}: host time per run {min(us):.1f} to {max(us):.1f} µs")
    return "\n".join(lines)


def merged(results: list[Json]) -> Json:
    """Merges results of one day. Points are in the order of matrices and tokens."""
    points = {name: point for result in results for name, point in result["points"].items()}
    matrices = list(dict.fromkeys(name.split()[0] for name in points))
    order = sorted(points, key=lambda name: (matrices.index(name.split()[0]), points[name]["tokens"]))
    return {**results[0], "points": {name: points[name] for name in order}}


if __name__ == "__main__":
    print_merged(__doc__, text, merged)
