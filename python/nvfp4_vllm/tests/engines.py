#!/usr/bin/env python3
"""Runs `on_the_cpu.py` with several versions of vLLM, each in an environment of its own.

    engines.py               four versions: 0.24, 0.26, 0.30 and 0.33
    engines.py --all         all ten, 0.24 to 0.33
    engines.py --newest      the newest version that pip finds
    engines.py 0.27.1        this version

Options: --wheel FILE (the wheel of `nvfp4`; it is built if omitted), --folder FOLDER (environments and packages, kept for the next run;
about 2 GB per version of PyTorch and 1 GB per version of vLLM), and `--` with the names of cases behind it.

Needs Python 3.12, a C compiler, readelf and the network. No package with CUDA's libraries is installed: `stub_cuda.py` replaces them. A
machine without a GPU does.
"""

import argparse
import pathlib
import re
import subprocess
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


def test(folder, version, wheel, cases):
    """Runs the cases with a version. Returns whether all passed."""
    print(f"== vLLM {version}", flush=True)
    home = environments.make(folder, VLLM, version)
    environments.install(folder, home, wheel, HERE.parent)
    settings = environments.settings(home) | {"VLLM_CACHE_ROOT": str(home / "cache")}
    return subprocess.run([home / "bin" / "python", HERE / "on_the_cpu.py", *cases], env=settings).returncode == 0


def newest():
    """Returns the newest version that pip finds."""
    done = subprocess.run([sys.executable, "-m", "pip", "index", "versions", "vllm"], check=True, capture_output=True, text=True)
    return re.match(r"vllm \(([^)]+)\)", done.stdout)[1]


def main():
    """Runs the tests. Returns the exit status."""
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--newest", action="store_true")
    parser.add_argument("--wheel", type=pathlib.Path)
    parser.add_argument("--folder", type=pathlib.Path, default=ROOT / "target" / "engines")
    options = parser.parse_args(words[:at])
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    wheel = (options.wheel or environments.build_wheel(folder)).resolve()
    versions = options.versions or (ALL if options.all else [newest()] if options.newest else FOUR)
    passed = {version: test(folder, version, wheel, words[at + 1 :]) for version in versions}
    for version, ok in passed.items():
        print(f"vLLM {version}: {'passed' if ok else 'FAILED'}")
    return 0 if all(passed.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
