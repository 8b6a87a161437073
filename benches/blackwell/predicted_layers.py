#!/usr/bin/env python3
"""Predicts times of MoE layers with few tokens on a B200, and of one layer on an RTX PRO 6000, with the emulator.

    python3 benches/blackwell/predicted_layers.py COMMAND benches/lab/predicted-layers.json

COMMAND is the built `nvfp4`. `cargo xtask ptxas --install` and `sass --install` must have run, because the emulator otherwise counts PTX
instead of machine code. The record is written after each point, and points that it already has from the same commit are kept.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

LAYERS = {
    "DeepSeek-V3, 32 local experts": {"hidden": 7168, "intermediate": 2048, "experts": 32, "top_k": 8},
    "DeepSeek-V3, 48 local experts": {"hidden": 7168, "intermediate": 2048, "experts": 48, "top_k": 8},
    "Qwen3.5-35B-A3B": {"hidden": 2048, "intermediate": 512, "experts": 256, "top_k": 8},
    "Qwen3-30B-A3B": {"hidden": 2048, "intermediate": 768, "experts": 128, "top_k": 8},
    "gpt-oss-120b": {"hidden": 2880, "intermediate": 2880, "experts": 128, "top_k": 4, "activation": "gpt-oss", "biases": True},
    "MiniMax-M2": {"hidden": 3072, "intermediate": 1536, "experts": 256, "top_k": 8},
}
"""Sizes of the routed experts. Shared experts are left out, because the published times have none."""

TOKENS = [1, 8, 64]

PUBLISHED = {
    "DeepSeek-V3, 32 local experts": {"1": 28.76, "8": 86.3},
    "DeepSeek-V3, 48 local experts": {"1": 28.76, "8": 120.3, "64": 128.8},
}
"""Measured on a B200, in µs, the best of each row (roycho96/nvfp4moe, BENCHMARKS.md, commit 013827e0): graphs replayed, so up to 126 MB of
weights stay in L2, and a launch costs less than alone."""

RTX_LAYER, RTX_TOKENS, RTX_FORMATS = "Qwen3.5-35B-A3B", [1, 64], ["nvfp4", "16-bit"]
"""What is predicted for an RTX PRO 6000."""

RTX_PUBLISHED = {"nvfp4": {"1": ("b12x", 27.7)}, "16-bit": {"1": ("cuTile", 39.5), "64": ("cuTile", 370.0)}}
"""Measured on an RTX PRO 6000, in µs (flashinfer-ai/flashinfer#5099)."""

BYTES_PER_SECOND = 7.26e12
"""The rate at which a B200 reads weights."""


def limit_us(layer: dict, point: dict) -> float:
    """Returns the time in which a B200 reads the weights of the experts that a point's tokens chose."""
    return point["hit_experts"] * 3 * layer["hidden"] * layer["intermediate"] * 9 / 16 / BYTES_PER_SECOND * 1e6


def goal_us(layer: dict, point: dict) -> float:
    """Returns the goal of a point: 1.15 times its limit, 6 µs, and what a launch costs apart from its work."""
    return 1.15 * limit_us(layer, point) + 6.0 + point["floor_us"]


def predicted(command: str, gpu: str, layer: dict, tokens: int, token_format: str) -> dict:
    """Returns the predicted time of a layer, and what it reads and launches."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "layer.json"
        path.write_text(json.dumps(layer | {"name": "layer", "tokens": tokens}))
        run = [command, "run", "--op", "moe", "--backend", "emulated", "--timed", "--gpu", gpu, "--no-values"]
        done = subprocess.run([*run, "--token-format", token_format, "--shape", str(path), "--json"], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(run)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    found = json.loads(done.stdout)
    launches = found["prediction"]["launches"]
    if found["prediction"]["counted_in_ptx"]:
        sys.exit("the emulator counts PTX: run `cargo xtask ptxas --install` and `cargo xtask sass --install`")
    return {
        "us": round(found["predicted_us"], 2),
        "hit_experts": found["hit_experts"],
        # What a launch costs apart from its work.
        "floor_us": round(found["predicted_us"] - launches[-1]["end_us"], 2),
        "launches": [{"kernel": of["kernel"], "end_us": round(of["end_us"], 2)} for of in launches],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command")
    parser.add_argument("record", type=Path)
    arguments = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    record = json.loads(arguments.record.read_text()) if arguments.record.exists() else {}
    if record.get("commit") != commit:
        record = {"commit": commit, "date": date.today().isoformat(), "layers": {}}
    rtx = record.setdefault("rtx-pro-6000", {token_format: {} for token_format in RTX_FORMATS})
    of_b200 = [
        (record["layers"].setdefault(name, layer | {"points": {}})["points"], name, "b200", layer, tokens, "nvfp4")
        for tokens in TOKENS
        for name, layer in LAYERS.items()
    ]
    of_rtx = [
        (rtx[token_format], RTX_LAYER, "rtx-pro-6000", LAYERS[RTX_LAYER], tokens, token_format)
        for tokens in RTX_TOKENS
        for token_format in RTX_FORMATS
    ]
    for points, name, gpu, layer, tokens, token_format in of_rtx + of_b200:
        if str(tokens) not in points:
            points[str(tokens)] = predicted(arguments.command, gpu, layer, tokens, token_format)
            print(f"{name}, {tokens} tokens ({token_format}) on {gpu}: {points[str(tokens)]['us']} µs", flush=True)
            arguments.record.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
