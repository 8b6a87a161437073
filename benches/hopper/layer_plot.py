"""Draws a result of `layer.py`: each rival's time relative to the library's layer.

python3 layer_plot.py result.json plot.svg
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from layer_report import names, own, rivals

TITLES = {
    "marlin": "vLLM, Marlin",
    "humming": "vLLM, Humming",
    "torch": "PyTorch, bf16",
    "compiled": "PyTorch, bf16, compiled",
}
ROUTING_TITLES = {"uniform": "even routing", "zipf": "skewed routing (Zipf)"}
# Medium brightness, for light and dark backgrounds. In the order of `TITLES`.
COLOURS = ("#d9662b", "#3d8fd1", "#b46fb8", "#2f9e77")
PANEL = (214.0, 150.0)
GAP = (14.0, 34.0)
LEFT, TOP, RIGHT, BOTTOM = 44.0, 74.0, 14.0, 40.0
STYLE = """
  .back { fill: #ffffff } text { fill: #24292f; font: 12px system-ui, sans-serif } .small { font-size: 11px }
  .strong { font-weight: 600 } .grid { stroke: #d0d7de; stroke-width: 1 } .one { stroke: #24292f; stroke-width: 2 }
  .line { fill: none; stroke-width: 2; stroke-linejoin: round }
  @media (prefers-color-scheme: dark) {
    .back { fill: #0d1117 } text { fill: #e6edf3 } .grid { stroke: #30363d } .one { stroke: #e6edf3 }
  }
"""

Json = dict[str, Any]


def ratios(result: Json) -> dict[tuple[str, str], dict[str, dict[int, float]]]:
    """Returns, by model and routing, then rival, then number of tokens: the rival's time divided by the layer's."""
    found: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for point in result["points"].values():
        us = own(point)
        if us is None or point["routing"] not in ROUTING_TITLES:
            continue
        panel = found.setdefault((point["model"], point["routing"]), {})
        for name, time in rivals(point).items():
            panel.setdefault(name, {})[point["tokens"]] = time / us
    return found


def doublings(values: list[float]) -> range:
    """Returns powers of two from at most the smallest value (and at most 1) to at least the largest.

    >>> list(doublings([0.9, 3.0]))
    [-1, 0, 1, 2]
    """
    logs = [math.log2(value) for value in values]
    return range(min(0, math.floor(min(logs))), max(1, math.ceil(max(logs))) + 1)


def strokes(by_tokens: dict[int, float], tokens: list[int]) -> list[list[int]]:
    """Returns the numbers of tokens that each line joins. A missing measurement breaks the line.

    >>> strokes({1: 2.0, 8: 2.0, 128: 2.0}, [1, 8, 32, 128])
    [[1, 8], [128]]
    """
    lines: list[list[int]] = [[]]
    for count in tokens:
        if count in by_tokens:
            lines[-1].append(count)
        elif lines[-1]:
            lines.append([])
    return [line for line in lines if line]


def svg(result: Json) -> str:
    """Returns the picture: a column per model, a row per routing, tokens to the right, times upwards."""
    panels = ratios(result)
    if not panels:
        raise ValueError("the result has no point with both the layer and a rival")
    models = list(dict.fromkeys(model for model, _ in panels))
    routings = [routing for routing in ROUTING_TITLES if any(has == routing for _, has in panels)]
    tokens = sorted({count for panel in panels.values() for line in panel.values() for count in line})
    scale = doublings([ratio for panel in panels.values() for line in panel.values() for ratio in line.values()])
    of = names(result["points"].values())
    width = LEFT + len(models) * (PANEL[0] + GAP[0]) - GAP[0] + RIGHT
    height = TOP + len(routings) * (PANEL[1] + GAP[1]) - GAP[1] + BOTTOM

    def x(column: int, count: int) -> float:
        step = PANEL[0] / len(tokens)
        return LEFT + column * (PANEL[0] + GAP[0]) + (tokens.index(count) + 0.5) * step

    def y(row: int, ratio: float) -> float:
        share = (math.log2(ratio) - scale[0]) / (scale[-1] - scale[0])
        return TOP + row * (PANEL[1] + GAP[1]) + (1 - share) * PANEL[1]

    def text(x: float, y: float, content: str, anchor: str = "start", kind: str = "small") -> str:
        return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'

    title = "Times that an MoE layer takes, divided by this library's"
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img">',
        f"<title>{title}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="back" width="{width:.0f}" height="{height:.0f}" rx="6"/>',
        text(LEFT, 22, f"{title}: above 1, this library is faster", kind="strong"),
    ]
    # A rival without a title is labeled with its name.
    colors = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(dict.fromkeys((*TITLES, *of)))}
    place = LEFT
    for name in of:
        label = TITLES.get(name, name)
        out.append(
            f'<path class="line" stroke="{colors[name]}" d="M{place:.1f} 39h18"/>' + text(place + 24, 43, label)
        )
        place += 24 + 6.4 * len(label) + 22
    for column, model in enumerate(models):
        left = LEFT + column * (PANEL[0] + GAP[0])
        out.append(text(left, TOP - 9, model, kind="strong"))
        for row, routing in enumerate(routings):
            bottom = y(row, 2.0 ** scale[0])
            for power in scale:
                kind = "one" if power == 0 else "grid"
                level = y(row, 2.0**power)
                out.append(f'<path class="{kind}" d="M{left:.1f} {level:.1f}h{PANEL[0]:.1f}"/>')
                if column == 0:
                    out.append(text(left - 6, level + 4, f"{2.0**power:g}", "end"))
            out += [text(x(column, count), bottom + 14, str(count), "middle") for count in tokens]
            panel = panels.get((model, routing), {})
            for name, by_tokens in panel.items():
                for line in strokes(by_tokens, tokens):
                    places = [(x(column, count), y(row, by_tokens[count])) for count in line]
                    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
                    out.append(f'<polyline class="line" stroke="{colors[name]}" points="{path}"/>')
                    out += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.6" fill="{colors[name]}"/>' for a, b in places]
    for row, routing in enumerate(routings):
        label = f"tokens, {ROUTING_TITLES[routing]}"
        out.append(text(LEFT, y(row, 2.0 ** scale[0]) + 28, label))
    return "\n".join([*out, "</svg>"]) + "\n"


def main() -> None:
    """Writes the picture of a result."""
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} result.json plot.svg")
    result, picture = map(Path, sys.argv[1:])
    picture.write_text(svg(json.loads(result.read_text())))


if __name__ == "__main__":
    main()
