"""Installs the emulator as the GPU of Triton and of PyTorch in this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from . import _libcuda, _options

ASKED = "PTX_EMULATOR"
"""Environment variable: 1 asks for the emulator also on a machine with a GPU, 0 turns it off."""


@dataclass(frozen=True)
class Settings:
    """Options of launches that programs make."""

    gpu: str = "h200"
    level: str = "default"
    schedule: str = "fair"
    schedules: int | tuple[str, ...] = 1
    explore: float | None = None
    """Seconds for the search through the orders of each launch."""
    timed: str | None = None
    limit: tuple[str, ...] = ("600s",)
    allow: tuple[str, ...] = ()

    def options(self) -> dict[str, str]:
        """Options of the driver."""
        return {
            "LEVEL": self.level,
            "SCHEDULE": self.schedule,
            "EXPLORE": "" if self.explore is None else str(self.explore),
            "ALLOW": ",".join(self.allow),
            "LIMIT": ",".join(self.limit),
            "TIMED": self.timed or "",
        }


@dataclass
class State:
    """The installation of this process."""

    settings: Settings = field(default_factory=Settings)
    installed: bool = False
    applied: Settings | None = None
    pending: Settings | None = None
    """Settings for the first use, if they do not come from the environment."""
    launches: int = 0
    warnings: list[dict[str, Any]] = field(default_factory=list)
    times: list[tuple[str, float]] = field(default_factory=list)
    """Kernel and predicted microseconds of each timed launch."""
    predicted_us: float = 0.0


state = State()


def asked() -> bool:
    """Whether the emulator may take the GPU's place without a call: there is no GPU, or the environment asks for it."""
    value = os.environ.get(ASKED, "")
    return value != "0" and (bool(value) or not _libcuda.has_gpu())


def from_environment() -> Settings:
    """Settings of `PTX_EMULATOR_GPU`, `_LEVEL`, `_SCHEDULE`, `_SCHEDULES`, `_EXPLORE`, `_TIMED`, `_LIMIT` and `_ALLOW`."""
    found: dict[str, Any] = {}
    for name in ("GPU", "LEVEL", "SCHEDULE", "SCHEDULES", "EXPLORE", "TIMED", "LIMIT", "ALLOW"):
        value = os.environ.get(f"{ASKED}_{name}")
        if value:
            found[name.lower()] = value
    return checked(Settings(), **found)


def checked(base: Settings, **changes: Any) -> Settings:
    """Settings with changes. Raises ValueError if one is invalid."""
    if isinstance(schedules := changes.get("schedules"), str):
        changes["schedules"] = int(schedules) if schedules.isdecimal() else tuple(schedules.split(","))
    if isinstance(explore := changes.get("explore"), (str, int, float)):
        changes["explore"] = _options.seconds("explore", explore)
    for name in ("limit", "allow"):
        value = changes.get(name)
        if isinstance(value, str):
            changes[name] = tuple(one for one in value.split(",") if one)
        elif name in changes:
            changes[name] = tuple(_options.limit(value) if name == "limit" else value or ())
    settings = replace(base, **changes)
    if settings.timed is True:
        settings = replace(settings, timed=settings.gpu)
    if settings.timed:
        _options.sms(settings.timed)
    order = _options.schedules(settings.schedule, settings.schedules)
    if settings.explore is not None and (settings.timed or order != ["fair"]):
        raise ValueError("explore: a launch runs in all orders, without a clock; leave out timed, schedule and schedules")
    return settings


def configure(settings: Settings) -> None:
    """Applies settings to later launches."""
    state.settings = settings
    if not state.installed or settings == state.applied:
        return
    before = state.applied.options() if state.applied else {}
    for name, value in settings.options().items():
        if before.get(name) != value:
            _libcuda.set_option(name, value)
    state.applied = settings


def installed() -> bool:
    """Whether the emulator is the GPU of this process."""
    return state.installed


def install(
    *,
    gpu: str | None = None,
    level: str | None = None,
    schedule: str | None = None,
    schedules: int | Iterable[str] | None = None,
    explore: float | None = None,
    timed: bool | str | None = None,
    limit: str | Iterable[str] | None = None,
    allow: str | Iterable[str] | None = None,
) -> None:
    """Makes the emulator the GPU of Triton, and the stand-in the GPU of PyTorch, in this process.

    A second call changes the options that it names. The GPU cannot change once something has used it. Options that are
    not given come from the environment (`PTX_EMULATOR_GPU`, ...) and else have the defaults of `launch`.
    """
    given = {
        "gpu": gpu, "level": level, "schedule": schedule, "schedules": schedules, "explore": explore, "timed": timed,
        "limit": limit, "allow": allow,
    }  # fmt: skip
    base = state.settings if state.installed else state.pending or from_environment()
    settings = checked(base, **{name: value for name, value in given.items() if value is not None})
    if state.installed and settings.gpu != state.settings.gpu:
        raise ValueError(
            f"gpu: the process already runs on an emulated {state.settings.gpu}; choose it in the first call"
        )
    if not state.installed:
        _libcuda.library()
        _libcuda.set_option("GPU", settings.gpu)
        _libcuda.open_context()
        _libcuda.reports()
        state.installed = True
        os.environ["TRITON_LIBCUDA_PATH"] = str(_libcuda.LIB)
        from . import _import, _libraries

        _import.after("torch", _install_torch)
        _libraries.install()
    configure(settings)
    if "triton" in sys.modules:
        from . import _triton

        _triton.install()


def _install_torch() -> None:
    from . import _torch_cuda

    _torch_cuda.install(_libcuda.card())
