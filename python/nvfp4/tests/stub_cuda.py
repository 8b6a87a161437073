"""Makes PyTorch importable without a GPU's libraries. PyPI's wheel for x86-64 is linked with CUDA's libraries, which are 4 GB more.

    pip install --no-deps torch
    stub_cuda.py FOLDER [PACKAGE...]
    LD_LIBRARY_PATH=FOLDER python -c "import torch"

The folder gets one library for each of NVIDIA's libraries that PyTorch is linked with, and for each library of other packages (`vllm`) if they are
named. A stub library has the functions that the packages use, and each function returns an error, as on a machine without a GPU. PyTorch's
CPU code is unchanged. Needs readelf and a C compiler.
"""

import collections
import importlib.util
import pathlib
import re
import subprocess
import sys

NVIDIAS = re.compile(r"lib(cu|nccl|nvrtc|nvshmem)")
ITS_FUNCTIONS = re.compile(r"(cu[a-zA-Z]|nccl|nvrtc|nvshmem)")


def readelf(option, path):
    return subprocess.run(["readelf", "-W", option, path], capture_output=True, text=True, check=True).stdout.splitlines()


def main():
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    packages = [pathlib.Path(importlib.util.find_spec(name).origin).parent for name in ("torch", *sys.argv[2:])]
    libraries = sorted(path for folder in (packages[0] / "lib", *packages[1:]) for path in folder.rglob("*.so*"))
    needed, wanted, defined = set(), collections.defaultdict(set), set()
    for path in libraries:
        needed |= {line.split("[")[1].rstrip("]") for line in readelf("-d", path) if "(NEEDED)" in line}
        for fields in map(str.split, readelf("--dyn-syms", path)):
            if len(fields) < 8 or not fields[0].rstrip(":").isdigit():
                continue
            name, _, version = fields[7].partition("@")
            if fields[6] == "UND":
                wanted[version.lstrip("@")].add(name)
            else:
                defined.add(name)
    # A function without a version can be in any library.
    plain = {name for name in wanted[""] - defined if ITS_FUNCTIONS.match(name)}
    for library in sorted(name for name in needed if NVIDIAS.match(name)):
        version = "NVSHMEM" if "nvshmem" in library else library
        functions = wanted.get(version) or (plain if library.startswith("libnccl") else set())
        # 100 is cudaErrorNoDevice, and an error code in the other libraries too.
        source = "".join(f"long {name}(void) {{ return 100; }}\n" for name in sorted(functions))
        line = ["cc", "-w", "-fno-builtin", "-shared", "-fPIC", f"-Wl,-soname,{library}", "-x", "c", "-", "-o", folder / library]
        if version in wanted:
            script = folder / "versions"
            script.write_text(f"{version} {{ global: *; }};")
            line.insert(1, f"-Wl,--version-script={script}")
        subprocess.run(line, input=source, text=True, check=True)


if __name__ == "__main__":
    main()
