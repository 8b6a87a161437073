"""The pytest plugin and the entry point of Triton, on projects that do not know the emulator."""

import functools
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from ptx_emulator import _import  # noqa: E402

PROJECT = """
import pytest, torch, triton, triton.language as tl

@triton.jit
def scale(x, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i, mask=i < n) * 2, mask=i <= n)

@triton.jit
def count(out):
    tl.store(out, tl.load(out) + 1)

@pytest.mark.parametrize("n", [1024, 1000])
def test_scale(n):
    x = torch.rand(n, device="cuda")
    out = torch.empty_like(x)
    scale[(1,)](x, out, n, B=1024)
    torch.testing.assert_close(out, 2 * x)

def test_count():
    out = torch.zeros(1, device="cuda")
    count[(4,)](out)

@pytest.mark.ptx_emulator(allow="data-race")
def test_count_allowed():
    test_count()

def test_right_again():
    test_scale(1024)
"""


def environment():
    return {name: value for name, value in os.environ.items() if not name.startswith("PTX_EMULATOR")}


def run_pytest(pytester, *arguments):
    """Runs the project in a process without our environment variables, as on a machine without a GPU."""
    pytester.makepyfile(PROJECT)
    command = [sys.executable, "-m", "pytest", "--ptx-gpu", "h200", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=pytester.path, timeout=300)
    return done.stdout + done.stderr


def test_faulty_tests_fail_and_later_tests_run(pytester):
    text = run_pytest(pytester, "--junitxml=report.xml")
    assert "2 failed, 3 passed" in text, text
    assert "fault[out-of-bounds]" in text and "byte 4000 of out of 4000 bytes" in text
    assert ".py:6:" in text and "fault[data-race]" in text
    assert "launches on an emulated h200, level default" in text
    cases = ElementTree.parse(pytester.path / "report.xml").iter("testcase")
    found = {case.get("name"): [one.get("value") for one in case.iter("property") if one.get("name") == "ptx_fault"]
             for case in cases}  # fmt: skip
    assert found["test_scale[1000]"] == ["out-of-bounds"] and found["test_count"] == ["data-race"]
    assert found["test_right_again"] == []
    cases = ElementTree.parse(pytester.path / "report.xml").iter("testcase")
    launches = [one.get("value") for case in cases for one in case.iter("property") if one.get("name") == "ptx_launches"]
    assert launches == ["1"] * 5


def test_options_reach_the_launches(pytester):
    text = run_pytest(pytester, "--ptx-level=machine", "--ptx-schedules=3", "--ptx-limit=30s")
    assert "1 failed, 4 passed" in text and "level machine" in text, text
    assert "level: `hard` is not a level" in run_pytest(pytester, "--ptx-level=hard")


def test_explored_launches_name_the_order_of_a_fault(pytester):
    text = run_pytest(pytester, "--ptx-explore=3", "--junitxml=report.xml", "-k", "count or right_again")
    assert "1 failed, 2 passed" in text and "under the schedule order:" in text, text
    assert 'name="ptx_schedule" value="order:' in (pytester.path / "report.xml").read_text()
    assert "explore: 'soon'; expected a number of seconds" in run_pytest(pytester, "--ptx-explore=soon")
    assert "leave out timed" in run_pytest(pytester, "--ptx-explore=1", "--ptx-schedules=3")


def test_workers_of_xdist_emulate(pytester):
    pytest.importorskip("xdist")
    text = run_pytest(pytester, "-n2")
    assert "2 failed, 3 passed" in text and "fault[data-race]" in text, text


def test_unchanged_scripts_run(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PROJECT + "\ntest_right_again()\nprint('right', torch.cuda.get_device_name())\ntest_count()\n")
    environment_ = {**environment(), "PTX_EMULATOR": "1", "PTX_EMULATOR_GPU": "b200"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment_, timeout=300)
    assert "right NVIDIA B200" in done.stdout, done.stderr
    assert done.returncode == 1 and "ptx_emulator._errors.Fault: fault[data-race]" in done.stderr
    other = subprocess.run(
        [sys.executable, "-m", "ptx_emulator", "--allow", "data-race", script],
        capture_output=True, text=True, env=environment(), timeout=300,
    )  # fmt: skip
    assert other.returncode == 0 and "right NVIDIA H200" in other.stdout, other.stderr


@pytest.mark.parametrize("program", [
    "import triton, torch; print(torch.cuda.get_device_name())",
    "import torch, triton; print(torch.cuda.get_device_name())",
    "import os; os.environ['TRITON_DEFAULT_BACKEND'] = 'nvidia'; import triton; print(triton.runtime.driver.active)",
])  # fmt: skip
def test_triton_and_pytorch_may_come_in_any_order(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          env={**environment(), "PTX_EMULATOR": "1"}, timeout=300)  # fmt: skip
    assert "H200" in done.stdout or "ptx_emulator" in done.stdout, done.stderr


def calls_from(module, call):
    """A function of a module that calls another function."""
    names = {"__name__": module}
    exec("def outer(call): return call()", names)
    return functools.partial(names["outer"], call)


def test_pytorch_asks_if_it_calls_triton_itself():
    asked = _import._asked_by_torch
    assert calls_from("project", calls_from("torch.utils._triton", calls_from("triton.runtime.driver", asked)))()
    # A kernel in an autograd function.
    launch = calls_from("project.kernels", calls_from("triton.runtime.jit", calls_from("ptx_emulator.backend.driver", asked)))
    assert not calls_from("torch.autograd.function", launch)()


def test_nothing_happens_unless_it_may():
    program = "import torch, triton; print(torch.cuda.is_available())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          env={**environment(), "PTX_EMULATOR": "0"}, timeout=300)  # fmt: skip
    assert done.stdout.strip() == "False", done.stderr
