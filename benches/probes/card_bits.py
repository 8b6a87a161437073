"""Compares the emulator's outputs of the shipped Hopper kernels with a card's, bit for bit.

    python benches/probes/card_bits.py COMMAND --record benches/lab/card-bits.json      on a machine with the card
    python benches/probes/card_bits.py COMMAND --check benches/lab/card-bits.json       anywhere, in the emulator

COMMAND is the built `nvfp4`. Each case is a call of `nvfp4 run` with generated inputs. Both machines generate the same inputs, and the script
compares hashes of the outputs. The script exits with 1 if an output differs. `--quick` checks only the cases that the emulator computes in a
few seconds.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

# SMs of an H100: both machines then choose the same instances.
SMS = 132
# Cases with more thousands of multiply-adds take the emulator longer than a few seconds.
QUICK_MULTIPLY_ADDS = 200e6


def cases() -> dict[str, tuple[list[str], float]]:
    """Returns the options of each case, and its number of multiply-adds."""
    found = {}
    dual = [(1536, 512, 7168), (256, 512, 256), (3072, 1024, 1536), (7168, 1024, 256), (7168, 2304, 2048)]
    dual += [(4608, 384, 7168), (7168, 384, 2304), (512, 768, 7168), (4096, 768, 512)]
    for number, (m, n, k) in enumerate(dual, 1):
        found[f"gated_sm90, dual-test-{number}"] = ["--shape", f"dual-test-{number}"], 2.0 * m * n * k
    # Groups with the same N, as one output file needs.
    found["gated_sm90, group-test-8"] = ["--shape", "group-test-8"], 128.0 * 128 * 1536
    found["gated_sm90, group-3"] = ["--shape", "group-3"], 512.0 * 3072 * 4096
    for codes in ["gaussian", "all-codes"]:
        found[f"gated_sm90, dual-test-2, {codes}"] = ["--shape", "dual-test-2", "--input", codes], 2.0 * 256 * 512 * 256
    for tokens in [1, 8, 16, 24, 32, 64, 96, 128, 256, 512]:
        for dtype in ["f16", "bf16"]:
            options = ["--op", "linear", "--shape", f"{tokens},1040,3088", "--dtype", dtype]
            found[f"linear_sm90, {tokens} tokens, {dtype}"] = options, 1040 * 3088 * max(tokens, 8)
    for tokens in [1, 40]:
        options = ["--op", "linear", "--shape", f"{tokens},208,12304"]
        found[f"linear_sm90, {tokens} tokens, two parts of K"] = options, 208 * 12304 * 40
    layer = "qwen3-30b-a3b@tp8"
    for token_format, kernel in [("16-bit", "moe_sm90"), ("fp8", "moe_fp8_sm90")]:
        for tokens in [1, 2, 16, 64, 256, 1024]:
            options = ["--op", "moe", "--shape", layer, "--tokens", str(tokens), "--token-format", token_format]
            name = "moe_few_sm90" if kernel == "moe_sm90" and tokens < 16 else kernel
            found[f"{name}, {layer}, {tokens} tokens"] = options, 3 * 2048 * 96 * 8 * max(tokens, 8)
    options = ["--op", "moe", "--shape", "gpt-oss-120b@tp4", "--tokens", "12"]
    found["moe_sm90, gpt-oss-120b@tp4, 12 tokens"] = options, 1e9
    whole = ["--op", "moe", "--shape", "qwen3-30b-a3b", "--tokens", "16"]
    found["moe_sm90, qwen3-30b-a3b, 16 tokens, the whole layer"] = whole, 5e9
    return found


def output_hash(command: str, options: list[str], backend: list[str]) -> str:
    """Runs a case and returns the hash of its output file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "output.safetensors"
        run = [command, "run", *options, *backend, "--verify", "off", "--output", str(path)]
        done = subprocess.run(run, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(run)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command")
    parser.add_argument("--record", type=Path, metavar="FILE", help="run on the card and write the hashes")
    parser.add_argument("--check", type=Path, metavar="FILE", help="run in the emulator and compare with the hashes")
    parser.add_argument("--quick", action="store_true", help="only cases of a few seconds")
    arguments = parser.parse_args()
    if (arguments.record is None) == (arguments.check is None):
        parser.error("give --record or --check")
    if arguments.record:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        card = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
        hashes = {name: output_hash(arguments.command, options, ["--backend", "cuda"]) for name, (options, _) in cases().items()}
        record = {"card": card, "date": date.today().isoformat(), "hashes": hashes}
        arguments.record.write_text(json.dumps(record, indent=1) + "\n")
        return
    recorded, wrong = json.loads(arguments.check.read_text())["hashes"], 0
    selected = {name: options for name, (options, size) in cases().items() if not arguments.quick or size <= QUICK_MULTIPLY_ADDS}
    for name, options in selected.items():
        emulated = output_hash(arguments.command, options, ["--backend", "emulated", "--arch", "sm_90a", "--sms", str(SMS)])
        same = emulated == recorded[name]
        wrong += not same
        print(f"{'same ' if same else 'OTHER'} {name}", flush=True)
    print(f"{len(selected) - wrong} of {len(selected)} outputs have the bits of {json.loads(arguments.check.read_text())['card']}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
