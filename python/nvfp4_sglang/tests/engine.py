#!/usr/bin/env python3
"""Runs `on_the_cpu.py` with SGLang, in an environment that it makes.

Options: --wheel FILE (the wheel of `nvfp4`; it is built if omitted), --folder FOLDER (the environment and packages, kept for the next run;
about 3 GB), --record (writes the result to `benches/lab/versions.json`), and the names of cases.

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

VERSION = "0.5.23"
SGLANG = environments.Engine(
    "sglang",
    left_out=r"torch|torchaudio|torchcodec|flash-attn-4|flashinfer_python|humming-kernels|nvidia-.*|nvshmem4py.*|quack-kernels|sgl-.*"
    r"|sglang-kernel|tilelang|cuda-python|numba|scipy|timm|modelscope|datasets|decord2|av|blobfile|build|ninja|py-spy"
    r"|smg-grpc-servicer|soundfile|deepseek-recipe|tml-renderers|torch_memory_saver|kernels|outlines|anthropic|xgrammar",
    never=("torchaudio",),
    more=("triton", "dill"),
)


def main():
    """Runs the tests. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--wheel", type=pathlib.Path)
    parser.add_argument("--folder", type=pathlib.Path, default=ROOT / "target" / "engines")
    options = parser.parse_args()
    folder, wheel = environments.prepare(options)
    home = environments.make(folder, SGLANG, VERSION)
    environments.install(folder, home, wheel, HERE.parent)
    ok, found = environments.run_cases(home, HERE / "on_the_cpu.py", options.cases)
    if options.record and found and not options.cases:
        environments.record("sglang", VERSION, found)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
