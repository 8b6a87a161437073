"""Runs the tests of other projects on the emulator, and records which pass and why the others fail.

    foreign_tests.py [options] RECORD NAME@REVISION=FOLDER...

NAME is a project of projects.toml, FOLDER its source tree, REVISION what the record calls it. Nothing is fetched. The tests run
in the Python of this command, which needs pytest, pytest-xdist, PyTorch, Triton, ptx-emulator and what the project needs. The
record's entries of the named projects are replaced. `--again` reads the causes of a record's failures again from projects.toml.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ElementTree

from foreign_report import cause_of, causes_in, counted

HERE = pathlib.Path(__file__).resolve().parent
PROJECTS = tomllib.loads((HERE / "projects.toml").read_text())
PACKAGES = ("ptx-emulator", "torch", "triton", "pytest")
LONGEST_MESSAGE = 500


def version(package: str) -> str | None:
    """Returns the version of an installed package. Not every project needs all of them."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=pathlib.Path)
    parser.add_argument("projects", nargs="*", metavar="NAME@REVISION=FOLDER")
    parser.add_argument("--again", action="store_true", help="run nothing; name the causes of the recorded failures again")
    parser.add_argument("--seed", default="1", help="draws the sample")
    parser.add_argument("--per-file", type=int, default=10, help="tests of a file, at most")
    parser.add_argument("--seconds", type=float, default=600, help="time of a project; later tests are not reached")
    parser.add_argument("--test-seconds", type=float, default=120, help="time of a test")
    parser.add_argument("--launch-limit", default="60s", help="--ptx-limit of the plugin")
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gigabytes", type=int, default=8, help="memory of a worker")
    parser.add_argument("--keep", type=pathlib.Path, help="folder for the output and the JUnit report of each project")
    return parser.parse_intermixed_args()


def files_of(name: str, folder: pathlib.Path) -> list[str]:
    """Returns a project's files of tests, relative to its folder."""
    project = PROJECTS["projects"][name]
    files = sorted({str(path.relative_to(folder)) for pattern in project["files"] for path in folder.glob(pattern)})
    files = [one for one in files if one not in project.get("leave_out", {})]
    if not files:
        sys.exit(f"{folder}: it has no file like {', '.join(project['files'])}; give the root of {name}'s source tree")
    return files


def run(name: str, folder: pathlib.Path, files: list[str], asked: argparse.Namespace, work: pathlib.Path) -> float:
    """Runs a project's tests. Returns the seconds. `work` gets the JUnit report, the output and the number of tests by file."""
    project = PROJECTS["projects"][name]
    paths = [HERE, *(folder / path for path in project.get("paths", ()))]
    environment = {
        **os.environ,
        **project.get("environment", {}),
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "OMP_NUM_THREADS": "1",
        "FOREIGN_SEED": asked.seed,
        "FOREIGN_PER_FILE": str(asked.per_file),
        "FOREIGN_TEST_SECONDS": str(asked.test_seconds),
        "FOREIGN_DEADLINE": str(time.time() + asked.seconds),
        "FOREIGN_COUNTS": str(work / "counts.json"),
    }
    command = [sys.executable, "-m", "pytest", "-p", "foreign_sample", "-p", "no:cacheprovider", "-o", "addopts=", "-o", "junit_family=xunit1"]
    command += [f"--rootdir={folder}", "--continue-on-collection-errors", "--tb=short", "-q", f"--junitxml={work / 'junit.xml'}"]
    command += ["-n", str(project.get("workers", asked.workers))]
    command += ["--ptx-gpu", project.get("gpu", asked.gpu), "--ptx-limit", asked.launch_limit, *project.get("arguments", ()), *files]
    memory = asked.gigabytes << 30
    began = time.time()
    with open(work / "output.txt", "w") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            start_new_session=True, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (memory, memory)),
        )  # fmt: skip
        try:
            process.wait(asked.seconds + 2 * asked.test_seconds + 300)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return time.time() - began


def outcomes(report: pathlib.Path, files: list[str]) -> list[dict]:
    """Returns the tests of a JUnit report: file, name, outcome, the message and the emulator's properties."""
    by_module = {file.removesuffix(".py").replace("/", "."): file for file in files}
    found = []
    for case in ElementTree.parse(report).iter("testcase"):
        # A file that cannot be imported has no class name, and is the name.
        module = case.get("classname") or case.get("name", "")
        while module and module not in by_module:
            module = module.rpartition(".")[0]
        test = {"file": by_module.get(module, "?"), "test": case.get("name", ""), "outcome": "passed"}
        test |= {one.get("name"): one.get("value") for one in case.iter("property") if one.get("name", "").startswith("ptx_")}
        for one in case:
            if one.tag in ("failure", "error", "skipped"):
                test["outcome"] = "skipped" if one.tag == "skipped" else "failed"
                test |= {"message": one.get("message") or "", "text": one.text or ""}
                break
        found.append(test)
    return found


