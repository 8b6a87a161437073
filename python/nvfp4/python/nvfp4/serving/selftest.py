"""The self-test of a GPU's kernels, before the engine starts.

`nvfp4` uses kernels that have only run in an emulator after they have passed a self-test on the GPU. The command `nvfp4 selftest` runs it
in processes of its own, and keeps the verdicts per GPU, driver and code. Until then the engine's kernels serve.

This module starts the command once per GPU, driver and command, and keeps how it ended. So an engine does not wait for its time limit at
every start.
"""

import fcntl
import hashlib
import json
import os
import pathlib
import shutil
import signal
import subprocess

SECONDS = 900
"""The time limit. The first self-test on a GPU takes about a minute, most of it in the driver's compiler."""

PASSED, FAILED, TIMED_OUT, UNTESTED = "passed", "failed", "timed out", "untested"
"""How the command ended: all kernels passed, a kernel failed, the time limit, or another error."""

_REMEDIES = {
    PASSED: "`nvfp4 selftest` has passed, but its verdicts are for other code than this package's; install the command and the package from"
    " one checkout",
    FAILED: "`nvfp4 selftest` has failed on this GPU; `nvfp4 selftest --again` repeats it",
    TIMED_OUT: f"`nvfp4 selftest` took more than {SECONDS} s on this GPU; run it by hand, without the time limit",
    UNTESTED: "`nvfp4 selftest` ended with an error on this GPU; run it by hand to see its messages",
}


def run_if_asked(choices):
    """Runs `nvfp4 selftest` if the plugin's variable `SELFTEST` is 1 and it has not run before. `choices.selftest` is then how it ended."""
    if not choices.is_set("SELFTEST"):
        return
    variable = choices.variable("SELFTEST")[0]
    command = shutil.which("nvfp4")
    if command is None:
        choices.note(f"{variable}: no command `nvfp4` on PATH; `cargo install --path host --features cli` installs it")
        return
    folder = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "nvfp4"
    folder.mkdir(parents=True, exist_ok=True)
    # Engines have many processes. The first one tests, and the others wait for its verdicts.
    with open(folder / "selftest.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        key = _key(command)
        kept = folder / f"engine-selftest-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
        choices.selftest = _kept(kept, key)
        if choices.selftest is None:
            choices.selftest, details = _run(command)
            kept.write_text(json.dumps({"key": key, "ended": choices.selftest}) + "\n")
            choices.note(f"`nvfp4 selftest` on this machine's GPU: {choices.selftest}{details}")
        elif choices.selftest != PASSED:
            choices.note(f"`nvfp4 selftest` is not run again: {choices.selftest} before; delete {kept} to run it at the next start")


def remedy(choices):
    """Returns what a user can do about a kernel that has no verdict, or a bad one."""
    offer = f"`nvfp4 selftest` tests a GPU's kernels, and {choices.variable('SELFTEST')[0]}=1 runs it once when {choices.engine} starts"
    return _REMEDIES.get(choices.selftest, offer)


def _key(command):
    """Returns what a run belongs to: the GPUs, their driver and the command. The engine's process must not initialize CUDA for that."""
    query = ("nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader")
    try:
        gpus = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        gpus = "GPUs unknown"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    file = pathlib.Path(command).resolve().stat()
    return "; ".join((*gpus.split("\n"), f"visible: {visible}", f"{command} of {file.st_size} bytes from {file.st_mtime_ns}"))


def _kept(path, key):
    """Returns how an earlier run ended; `None` if there was none."""
    try:
        kept = json.loads(path.read_text())
        return kept["ended"] if kept["key"] == key and kept["ended"] in _REMEDIES else None
    except (OSError, ValueError, LookupError, TypeError):  # no file, or not one of ours
        return None


def _run(command):
    """Runs the command. Returns how it ended, and details for the log."""
    try:
        # A process group of its own: the command's children end with it.
        child = subprocess.Popen(
            [command, "selftest"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
    except OSError as error:
        return UNTESTED, f" ({error})"
    try:
        _, errors = child.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        return TIMED_OUT, f" after {SECONDS} s, and was ended; kernels without a verdict are not used"
    if child.returncode in (0, 1):
        return (FAILED, "; failed kernels are not used") if child.returncode else (PASSED, "")
    return UNTESTED, f" (exit status {child.returncode}):\n{errors[-2000:]}"
