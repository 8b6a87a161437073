"""Prints results of the field (`layer.py --field`, `linear.py --field`) with each point's limit. Needs only the JSON.

    python3 field_report.py layers.json linear.json
    python3 field_report.py --merge all.json first.json second.json

A point's limit is the time in which the card copies the weights that the point reads, or computes its products at the
rate of an f16 product, whichever is longer. Both rates are measured in the same run.
"""

from __future__ import annotations

from typing import Any

import field
import layer_report
import linear_report
from report import columns, geomean, print_merged

Json = dict[str, Any]

# The best rival's time relative to this library's: at least this at every point, and for linear layers of few tokens.
LEAST, FEW_LINEAR, FEW_TOKENS = 0.97, 1.0, 64
# A rival that takes this many times the limit leaves room. The goal for the geometric mean of these points is 1.2.
ROOM = 1.25
# Where weights are the limit: share of the copy's rate, and µs beside it.
COPY_SHARE, LAYER_US, LINEAR_US = 0.9, 14.0, 8.0


def is_layer(point: Json) -> bool:
    """Whether a point is of an MoE layer, not of one matrix."""
    return "routing" in point


def own(point: Json) -> float | None:
    """Returns this library's microseconds."""
    if is_layer(point):
        return layer_report.own(point)
    return point["us"].get(linear_report.OWN["16-bit"], {}).get("median")


def rivals(point: Json) -> dict[str, float]:
    """Returns each rival's microseconds."""
    return layer_report.rivals(point) if is_layer(point) else linear_report.rivals(point)


def memory_us(point: Json) -> float:
    """Returns the microseconds in which a copy of the weights' bytes takes place."""
    return point["bytes"] / point["copy_bytes_per_second"] * 1e6


def limit_us(point: Json) -> float:
    """Returns the point's limit in microseconds."""
    return max(memory_us(point), point["operations"] / point["f16_operations_per_second"] * 1e6)


def allowed_us(point: Json) -> float | None:
    """Returns the time allowed where weights are the limit."""
    if memory_us(point) < limit_us(point):
        return None
    return memory_us(point) / COPY_SHARE + (LAYER_US if is_layer(point) else LINEAR_US)


def least_ratio(point: Json) -> float:
    """Returns the required ratio of the best rival's time to this library's."""
    return FEW_LINEAR if not is_layer(point) and point["tokens"] <= FEW_TOKENS else LEAST


def ratio(point: Json) -> float | None:
    """Returns the best rival's time relative to this library's."""
    us, times = own(point), rivals(point)
    return min(times.values()) / us if us and times else None


def subject(point: Json) -> str:
    """Returns the name of the point's layer or matrix."""
    return point["model"] if is_layer(point) else f"{point['n']}x{point['k']}"


def table(points: list[Json]) -> str:
    """Returns a table with one row per point: times, their ratio, and both times relative to the limit."""
    names = list(dict.fromkeys(name for point in points for name in rivals(point)))
    rows = [["µs", "tokens", "limit", "this library", *names, "ratio", "own/limit", "rival/limit", ""]]
    for point in sorted(points, key=lambda point: (field.half(subject(point)), subject(point), point["tokens"])):
        us, times, compared, limit = own(point), rivals(point), ratio(point), limit_us(point)
        allowed = allowed_us(point)
        marks = ["*"] * (compared is not None and compared < least_ratio(point))
        marks += ["+"] * (us is not None and allowed is not None and us > allowed)
        rows.append(
            [
                subject(point),
                str(point["tokens"]),
                f"{limit:.1f}",
                f"{us:.1f}" if us else "–",
                *(f"{times[name]:.1f}" if name in times else "–" for name in names),
                f"{compared:.2f}" if compared else "–",
                f"{us / limit:.2f}" if us else "–",
                f"{min(times.values()) / limit:.2f}" if times else "–",
                "".join(marks),
            ]
        )
    return columns(rows)


def summary(points: list[Json]) -> str:
    """Returns the goals of MoE layers and of matrices, for each half."""
    rows = [
        [
            "",
            "points",
            "mean",
            "least",
            f"below {LEAST} or {FEW_LINEAR:.0f}",
            "slower than allowed",
            "mean where a rival leaves room",
        ]
    ]
    for kind in (True, False):
        for half in (field.TUNED, field.HELD_OUT):
            of = [point for point in points if is_layer(point) == kind and field.half(subject(point)) == half]
            ratios = [(ratio(point) or 0, point) for point in of if ratio(point)]
            if not ratios:
                continue
            roomy = [value for value, point in ratios if min(rivals(point).values()) >= ROOM * limit_us(point)]
            limited = [(own(point) or 0, allowed) for point in of if (allowed := allowed_us(point)) is not None]
            rows.append(
                [
                    f"{'layers' if kind else 'matrices'}, {half}",
                    str(len(ratios)),
                    f"{geomean([value for value, _ in ratios]):.2f}",
                    f"{min(value for value, _ in ratios):.2f}",
                    str(sum(value < least_ratio(point) for value, point in ratios)),
                    f"{sum(us > allowed for us, allowed in limited)} of {len(limited)}",
                    f"{geomean(roomy):.2f} ({len(roomy)})" if roomy else "–",
                ]
            )
    return columns(rows)


def text(result: Json) -> str:
    """Returns the whole report."""
    points = list(result["points"].values())
    lines = [
        f"{made['gpu']}; torch {made['torch']}, triton {made['triton']}; {made['date']}; {made['note']}"
        for made in result["conditions"]
    ]
    lines += [
        "ratio: the best rival's time relative to this library's",
        "limit: the longer of bytes at the rate of a copy, and products at the rate of an f16 product",
        f"*: the ratio is below {LEAST}, or below {FEW_LINEAR:.0f} for a matrix and at most {FEW_TOKENS} tokens",
        f"+: weights are the limit, and the time is longer than at {COPY_SHARE:.0%} of its rate plus {LAYER_US:.0f} µs "
        f"(matrices: {LINEAR_US:.0f} µs)",
        "",
    ]
    for kind in (True, False):
        of = [point for point in points if is_layer(point) == kind]
        if of:
            lines += [table(of), ""]
    lines.append(summary(points))
    missing: dict[tuple[str, str], int] = {}
    for point in points:
        for name, why in point["missing"].items():
            missing[(name, why)] = missing.get((name, why), 0) + 1
    lines += [f"{name} not measured at {count} points: {why}" for (name, why), count in missing.items()]
    return "\n".join(lines)


def merged(results: list[Json]) -> Json:
    """Merges results of MoE layers and of matrices. If several results have a point, the last one is used."""
    conditions: list[Json] = []
    for result in results:
        made = result["conditions"]
        conditions += [one for one in (made if isinstance(made, list) else [made]) if one not in conditions]
    points = {name: point for result in results for name, point in result["points"].items()}
    return {"conditions": conditions, "points": points}


if __name__ == "__main__":
    print_merged(__doc__, text, merged)
