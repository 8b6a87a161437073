"""Environments with PyTorch or an inference engine and without CUDA's libraries, for tests on a machine without a GPU.

`stub_cuda.py` replaces the libraries. An environment takes one to three gigabytes; it is kept for the next run. `versions.json` in
`benches/lab` has the results of the recorded runs.
"""

import datetime
import json
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECORD = ROOT / "benches" / "lab" / "versions.json"

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
    """Makes the environment of a version of an engine, and returns its folder. An environment that is complete is used again."""
    home = folder / version
    if not (home / "complete").exists():
        wheel = _download(folder, engine, version)
        torch, others = _requirements(wheel, engine)
        _fill(folder, home, (wheel, torch), (*others, *engine.more), engine.never, engine.package)
    return home


def make_with_torch(folder, version, more):
    """Makes an environment with a version of PyTorch and more packages, and returns its folder."""
    home = folder / f"torch-{version}"
    if not (home / "complete").exists():
        _fill(folder, home, (f"torch=={version}",), more)
    return home


def _fill(folder, home, alone, others, never=(), *stubbed):
    """Makes an environment.

    :param alone: what is installed without its dependencies.
    :param others: what is installed with them.
    :param never: dependencies that are not installed.
    :param stubbed: packages beside PyTorch that are linked with CUDA's libraries.
    """
    uv = tools(folder) / "uv"
    run(uv, "venv", "--quiet", "--clear", "--python", sys.executable, home)
    install = (uv, "pip", "install", "--quiet", "--cache-dir", folder / "cache", "--python", home / "bin" / "python")
    run(*install, "--no-deps", *alone)
    (home / "never.txt").write_text("".join(f"{name} ; sys_platform == 'never'\n" for name in ("torch", *never)))
    (home / "others.txt").write_text("\n".join(others))
    run(*install, "--override", home / "never.txt", "--requirement", home / "others.txt", *OF_TORCH)
    run(home / "bin" / "python", ROOT / "python" / "nvfp4" / "tests" / "stub_cuda.py", home / "stubs", *stubbed)
    (home / "complete").touch()


def remove(folder, home, *packages):
    """Removes an environment, and the large packages of it that are kept for other environments."""
    shutil.rmtree(home)
    run(tools(folder) / "uv", "cache", "clean", "--quiet", "--cache-dir", folder / "cache", *packages)


def install(folder, home, wheel, plugin=None):
    """Installs the wheel of `nvfp4`, and a plugin from its sources."""
    line = (tools(folder) / "uv", "pip", "install", "--quiet", "--no-deps", "--reinstall", "--cache-dir", folder / "cache")
    line += ("--python", home / "bin" / "python", wheel)
    if plugin is None:
        run(*line)
        return
    with tempfile.TemporaryDirectory() as copy:
        # setuptools writes beside the sources.
        shutil.copytree(plugin, pathlib.Path(copy) / "plugin", ignore=shutil.ignore_patterns("*.egg-info", "build"))
        run(*line, pathlib.Path(copy) / "plugin")


def settings(home):
    """Returns the environment variables of a test."""
    return {"LD_LIBRARY_PATH": str(home / "stubs"), "PATH": "/usr/bin:/bin", "HOME": str(home)}


def run_cases(home, script, cases, more=None):
    """Runs cases of an `on_the_cpu.py` and prints its output.

    :returns: whether all passed, and the result for :func:`record`.
    """
    line, lines = [home / "bin" / "python", script, *cases], []
    with subprocess.Popen(line, env=settings(home) | (more or {}), stdout=subprocess.PIPE, text=True) as process:
        for text in process.stdout:
            print(text, end="", flush=True)
            lines.append(text.rstrip("\n"))
    last = re.search(r", PyTorch (\S+): (\d+) of (\d+) cases passed$", lines[-1] if lines else "")
    if last is None:  # it ended before its first case
        return False, None
    ended = [match.groups() for match in map(re.compile(r"(.+?): (passed|FAILED)(: .*)?").fullmatch, lines) if match]
    found = {
        "torch": last[1],
        "passed": int(last[2]),
        "cases": int(last[3]),
        "without_check": [name for name, how, reason in ended if how == "passed" and reason],
        "failed": [name for name, how, _ in ended if how == "FAILED"],
    }
    return process.returncode == 0, found


def record(package, version, found):
    """Writes the result of a version of a package to `versions.json`."""
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    found = {"date": datetime.date.today().isoformat(), "python": platform.python_version()} | found
    of_package = recorded.get(package, {}) | {version: found}
    recorded[package] = {version: of_package[version] for version in sorted(of_package, key=numbers)}
    RECORD.write_text(json.dumps(recorded, indent=1) + "\n")


def numbers(version):
    """Returns the numbers of a version, for comparisons."""
    return [int(number) for number in re.findall(r"\d+", version)]


def newest(package):
    """Returns the newest version of a package that pip finds."""
    done = subprocess.run([sys.executable, "-m", "pip", "index", "versions", package], check=True, capture_output=True, text=True)
    return re.match(rf"{package} \(([^)]+)\)", done.stdout)[1]


def add_options(parser):
    """Adds the options of commands that test several versions."""
    parser.add_argument("--newest", action="store_true")
    parser.add_argument("--remove", action="store_true")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--wheel", type=pathlib.Path)
    parser.add_argument("--folder", type=pathlib.Path, default=ROOT / "target" / "engines")


def prepare(options):
    """Returns the folder of the environments and the wheel of `nvfp4`."""
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return folder, (options.wheel or build_wheel(folder)).resolve()


def run_all(name, versions, test):
    """Tests versions, and prints which passed. Returns the exit status."""
    passed = {version: test(version) for version in versions}
    for version, ok in passed.items():
        print(f"{name} {version}: {'passed' if ok else 'FAILED'}")
    return 0 if all(passed.values()) else 1
