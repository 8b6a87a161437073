#!/usr/bin/env python3
"""Combines the results of `generate.py`, `logits.py` and `parallel.py` in one file and one picture.

    report.py FOLDER     reads generate-nvfp4.json, generate-marlin.json, logits.json and parallel.json from the folder,
                         as far as they exist;
                         writes benches/lab/h200-vllm.json and docs/vllm.svg, and prints a table
"""

import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[3]
OURS, THEIRS = "#1f6feb", "#b0b7c3"


def main():
    folder = pathlib.Path(sys.argv[1])
    found = {name: json.loads((folder / f"{name}.json").read_text()) for name in ("generate-nvfp4", "generate-marlin", "logits", "parallel") if (folder / f"{name}.json").exists()}
    (ROOT / "benches/lab/h200-vllm.json").write_text(json.dumps(found, indent=1) + "\n")
    pairs = []
    ours, theirs = found["generate-nvfp4"], found["generate-marlin"]
    for batch in ("1", "16", "128"):
        if batch in ours["generate"] and batch in theirs["generate"]:
            speeds = [of["generate"][batch]["tokens_per_second"] for of in (ours, theirs)]
            pairs.append((f"batch {batch}", *speeds))
    if ours["prefill"] and theirs["prefill"]:
        pairs.append(("prefill of 2048", *(2048e3 / of["prefill"]["2048"]["ms"] for of in (ours, theirs))))
    print("| | this library, tokens/s | Marlin, tokens/s | ratio |\n|---|---|---|---|")
    for name, mine, other in pairs:
        print(f"| {name} | {mine:.0f} | {other:.0f} | {mine / other:.2f} |")
    for name, row in (found.get("logits", {}) | found.get("parallel", {})).items():
        print(f"{name}: {row}")
    (ROOT / "docs/vllm.svg").write_text(picture(pairs))


def picture(pairs):
    """Draws bars relative to Marlin, with the tokens per second of each contender."""
    width, left, line = 720, 130, 64
    scale = (width - left - 150) / max(max(mine / other for _, mine, other in pairs), 1.0)
    parts = []
    for index, (name, mine, other) in enumerate(pairs):
        top = 50 + index * line
        parts.append(f'<text x="{left - 10}" y="{top + 26}" text-anchor="end">{name}</text>')
        for row, (value, label, color) in enumerate(((mine / other, mine, OURS), (1.0, other, THEIRS))):
            y = top + row * 22
            parts.append(f'<rect x="{left}" y="{y}" width="{value * scale:.1f}" height="18" fill="{color}"/>')
            parts.append(f'<text x="{left + value * scale + 8:.1f}" y="{y + 14}">{label:,.0f} tokens/s</text>')
    height = 60 + len(pairs) * line
    title = "Qwen3-30B-A3B's shape in vLLM 0.24.0 on an H200: this library (blue) and Marlin (gray)"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="13">'
        f'<rect width="100%" height="100%" fill="white"/><text x="16" y="26" font-size="14">{title}</text>{"".join(parts)}</svg>\n'
    )


if __name__ == "__main__":
    main()
