"""The pytest plugin: options, the marker `ptx_emulator`, and what reports say about launches.

Without a GPU, tests that import Triton run in the emulator by themselves. The options have the prefix `--ptx-`, because
projects define `--gpu` and the like themselves.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from . import _errors, _install, _process

_NAMES = ("level", "schedule", "schedules", "explore", "timed", "limit", "allow")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ptx-emulator", "GPU kernels in the emulator")
    group.addoption(
        "--ptx-gpu",
        metavar="GPU",
        help="run GPU kernels on an emulated h200, b200 or rtx-5090, also on a machine that has a GPU; "
        "off: never emulate. Default: emulate an h200 if there is no GPU",
    )
    group.addoption("--ptx-level", help="machine, default or strict")
    group.addoption("--ptx-schedule", help="order of warps: fair, worst or seed:N")
    group.addoption("--ptx-schedules", help="run each launch under N schedules; a fault names its schedule")
    group.addoption(
        "--ptx-explore",
        metavar="S",
        help="run each launch in all orders of its warps and asynchronous operations, for at most S seconds; a fault "
        "names an order that shows it. For small launches",
    )
    group.addoption(
        "--ptx-timed",
        nargs="?",
        const="",
        metavar="GPU",
        help="predict the time of each launch on the GPU; no hazards are searched for",
    )
    group.addoption("--ptx-limit", help="limit per launch: seconds (60s) or instructions of a warp; default: 60s")
    group.addoption("--ptx-allow", metavar="KINDS", help="kinds of hazards to ignore, with commas between them")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "ptx_emulator(allow=..., level=..., schedule=..., schedules=..., explore=..., limit=...): options of the launches of a test; "
        "allow: kinds of faults that the test may have",
    )
    gpu = config.getoption("--ptx-gpu")
    if gpu == "off":
        os.environ[_install.ASKED] = "0"
        return
    try:
        base = _install.from_environment()
        if config.getoption("--ptx-limit") is None and "PTX_EMULATOR_LIMIT" not in os.environ:
            base = _install.checked(base, limit="60s")
        if gpu is not None:
            base = _install.checked(base, gpu=gpu)
        for name in _NAMES:
            value = config.getoption(f"--ptx-{name}")
            if value is not None:
                base = _install.checked(base, **{name: (value or base.gpu) if name == "timed" else value})
        if gpu is not None:
            os.environ[_install.ASKED] = "1"
            os.environ["PTX_EMULATOR_GPU"] = gpu
            _install.install(gpu=gpu)
    except ValueError as error:
        raise pytest.UsageError(f"ptx-emulator: {error}") from error
    config.stash[_base] = base


_base: pytest.StashKey[_install.Settings] = pytest.StashKey()
_launches: pytest.StashKey[int] = pytest.StashKey()
"""Launches of the process before the test."""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None):
    """Applies the test's options, and leaves a working context for the next test."""
    base = item.config.stash.get(_base, None)
    if base is None:
        return (yield)
    settings = base
    for marker in reversed(list(item.iter_markers("ptx_emulator"))):
        if marker.args or not set(marker.kwargs) <= set(_NAMES):
            raise pytest.UsageError(f"{item.nodeid}: the marker ptx_emulator takes {', '.join(_NAMES)} by name")
        try:
            settings = _install.checked(settings, **marker.kwargs)
        except ValueError as error:
            raise pytest.UsageError(f"{item.nodeid}: ptx_emulator: {error}") from error
    state = _install.state
    if not state.installed:
        # Triton may still be imported by the test. Its first use takes these settings.
        state.pending = settings
    else:
        _install.configure(_with_gpu(settings))
    state.warnings.clear()
    state.times.clear()
    item.stash[_launches] = state.launches
    try:
        return (yield)
    finally:
        if state.installed:
            _process.recover()


def _with_gpu(settings: _install.Settings) -> _install.Settings:
    return _install.checked(settings, gpu=_install.state.settings.gpu)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = yield
    if call.when != "call" or not _install.state.installed:
        return report
    state = _install.state
    fault = _fault_of(call.excinfo.value) if call.excinfo else None
    properties: list[tuple[str, Any]] = []
    if launches := state.launches - item.stash.get(_launches, state.launches):
        properties.append(("ptx_launches", launches))
    if fault is not None:
        properties += [("ptx_fault", fault.kind), ("ptx_kernel", fault.entry)]
        if fault.file:
            properties.append(("ptx_source", f"{fault.file}:{fault.line}"))
        if fault.schedule:
            properties.append(("ptx_schedule", fault.schedule))
    if state.warnings:
        texts = list(dict.fromkeys(warning["text"] for warning in state.warnings))
        report.sections.append(("ptx-emulator warnings", "\n".join(texts)))
        properties.append(("ptx_warnings", len(texts)))
    if state.times:
        lines = [f"{kernel}: {us:.2f} us" for kernel, us in state.times]
        report.sections.append(("ptx-emulator predicted times, not measured", "\n".join(lines)))
        properties.append(("ptx_predicted_us", round(sum(us for _, us in state.times), 3)))
    # The report of the teardown takes them from the item; JUnit reads that one.
    item.user_properties += properties
    report.user_properties += properties
    return report


def _fault_of(error: BaseException | None) -> _errors.LaunchFailed | None:
    """The fault behind an exception."""
    seen = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, _errors.LaunchFailed):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None


def pytest_terminal_summary(terminalreporter, exitstatus: int, config: pytest.Config) -> None:
    state = _install.state
    if state.launches:
        terminalreporter.write_line(
            f"ptx-emulator: {state.launches} launches on an emulated {state.settings.gpu}, level {state.settings.level}"
        )
