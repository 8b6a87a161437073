#!/usr/bin/env python3
"""Combines the results of `generate.py`, `logits.py` and `parallel.py` in one file.

    report.py FOLDER     reads generate-nvfp4.json, generate-marlin.json, logits.json and parallel.json from the folder,
                         as far as they exist;
                         writes benches/lab/h200-vllm.json, and prints a table; docs/book/tools/figures.py draws it
"""

import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[3]


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


if __name__ == "__main__":
    main()
