#!/usr/bin/env python3
"""Runs `on_the_cpu.py` with several versions of vLLM, each in an environment of its own.

    engines.py               four versions: 0.24, 0.26, 0.30 and 0.33
    engines.py --all         all ten, 0.24 to 0.33
    engines.py --newest      the newest version that pip finds
    engines.py 0.27.1        this version

Options: --wheel FILE (the wheel of `nvfp4`; it is built if omitted), --folder FOLDER (environments and packages, kept for the next run;
about 2 GB per version of PyTorch and 1 GB per version of vLLM), --remove (each environment after its run), --record (writes the results to
`benches/lab/versions.json`), and `--` with the names of cases behind it.

Needs Python 3.12, a C compiler, readelf and the network. No package with CUDA's libraries is installed: `stub_cuda.py` replaces them. A
machine without a GPU does.
"""

import argparse
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(ROOT / "tests" / "engines"))
import environments

FOUR = ("0.24.0", "0.26.0", "0.30.0", "0.33.0")
ALL = ("0.24.0", "0.25.1", "0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")
VLLM = environments.Engine(
    "vllm",
    left_out=r"torch|torchaudio|torchvision|torchcodec|PyNvVideoCodec|flashinfer-.*|tilelang|nvidia-.*|nvtx|fastsafetensors|instanttensor"
    r"|quack-kernels|tokenspeed-mla|humming-kernels|opencv-python-headless|numba|apache-tvm-ffi",
    never=("triton", "opencv-python-headless"),
)


def test(folder, version, wheel, options, cases):
    """Runs the cases with a version. Returns whether all passed."""
    print(f"== vLLM {version}", flush=True)
    home = environments.make(folder, VLLM, version)
    environments.install(folder, home, wheel, HERE.parent)
    ok, found = environments.run_cases(home, HERE / "on_the_cpu.py", cases, {"VLLM_CACHE_ROOT": str(home / "cache")})
    if options.record and found and not cases:
        environments.record("vllm", version, found)
    if options.remove:
        environments.remove(folder, home, "torch", VLLM.package)
    return ok


def main():
    """Runs the tests. Returns the exit status."""
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*")
    parser.add_argument("--all", action="store_true")
    environments.add_options(parser)
    options = parser.parse_args(words[:at])
    folder, wheel = environments.prepare(options)
    versions = options.versions or (ALL if options.all else [environments.newest("vllm")] if options.newest else FOUR)
    return environments.run_all("vLLM", versions, lambda version: test(folder, version, wheel, options, words[at + 1 :]))


if __name__ == "__main__":
    sys.exit(main())
