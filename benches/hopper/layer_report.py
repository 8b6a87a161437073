"""Prints a result of `layer.py` as tables with its goals. Needs only the JSON, no GPU.

python3 layer_report.py result.json
python3 layer_report.py --merge all.json first.json second.json
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from report import columns, geomean, median, print_merged

# Names of the library's layer by token format: launch by launch, and as a CUDA graph.
WAYS = {"16-bit": ("layer", "layer-graph"), "fp8": ("layer-fp8", "layer-fp8-graph")}
# The token format that loses no accuracy.
OWN = WAYS["16-bit"]
# This contender computes with the weights of another checkpoint. It is not a rival, but a comparison for FP8 tokens.
OTHER_CHECKPOINT = "scaled"
FEW_TOKENS, MANY_TOKENS = 512, 2048
FEW_RATIO, MANY_RATIO, LEAST_RATIO = 1.35, 1.05, 0.97
# Required speed of FP8 tokens relative to 16-bit tokens.
FP8_RATIO = 1.4
# Goal of steps with up to `DECODE_TOKENS` tokens: µs, and the share of a copy's bandwidth at which weights are read.
DECODE_TOKENS, DECODE_US, COPY_SHARE = 8, 12.0, 0.92
NOTHING_US = 8.0
# Maximum number of points that a line names. A line with more points has only their number.
MOST_TITLES = 4

Json = dict[str, Any]


def rival(name: str) -> str:
    """Returns a contender's name without the way it is launched.

    >>> rival("marlin,graph"), rival("marlin")
    ('marlin', 'marlin')
    """
    return name.removesuffix(",graph")


def own(point: Json, token_format: str = "16-bit") -> float | None:
    """Returns the layer's microseconds, the faster of its ways."""
    return min((median(point, name) for name in WAYS[token_format] if name in point["us"]), default=None)


def is_rival(name: str) -> bool:
    """Whether a contender computes the same operation as the layer.

    >>> [is_rival(name) for name in ("torch", "marlin,graph", "layer", "layer-fp8-graph", "scaled,graph")]
    [True, True, False, False, False]
    """
    return rival(name) != OTHER_CHECKPOINT and not any(name in ways for ways in WAYS.values())


def rivals(point: Json) -> dict[str, float]:
    """Returns each rival's microseconds, the faster of its ways."""
    best: dict[str, float] = {}
    for name in point["us"]:
        if is_rival(name):
            us = median(point, name)
            best[rival(name)] = min(us, best.get(rival(name), us))
    return best


def best_rival(point: Json) -> str | None:
    """Returns the name of the fastest rival."""
    times = rivals(point)
    return min(times, key=lambda name: times[name], default=None)


def ratio(point: Json) -> float | None:
    """Returns the best rival's time relative to the layer's."""
    us, name = own(point), best_rival(point)
    return rivals(point)[name] / us if us and name else None


def allowed_us(point: Json) -> float:
    """Returns the time allowed for a step of few tokens: a fixed time, plus the time to read the hit experts."""
    return DECODE_US + point["bytes"] / (COPY_SHARE * point["copy_bytes_per_second"]) * 1e6


def goals(result: Json) -> list[tuple[str, float, float, bool]]:
    """Returns name, reached value, required value and verdict of each goal that was measured."""
    points = result["points"]
    # Points without a hit expert compute nothing, and have a separate goal.
    compared = {name: ratio(point) for name, point in points.items() if point["hit"]}
    ratios = {name: value for name, value in compared.items() if value}
    found = []
    for what, least, chosen in (
        (f"at most {FEW_TOKENS} tokens", FEW_RATIO, lambda tokens: tokens <= FEW_TOKENS),
        (f"at least {MANY_TOKENS} tokens", MANY_RATIO, lambda tokens: tokens >= MANY_TOKENS),
    ):
        of = [value for name, value in ratios.items() if chosen(points[name]["tokens"])]
        if of:
            mean = geomean(of)
            found.append(
                (f"best rival / layer, geometric mean of {len(of)} points of {what}", mean, least, mean >= least)
            )
    if ratios:
        name = min(ratios, key=lambda name: ratios[name])
        found.append((f"best rival / layer, least ({name})", ratios[name], LEAST_RATIO, ratios[name] >= LEAST_RATIO))
    for name, point in points.items():
        us = own(point)
        if us is None:
            continue
        if point["hit"] == 0:
            found.append((f"µs at {name}, no expert hit, at most", us, NOTHING_US, us <= NOTHING_US))
        elif point["tokens"] <= DECODE_TOKENS and point["routing"] == "uniform":
            most = allowed_us(point)
            found.append((f"µs at {name}, at most", us, most, us <= most))
    return found


def names(points: Iterable[Json]) -> list[str]:
    """Returns the names of all rivals, in the order in which they were measured."""
    return list(dict.fromkeys(rival(name) for point in points for name in point["us"] if is_rival(name)))


def line(point: Json, seconds: float) -> str:
    """Returns a point as one line of progress."""
    times = "  ".join(f"{name} {measured['median']:.1f}" for name, measured in point["us"].items())
    return f"{point['model']} {point['routing']} {point['tokens']}: {times} µs ({seconds:.1f} s)"


def table(result: Json) -> str:
    """Returns a table with one row per point: microseconds of the layer and of each rival, then ratios and rates."""
    of = names(result["points"].values())
    rows = [["µs", "layer", *of, "best/layer", "TB/s", "TFLOP/s"]]
    models = list(dict.fromkeys(point["model"] for point in result["points"].values()))
    for title, point in sorted(
        result["points"].items(),
        key=lambda item: (models.index(item[1]["model"]), item[1]["routing"], item[1]["tokens"]),
    ):
        us, times, compared = own(point), rivals(point), ratio(point)
        rows.append(
            [
                title,
                f"{us:.1f}" if us else "–",
                *(f"{times[name]:.1f}" if name in times else "–" for name in of),
                f"{compared:.2f}" if compared else "–",
                f"{point['bytes'] / us / 1e6:.2f}" if us else "–",
                f"{point['operations'] / us / 1e6:.0f}" if us else "–",
            ]
        )
    return columns(rows)


