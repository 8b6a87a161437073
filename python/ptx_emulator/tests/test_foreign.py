"""The command that runs other projects' tests, on a project with one test of each outcome."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("xdist")
sys.path.insert(0, str(Path(__file__).parents[1] / "foreign"))
import foreign_report  # noqa: E402
import foreign_tests  # noqa: E402

TESTS = """
import time

import numpy as np
import pytest
import ptx_emulator
from kernels import DOUBLE

def test_right():
    ptx_emulator.launch(DOUBLE, block=32, args=[np.ones(32, np.float32), np.zeros(32, np.float32), 32])

def test_fault():
    ptx_emulator.launch(DOUBLE, block=32, args=[np.ones(8, np.float32), np.zeros(8, np.float32), 32])

def test_no_launch(): pass

def test_skipped(): pytest.skip("no")

def test_slow(): time.sleep(60)

def test_wrong(): assert 1 == 2
"""
PROJECT = {"source": "https://example.org", "files": ["tests/test_*.py"], "leave_out": {"tests/test_out.py": "no"}}
CAUSES = [
    {"message": foreign_report.TOO_LONG, "cause": "time", "why": "long"},
    {"fault": "out-of-bounds", "cause": "fault", "why": "overrun"},
    {"message": "No module named '(\\w+)'", "cause": "environment", "why": "needs \\1"},
]


@pytest.fixture
def project(tmp_path, monkeypatch):
    folder = tmp_path / "project"
    (folder / "tests").mkdir(parents=True)
    (folder / "tests/test_one.py").write_text(TESTS)
    (folder / "tests/test_many.py").write_text(
        "import pytest\n@pytest.mark.parametrize('n', range(50))\ndef test_it(n): pass\n"
    )
    (folder / "tests/test_import.py").write_text("import absent_package\n")
    (folder / "tests/test_out.py").write_text("raise SystemExit\n")
    paths = [str(Path(__file__).parent)]
    monkeypatch.setattr(
        foreign_tests, "PROJECTS", {"projects": {"p": {**PROJECT, "paths": paths}}, "causes": CAUSES}
    )
    return folder


def run(monkeypatch, record, *arguments):
    monkeypatch.setattr(sys, "argv", ["foreign_tests.py", str(record), "--test-seconds=3", "--per-file=6", *arguments])
    foreign_tests.main()
    return json.loads(record.read_text())["p"]


def test_outcomes_and_causes_are_recorded(project, tmp_path, monkeypatch):
    entry = run(monkeypatch, tmp_path / "record.json", f"p@1={project}")
    assert entry["files"]["tests/test_one.py"] == {
        "tests": 6, "passed": 2, "passed_without_launch": 2, "skipped": 1, "not_reached": 0,
        "failed": {"fault": 1, "time": 1, "unexplained": 1},
    }  # fmt: skip
    assert entry["files"]["tests/test_many.py"]["tests"] == 50 and entry["files"]["tests/test_many.py"]["passed"] == 6
    assert entry["files"]["tests/test_import.py"]["failed"] == {"environment": 1}
    reasons = {failure["why"] for failure in entry["failures"]}
    assert {"long", "overrun", "needs absent_package"} < reasons
    assert entry["revision"] == "1" and "tests/test_out.py" not in entry["files"]
    text = foreign_report.table({"p": entry})
    assert "| 56 | 13 | 0 | 1 | 0 | 8 | 1 | 0 | 1 | 1 | 1 |" in text and "| overrun | 1 |" in text


def test_causes_can_be_named_later(project, tmp_path, monkeypatch):
    record = tmp_path / "record.json"
    run(monkeypatch, record, f"p@1={project}")
    later = [*CAUSES, {"project": "p", "test": "test_wrong", "cause": "environment", "why": "one is not two"}]
    monkeypatch.setitem(foreign_tests.PROJECTS, "causes", later)
    entry = run(monkeypatch, record, "--again")
    assert entry["files"]["tests/test_one.py"]["failed"] == {"environment": 1, "fault": 1, "time": 1}


def test_tests_behind_the_time_of_the_run_are_not_reached(project, tmp_path, monkeypatch):
    entry = run(monkeypatch, tmp_path / "record.json", "--seconds=0", f"p@1={project}")
    assert entry["files"]["tests/test_many.py"]["not_reached"] == 6


def test_tests_with_launches_are_counted_apart():
    tests = [{"file": "f", "outcome": "passed", "ptx_launches": "3"}, {"file": "f", "outcome": "passed"}]
    assert foreign_report.counted(tests, [], {"f": 9})["f"] == {
        "tests": 9, "passed": 2, "passed_without_launch": 1, "skipped": 0, "not_reached": 0, "failed": {},
    }  # fmt: skip
