"""The command of the wheel, and its libraries."""

import ctypes
import json
import subprocess
import sys
import sysconfig
from pathlib import Path


from kernels import DOUBLE

COMMAND = Path(sysconfig.get_path("scripts")) / "ptx-emulator"

DRIVER_PROGRAM = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
name = ctypes.create_string_buffer(64)
assert cuda.cuInit(0) == 0 and cuda.cuDeviceGetName(name, 64, 0) == 0
print(name.value.decode())
"""


def run(*arguments):
    return subprocess.run([COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=60)


def test_the_command_launches_and_checks(tmp_path):
    (tmp_path / "k.ptx").write_text(DOUBLE)
    args = [{"pointer": "x"}, {"pointer": "y"}, {"u32": 4}]
    launch = {"ptx": "k.ptx", "entry": "k", "grid": [1, 1, 1], "block": [8, 1, 1], "args": args,
              "buffers": {"x": {"bytes": 16}, "y": {"bytes": 16}}}  # fmt: skip
    (tmp_path / "launch.json").write_text(json.dumps(launch))
    done = run("launch", tmp_path / "launch.json")
    assert done.returncode == 0 and "no fault" in done.stdout, done.stderr
    assert run("check", tmp_path / "k.ptx").returncode == 0


def test_the_command_runs_programs_with_our_libcuda(tmp_path):
    (tmp_path / "program.py").write_text(DRIVER_PROGRAM)
    done = run("run", "--gpu", "b200", "--", sys.executable, tmp_path / "program.py")
    assert done.returncode == 0 and "B200" in done.stdout, done.stderr


def test_libcudart_is_in_the_wheel():
    from ptx_emulator._libcuda import LIB

    # The runtime looks for libcuda.so.1, so it is loaded first.
    ctypes.CDLL(str(LIB / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
    runtime = ctypes.CDLL(str(LIB / "libcudart.so.13"))
    count = ctypes.c_int()
    assert runtime.cudaGetDeviceCount(ctypes.byref(count)) == 0 and count.value == 1