def fp8_ratio(point: Json) -> float | None:
    """Returns the layer's time with 16-bit tokens relative to its time with FP8 tokens."""
    us, fp8 = own(point), own(point, "fp8")
    return us / fp8 if us and fp8 else None


def fp8_table(result: Json) -> str:
    """Returns a table with one row per point with FP8 tokens, beside 16-bit tokens and beside an FP8 checkpoint."""
    rows = [["µs", "16-bit tokens", "FP8 tokens", "16-bit/FP8", "FP8 checkpoint", "checkpoint/FP8", "TFLOP/s"]]
    for title, point in result["points"].items():
        us, fp8, compared = own(point), own(point, "fp8"), fp8_ratio(point)
        if fp8 is None:
            continue
        other = min((median(point, name) for name in point["us"] if rival(name) == OTHER_CHECKPOINT), default=None)
        rows.append(
            [
                title,
                f"{us:.1f}" if us else "–",
                f"{fp8:.1f}",
                f"{compared:.2f}" if compared else "–",
                f"{other:.1f}" if other else "–",
                f"{other / fp8:.2f}" if other else "–",
                f"{point['operations'] / fp8 / 1e6:.0f}",
            ]
        )
    return columns(rows)


def fp8_goals(result: Json) -> list[tuple[str, float, float, bool]]:
    """Returns the goals of FP8 tokens, like `goals`."""
    found = []
    ratios = {name: (point["tokens"], fp8_ratio(point)) for name, point in result["points"].items() if point["hit"]}
    many = [value for tokens, value in ratios.values() if value and tokens >= MANY_TOKENS]
    if many:
        mean = geomean(many)
        what = f"16-bit / FP8 tokens, geometric mean of {len(many)} points of at least {MANY_TOKENS} tokens"
        found.append((what, mean, FP8_RATIO, mean >= FP8_RATIO))
    enough = {name: value for name, (tokens, value) in ratios.items() if value and tokens >= FEW_TOKENS}
    if enough:
        name = min(enough, key=lambda name: enough[name])
        found.append((f"16-bit / FP8 tokens, least ({name})", enough[name], 1.0, enough[name] >= 1.0))
    return found


def means(result: Json) -> str:
    """Returns each rival's time relative to the layer's, as geometric means over the numbers of tokens."""
    points = [point for point in result["points"].values() if own(point)]
    of = names(points)
    rows = [["times the layer's", *of, "best"]]
    for model, routing in dict.fromkeys((point["model"], point["routing"]) for point in points):
        family = [point for point in points if (point["model"], point["routing"]) == (model, routing)]
        cells = []
        for name in of:
            measured = [rivals(point)[name] / (own(point) or 1) for point in family if name in rivals(point)]
            cells.append(f"{geomean(measured):.2f}" if len(measured) == len(family) else "–")
        best = [value for value in map(ratio, family) if value]
        rows.append([f"{model} {routing}", *cells, f"{geomean(best):.2f}" if best else "–"])
    return columns(rows)


def text(result: Json) -> str:
    """Returns the whole report."""
    points = result["points"].values()
    lines = [
        f"{made['gpu']}; torch {made['torch']}, triton {made['triton']}; {made['date']}; {made['note']}"
        for made in result["conditions"]
    ]
    copies = sorted({point["copy_bytes_per_second"] for point in points})
    if copies:
        lines.append(f"copy {copies[0] / 1e12:.2f} to {copies[-1] / 1e12:.2f} TB/s read plus written")
    runs = {next(iter(point["us"].values()))["runs"] for point in points if point["us"]}
    if runs:
        lines.append(
            f"medians of {min(runs)} to {max(runs)} runs; for each contender the faster of launches and CUDA graph"
        )
    lines += ["", table(result), ""]
    if any(own(point) for point in points):
        lines += [means(result), ""]
    if any(own(point, "fp8") for point in points):
        lines += [fp8_table(result), ""]
    for what, reached, wanted, met in goals(result) + fp8_goals(result):
        lines.append(f"{what}: {reached:.2f}, goal {wanted:.2f}: {'met' if met else 'missed'}")
    why: dict[tuple[str, str], list[str]] = {}
    for title, point in result["points"].items():
        for name, text_ in point["missing"].items():
            why.setdefault((name, text_), []).append(title)
    for (name, text_), titles in why.items():
        where = ", ".join(titles) if len(titles) <= MOST_TITLES else f"{len(titles)} points"
        lines.append(f"{name} not measured at {where}: {text_}")
    for name in (way for ways in WAYS.values() for way in ways):
        timed = [point for point in points if name in point["host_us"]]
        if timed:
            us = [point["host_us"][name]["median"] for point in timed]
            launches = max(point["launches"][name] for point in timed)
            lines.append(f"{name}: launches per run {launches}, host time per run {min(us):.1f} to {max(us):.1f} µs")
    return "\n".join(lines)


def merged(results: list[Json]) -> Json:
    """Merges results. If several results have a point, the last one is used."""
    conditions = [made for result in results for made in result["conditions"]]
    points = {name: point for result in results for name, point in result["points"].items()}
    return {"conditions": [made for i, made in enumerate(conditions) if made not in conditions[:i]], "points": points}


if __name__ == "__main__":
    print_merged(__doc__, text, merged)
