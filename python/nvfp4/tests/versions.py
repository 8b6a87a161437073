#!/usr/bin/env python3
"""Runs this package's tests, also the slow ones, with several versions of PyTorch on the CPU, each in an environment of its own.

    versions.py               2.11 to 2.15, in their newest patches
    versions.py 2.12.1        this version
    versions.py --newest      the newest version that pip finds

Options: --wheel FILE (the wheel of `nvfp4`; it is built if omitted), --folder FOLDER (environments and packages; about 2 GB per version),
--remove (each environment after its run), --record (writes the results to `benches/lab/versions.json`), and `--` with pytest's arguments
behind it.

Needs Python 3.10 or later, a C++ compiler, readelf and the network. The tests that make checkpoints need the command `nvfp4` in
`NVFP4_COMMAND` or built by cargo, and are skipped without it. No package with CUDA's libraries is installed: `stub_cuda.py` replaces them.
"""

import argparse
import collections
import os
import pathlib
import subprocess
import sys
import xml.etree.ElementTree

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(ROOT / "tests" / "engines"))
import environments

VERSIONS = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
TRANSFORMERS = "5.24.0"
MORE = ("pytest", "pytest-xdist", f"transformers=={TRANSFORMERS}", "peft", "accelerate", "psutil", "ml_dtypes")


def test(folder, version, wheel, options, arguments):
    """Runs the tests with a version. Returns whether all passed."""
    print(f"== PyTorch {version}", flush=True)
    home = environments.make_with_torch(folder, version, MORE)
    environments.install(folder, home, wheel)
    settings = environments.settings(home) | {"TORCHINDUCTOR_CACHE_DIR": str(home / "inductor")}
    if "NVFP4_COMMAND" in os.environ:
        settings["NVFP4_COMMAND"] = os.environ["NVFP4_COMMAND"]
    report = home / "report.xml"
    report.unlink(missing_ok=True)
    line = (home / "bin" / "python", "-m", "pytest", "--quiet", "-n", "auto", "-m", "slow or not slow", "-p", "no:cacheprovider")
    done = subprocess.run([*line, f"--junitxml={report}", *arguments], cwd=HERE.parent, env=settings)
    if options.record and report.exists() and not arguments:
        environments.record("torch", version, {"transformers": TRANSFORMERS} | result(report))
    if options.remove:
        environments.remove(folder, home, "torch")
    return done.returncode == 0


def result(report):
    """Returns the numbers of passed and skipped tests, and the names of those that failed."""
    passed, skipped, failed = 0, collections.Counter(), []
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        children = {child.tag: child for child in case}
        if "failure" in children or "error" in children:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif "skipped" in children:
            skipped[children["skipped"].get("message")] += 1
        else:
            passed += 1
    return {"passed": passed, "skipped": dict(sorted(skipped.items())), "failed": sorted(failed)}


def main():
    """Runs the tests. Returns the exit status."""
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*")
    environments.add_options(parser)
    options = parser.parse_args(words[:at])
    folder, wheel = environments.prepare(options)
    versions = options.versions or ([environments.newest("torch")] if options.newest else VERSIONS)
    return environments.run_all("PyTorch", versions, lambda version: test(folder, version, wheel, options, words[at + 1 :]))


if __name__ == "__main__":
    sys.exit(main())
