#!/usr/bin/env python3
"""Runs `on_the_cpu.py` with several versions of vLLM, each in an environment of its own.

    engines.py               four versions: 0.24, 0.26, 0.30 and 0.33
    engines.py --all         all ten, 0.24 to 0.33
    engines.py --newest      the newest version on PyPI
    engines.py 0.27.1        this version

Options: --wheel FILE (the wheel of `nvfp4`; it is built if omitted), --folder FOLDER (environments and packages, kept for the next run;
about 2 GB per version of PyTorch and 1 GB per version of vLLM), and `--` with the names of cases behind it.

Needs Python 3.12, a C compiler, readelf and the network. No package with CUDA's libraries is installed: `stub_cuda.py` replaces them. A
machine without a GPU does.
"""

import argparse
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
FOUR = ("0.24.0", "0.26.0", "0.30.0", "0.33.0")
ALL = ("0.24.0", "0.25.1", "0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")

# vLLM's dependencies that run only on a GPU, or are large and not used here.
LEFT_OUT = re.compile(
    r"(torch|torchaudio|torchvision|torchcodec|PyNvVideoCodec|flashinfer-.*|tilelang|nvidia-.*|nvtx|fastsafetensors|instanttensor"
    r"|quack-kernels|tokenspeed-mla|humming-kernels|opencv-python-headless|numba|apache-tvm-ffi)$",
    re.IGNORECASE,
)
# The Python packages that PyTorch imports; its other dependencies are CUDA's.
OF_TORCH = ("filelock", "typing-extensions", "setuptools<81", "sympy", "networkx", "jinja2", "fsspec", "numpy")


def run(*line, **options):
    subprocess.run([str(part) for part in line], check=True, **options)


def download(folder, version):
    """Returns vLLM's wheel."""
    found = list(folder.glob(f"vllm-{version}-*.whl"))
    if not found:
        run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", folder, f"vllm=={version}")
    return next(folder.glob(f"vllm-{version}-*.whl"))


def requirements(wheel):
    """Returns the requirement of PyTorch in a wheel, and the other requirements without the packages left out."""
    with zipfile.ZipFile(wheel) as file:
        metadata = next(name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        lines = file.read(metadata).decode().splitlines()
    found = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ") and "extra ==" not in line]
    torch = next(line for line in found if line.startswith("torch=="))
    return torch, [line for line in found if not LEFT_OUT.match(re.match(r"[\w.-]+", line)[0])]


def environment(folder, uv, version):
    """Makes the environment of a version, and returns its folder. An environment that is complete is used again."""
    home = folder / version
    if (home / "complete").exists():
        return home
    wheel = download(folder, version)
    torch, others = requirements(wheel)
    run(uv, "venv", "--quiet", "--clear", "--python", sys.executable, home)
    install = (uv, "pip", "install", "--quiet", "--cache-dir", folder / "cache", "--python", home / "bin" / "python")
    run(*install, "--no-deps", wheel, torch)
    # Other packages depend on PyTorch too, and would install it with CUDA's libraries.
    (home / "never.txt").write_text("".join(f"{name} ; sys_platform == 'never'\n" for name in ("torch", "triton", "opencv-python-headless")))
    (home / "others.txt").write_text("\n".join(others))
    run(*install, "--override", home / "never.txt", "--requirement", home / "others.txt", *OF_TORCH)
    run(home / "bin" / "python", ROOT / "python" / "nvfp4" / "tests" / "stub_cuda.py", home / "stubs", "vllm")
    (home / "complete").touch()
    return home


def test(folder, uv, version, wheel, cases):
    """Runs the cases with a version. Returns whether all passed."""
    print(f"== vLLM {version}", flush=True)
    home = environment(folder, uv, version)
    install = (uv, "pip", "install", "--quiet", "--no-deps", "--reinstall", "--cache-dir", folder / "cache", "--python", home / "bin" / "python")
    with tempfile.TemporaryDirectory() as copy:
        # setuptools writes beside the sources.
        shutil.copytree(HERE.parent, pathlib.Path(copy) / "plugin", ignore=shutil.ignore_patterns("*.egg-info", "build"))
        run(*install, wheel, pathlib.Path(copy) / "plugin")
    settings = {"LD_LIBRARY_PATH": home / "stubs", "VLLM_CACHE_ROOT": home / "cache", "PATH": "/usr/bin:/bin", "HOME": home}
    return subprocess.run([home / "bin" / "python", HERE / "on_the_cpu.py", *cases], env=settings).returncode == 0


def newest():
    with urllib.request.urlopen("https://pypi.org/pypi/vllm/json", timeout=60) as answer:
        return json.load(answer)["info"]["version"]


def main():
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
    tools = folder / "tools"
    if not (tools / "bin" / "uv").exists():
        run(sys.executable, "-m", "venv", tools)
        run(tools / "bin" / "pip", "install", "--quiet", "uv", "maturin>=1.7,<2")
    wheel = options.wheel
    if wheel is None:
        run(
            tools / "bin" / "maturin", "build", "--quiet", "--release", "--locked", "--out", folder / "nvfp4",
            "--manifest-path", ROOT / "python" / "nvfp4" / "Cargo.toml",
        )  # fmt: skip
        wheel = max((folder / "nvfp4").glob("nvfp4-*.whl"), key=lambda path: path.stat().st_mtime)
    versions = options.versions or (ALL if options.all else [newest()] if options.newest else FOUR)
    passed = {version: test(folder, tools / "bin" / "uv", version, wheel.resolve(), words[at + 1 :]) for version in versions}
    for version, ok in passed.items():
        print(f"vLLM {version}: {'passed' if ok else 'FAILED'}")
    return 0 if all(passed.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
