"""Compares the emulator's outputs of the shipped Hopper kernels with a card's, bit for bit.

    python benches/probes/card_bits.py COMMAND --card benches/lab/card-bits.json        on a machine with the card
    python benches/probes/card_bits.py COMMAND --emulator benches/lab/card-bits.json    anywhere

COMMAND is the built `nvfp4`. Each case is a call of `nvfp4 run` with generated inputs, which are the same on both machines. The first call
writes hashes of the card's outputs. The second call adds the emulator's hashes, and exits with 1 if one differs. `--quick` computes only the
cases that take the emulator a few seconds, and writes nothing.
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
# Cases with more multiply-adds take the emulator longer than a few seconds.
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
    parser.add_argument("--card", type=Path, metavar="FILE", help="compute on the card and write the hashes")
    parser.add_argument("--emulator", type=Path, metavar="FILE", help="compute in the emulator and compare with the hashes")
    parser.add_argument("--quick", action="store_true", help="with --emulator: only cases of a few seconds; write nothing")
    arguments = parser.parse_args()
    if (arguments.card is None) == (arguments.emulator is None):
        parser.error("give --card or --emulator")
    if arguments.card:
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        card = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
        of_card = {name: output_hash(arguments.command, options, ["--backend", "cuda"]) for name, (options, _) in cases().items()}
        write(arguments.card, {"card": card, "date": date.today().isoformat(), "of_card": of_card})
        return
    record = json.loads(arguments.emulator.read_text())
    backend, emulated = ["--backend", "emulated", "--arch", "sm_90a", "--sms", str(SMS)], {}
    # Cases that end soon come first, and the record is complete for them if the call is interrupted.
    for name, (options, size) in sorted(cases().items(), key=lambda case: case[1][1]):
        if not arguments.quick or size <= QUICK_MULTIPLY_ADDS:
            emulated[name] = output_hash(arguments.command, options, backend)
            print("same " if emulated[name] == record["of_card"][name] else "OTHER", name, flush=True)
            if not arguments.quick:
                write(arguments.emulator, record | {"of_emulator": emulated})
    other = sum(found != record["of_card"][name] for name, found in emulated.items())
    print(f"{len(emulated) - other} of {len(emulated)} outputs have the bits of {record['card']}")
    sys.exit(1 if other else 0)


def write(path: Path, record: dict) -> None:
    """Writes the record."""
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