def without_folders(value: dict | list | str, folder: pathlib.Path) -> dict | list | str:
    """Returns a failure whose paths begin in the project or in a package."""
    if isinstance(value, dict):
        return {key: without_folders(one, folder) for key, one in value.items()}
    if isinstance(value, list):
        return [without_folders(one, folder) for one in value]
    return re.sub(r"[^\s'\"(]*/(site-packages/|lib/python3[.]\d+/)", "", value).replace(f"{folder}/", "")


def recorded(
    name: str, revision: str, folder: pathlib.Path, asked: argparse.Namespace, seconds: float, tests: list[dict], counts: dict[str, int]
) -> dict:
    """Returns a project's entry of the record."""
    failures = []
    for test in tests:
        if test["outcome"] == "failed":
            properties = {key: value for key, value in test.items() if key.startswith("ptx_") and key != "ptx_warnings"}
            ends = [line[2:].strip() for line in test["text"].splitlines() if line.startswith("E  ")]
            lines = [line.strip() for line in [*test["message"].splitlines(), *ends] if "full report in element text" not in line]
            message = "\n".join(dict.fromkeys(lines))[:LONGEST_MESSAGE]
            place = [line for line in test["text"].splitlines() if line and not line.startswith(("E ", " "))]
            failure = {"file": test["file"], "test": test["test"], **properties, "message": message, "places": place[-4:]}
            failures.append(without_folders(failure, folder))
    name_causes(name, failures)
    return {
        "date": datetime.date.today().isoformat(),
        "revision": revision,
        "source": PROJECTS["projects"][name]["source"],
        "versions": {"python": platform.python_version(), **{one: version(one) for one in PACKAGES}},
        "gpu": PROJECTS["projects"][name].get("gpu", asked.gpu),
        "selection": {
            "files": PROJECTS["projects"][name]["files"],
            "left_out": PROJECTS["projects"][name].get("leave_out", {}),
            "seed": asked.seed,
            "tests_of_a_file": asked.per_file,
        },
        "limits": {"run_s": asked.seconds, "test_s": asked.test_seconds, "launch": asked.launch_limit, "memory_gib": asked.gigabytes},
        "seconds": round(seconds),
        "files": counted(tests, failures, counts),
        "failures": failures,
    }


def name_causes(project: str, failures: list[dict]) -> None:
    """Adds the cause of each failure, and why it is that one."""
    for failure in failures:
        failure["cause"], failure["why"] = cause_of(project, failure, PROJECTS["causes"])


def main() -> None:
    asked = options()
    record = json.loads(asked.record.read_text()) if asked.record.exists() else {}
    if asked.again:
        for name, entry in record.items():
            name_causes(name, entry["failures"])
            for file, counts in entry["files"].items():
                counts["failed"] = causes_in(file, entry["failures"])
    for one in asked.projects:
        words, _, folder = one.partition("=")
        name, _, revision = words.partition("@")
        if name not in PROJECTS["projects"] or not revision or not folder:
            sys.exit(f"{one}: expected NAME@REVISION=FOLDER with NAME one of {', '.join(PROJECTS['projects'])}")
        with tempfile.TemporaryDirectory() as temporary:
            work = asked.keep.resolve() / name if asked.keep else pathlib.Path(temporary)
            work.mkdir(parents=True, exist_ok=True)
            for old in ("junit.xml", "counts.json"):
                (work / old).unlink(missing_ok=True)
            folder = pathlib.Path(folder).resolve()
            files = files_of(name, folder)
            seconds = run(name, folder, files, asked, work)
            if not (work / "junit.xml").exists() or not (work / "counts.json").exists():
                sys.exit(f"{name}: pytest ran no test; {'see ' + str(work / 'output.txt') if asked.keep else '--keep FOLDER keeps its output'}")
            counts = json.loads((work / "counts.json").read_text())
            record[name] = recorded(name, revision, folder, asked, seconds, outcomes(work / "junit.xml", files), counts)
        summary = {key: sum(file[key] for file in record[name]["files"].values()) for key in ("passed", "skipped", "not_reached")}
        print(f"{name}: {summary}, {len(record[name]['failures'])} failed, {seconds:.0f} s", flush=True)
        asked.record.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    asked.record.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
