"""Environments with an inference engine and without CUDA's libraries, for tests on a machine without a GPU.

`stub_cuda.py` replaces the libraries. An environment takes one to three gigabytes; it is kept for the next run.
"""

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]

# The Python packages that PyTorch imports; its other dependencies are CUDA's.
OF_TORCH = ("filelock", "typing-extensions", "setuptools<81", "sympy", "networkx", "jinja2", "fsspec", "numpy")


class Engine(NamedTuple):
    """An engine's package."""

    package: str
    left_out: str
    """A regular expression of dependencies that run only on a GPU, or are large and not used by the tests."""
    never: tuple
    """Packages that other packages depend on, and that must not be installed."""
    more: tuple = ()
    """Requirements beside the engine's own."""


def run(*line, **options):
    """Runs a command, whose failure is an exception."""
    subprocess.run([str(part) for part in line], check=True, **options)


def tools(folder):
    """Returns the folder with `uv` and `maturin`, which are installed if they are missing."""
    found = folder / "tools" / "bin"
    if not (found / "uv").exists():
        run(sys.executable, "-m", "venv", folder / "tools")
        run(found / "pip", "install", "--quiet", "uv", "maturin>=1.7,<2")
    return found


def build_wheel(folder):
    """Builds the wheel of `nvfp4`, and returns it."""
    run(
        tools(folder) / "maturin", "build", "--quiet", "--release", "--locked", "--out", folder / "nvfp4",
        "--manifest-path", ROOT / "python" / "nvfp4" / "Cargo.toml",
    )  # fmt: skip
    return max((folder / "nvfp4").glob("nvfp4-*.whl"), key=lambda path: path.stat().st_mtime)


def _download(folder, engine, version):
    """Returns the engine's wheel."""
    pattern = f"{engine.package}-{version}-*.whl"
    if not list(folder.glob(pattern)):
        line = ("-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", folder, f"{engine.package}=={version}")
        run(sys.executable, *line)
    return next(folder.glob(pattern))


def _requirements(wheel, engine):
    """Returns the requirement of PyTorch in a wheel, and the other requirements without the packages left out."""
    with zipfile.ZipFile(wheel) as file:
        metadata = next(name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        lines = file.read(metadata).decode().splitlines()
    found = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ") and "extra ==" not in line]
    torch = next(line for line in found if line.startswith("torch=="))
    left_out = re.compile(f"({engine.left_out})$", re.IGNORECASE)
    return torch, [line for line in found if not left_out.match(re.match(r"[\w.-]+", line)[0])]


def make(folder, engine, version):
    """Makes the environment of a version, and returns its folder. An environment that is complete is used again."""
    home = folder / version
    if (home / "complete").exists():
        return home
    uv, wheel = tools(folder) / "uv", _download(folder, engine, version)
    torch, others = _requirements(wheel, engine)
    run(uv, "venv", "--quiet", "--clear", "--python", sys.executable, home)
    install = (uv, "pip", "install", "--quiet", "--cache-dir", folder / "cache", "--python", home / "bin" / "python")
    run(*install, "--no-deps", wheel, torch)
    (home / "never.txt").write_text("".join(f"{name} ; sys_platform == 'never'\n" for name in ("torch", *engine.never)))
    (home / "others.txt").write_text("\n".join((*others, *engine.more)))
    run(*install, "--override", home / "never.txt", "--requirement", home / "others.txt", *OF_TORCH)
    run(home / "bin" / "python", ROOT / "python" / "nvfp4" / "tests" / "stub_cuda.py", home / "stubs", engine.package)
    (home / "complete").touch()
    return home


def install(folder, home, wheel, plugin):
    """Installs the wheel of `nvfp4` and a plugin from its sources."""
    line = (tools(folder) / "uv", "pip", "install", "--quiet", "--no-deps", "--reinstall", "--cache-dir", folder / "cache")
    with tempfile.TemporaryDirectory() as copy:
        # setuptools writes beside the sources.
        shutil.copytree(plugin, pathlib.Path(copy) / "plugin", ignore=shutil.ignore_patterns("*.egg-info", "build"))
        run(*line, "--python", home / "bin" / "python", wheel, pathlib.Path(copy) / "plugin")


def settings(home):
    """Returns the environment variables of a test."""
    return {"LD_LIBRARY_PATH": str(home / "stubs"), "PATH": "/usr/bin:/bin", "HOME": str(home)}
