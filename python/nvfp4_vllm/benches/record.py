#!/usr/bin/env python3
"""Records the results of `generate.py`, `logits.py` and `parallel.py`.

    record.py FOLDER VERSION     reads MODEL-CONTENDER.json, logits.json and parallel.json from the folder, as far as they
                                 exist; writes them into the entry VERSION (of vLLM) of benches/lab/h200-vllm.json, and prints tables

`docs/book/tools/figures.py` draws them.
"""

import json
import pathlib
import sys

RECORDED = pathlib.Path(__file__).resolve().parents[3] / "benches/lab/h200-vllm.json"


def speeds(run):
    """Returns the tokens per second of each load of a run of `generate.py`."""
    found = {f"batch {batch}": of["tokens_per_second"] for batch, of in run["generate"].items()}
    return found | {f"a prefill of {tokens}": int(tokens) * 1e3 / of["ms"] for tokens, of in run["prefill"].items()}


def table(runs):
    """Returns the rows of a table of tokens per second: a load, then each contender."""
    loads = [speeds(run) for run in runs.values()]
    return [["tokens/s", *runs], *([load, *(f"{of[load]:,.0f}" for of in loads)] for load in loads[0])]


def main():
    folder, version = pathlib.Path(sys.argv[1]), sys.argv[2]
    found = {name: json.loads((folder / f"{name}.json").read_text()) for name in ("logits", "parallel") if (folder / f"{name}.json").exists()}
    for file in sorted(folder.glob("*.json")):
        run = json.loads(file.read_text())
        if file.stem not in found:
            found.setdefault("generate", {}).setdefault(run["model"], {})[run["contender"]] = run
    recorded = json.loads(RECORDED.read_text())
    recorded[version] = recorded.get(version, {}) | found
    RECORDED.write_text(json.dumps(recorded, indent=1) + "\n")
    for model, runs in found.get("generate", {}).items():
        print(f"\n{model}\n")
        for row in table(runs):
            print(" | ".join(row))


if __name__ == "__main__":
    main()
