"""`python -m ptx_emulator script.py ...`: runs a script with the emulator as its GPU."""

import argparse
import pathlib
import runpy
import sys

from . import _install


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m ptx_emulator",
        description="Runs a Triton or PyTorch script with an emulated GPU, also on a machine that has one.",
    )
    parser.add_argument("--gpu", help="h200 (default), b200 or rtx-5090")
    parser.add_argument("--level", help="machine, default or strict")
    parser.add_argument("--schedule", help="fair, worst or seed:N")
    parser.add_argument("--schedules", help="run each launch under N schedules")
    parser.add_argument(
        "--explore", metavar="S", help="run each launch in all orders of its warps, for at most S seconds; for small launches"
    )
    parser.add_argument(
        "--timed", nargs="?", const=True, metavar="GPU", help="predict times; no hazards are searched for"
    )
    parser.add_argument("--limit", help="seconds (60s) or instructions of a warp, per launch")
    parser.add_argument("--allow", help="kinds of hazards to ignore, with commas")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = vars(parser.parse_args())
    script, arguments, module = options.pop("script"), options.pop("arguments"), options.pop("module")
    _install.install(**options)
    sys.argv = [script, *arguments]
    if module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(pathlib.Path(script).resolve().parent)
        runpy.run_path(script, run_name="__main__")


main()
