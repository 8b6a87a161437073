"""The self-test of a GPU's kernels, before the engine starts.

`nvfp4` uses kernels that have only run in an emulator after they have passed a self-test on the GPU. The command `nvfp4 selftest` runs it
in processes of its own, and keeps the verdicts per GPU, driver and code. Until then the engine's kernels serve.
"""

import fcntl
import os
import pathlib
import shutil
import subprocess

SECONDS = 900
"""The time limit. The first self-test on a GPU takes about a minute, most of it in the driver's compiler."""


def run_if_asked(choices):
    """Runs `nvfp4 selftest` if the plugin's variable `SELFTEST` is 1. What already has a verdict is not tested again."""
    if not choices.is_set("SELFTEST"):
        return
    command = shutil.which("nvfp4")
    if command is None:
        choices.note(f"{choices.variable('SELFTEST')[0]}: no command `nvfp4` on PATH; `cargo install --path host --features cli` installs it")
        return
    folder = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "nvfp4"
    folder.mkdir(parents=True, exist_ok=True)
    # Engines have many processes. The first one tests, and the others wait for its verdicts.
    with open(folder / "selftest.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            done = subprocess.run([command, "selftest"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            choices.note(f"`nvfp4 selftest` took more than {SECONDS} s and was ended; kernels without a verdict are not used")
            return
    if done.returncode != 0:
        choices.note(f"`nvfp4 selftest` ended with {done.returncode}; failed kernels are not used:\n{done.stderr[-2000:]}")
