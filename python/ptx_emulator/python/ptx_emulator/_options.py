"""Options of launches, checked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ._native import CARDS, card_sms

GPUS: dict[str, int] = {name: card_sms(name) for name in CARDS}
"""GPUs by name, with their numbers of SMs."""


def gpu_of(target: str) -> str:
    """The GPU for code of a target such as `sm_100a`."""
    if target.startswith(("sm_100", "sm_101", "sm_103", "sm_110")):
        return "b200"
    return "rtx-5090" if target.startswith("sm_12") else "h200"


def sms(gpu: str) -> int:
    """Number of SMs of a GPU."""
    if gpu not in GPUS:
        raise ValueError(f"gpu: {gpu!r} is unknown; expected one of {', '.join(GPUS)}")
    return GPUS[gpu]


def timed(gpu: str | None, value: bool | str) -> str | None:
    """The GPU whose clock launches run by."""
    if value is False or value is None:
        return None
    name = gpu or "h200" if value is True else value
    sms(name)
    return name


def size(name: str, value: int | Sequence[int]) -> tuple[int, int, int]:
    """One to three extents."""
    extents = (value,) if isinstance(value, int) else tuple(int(one) for one in value)
    if not 1 <= len(extents) <= 3 or any(not 0 <= one < 1 << 32 for one in extents):
        raise ValueError(f"{name}: expected one to three sizes, not {value!r}")
    x, y, z = (*extents, 1, 1)[:3]
    return x, y, z


def schedules(schedule: str, count: int | Iterable[str]) -> list[str]:
    """The schedules of a launch: `schedule` first, then others."""
    if isinstance(count, str):
        return [schedule, count] if count != schedule else [schedule]
    if not isinstance(count, int):
        return list(dict.fromkeys(count)) or [schedule]
    if count < 1:
        raise ValueError(f"schedules: {count}; expected at least 1")
    others = ["fair", "worst", *(f"seed:{seed}" for seed in range(1, count + 1))]
    return list(dict.fromkeys([schedule, *others]))[:count]


def seconds(name: str, value: str | int | float) -> float:
    """A number of seconds that is not negative."""
    try:
        found = float(value)
    except ValueError:
        found = -1.0
    if not 0 <= found < float("inf"):
        raise ValueError(f"{name}: {value!r}; expected a number of seconds")
    return found


def allow(value: str | Iterable[str]) -> list[str]:
    """Kinds of hazards to ignore."""
    return value.split(",") if isinstance(value, str) else list(value)


def limit(value: str | int | float | None | Iterable[str | int]) -> list[str]:
    """Limits as the emulator reads them: a number of instructions, or seconds that end with `s`."""
    if value is None:
        return []
    if isinstance(value, (str, int)):
        return [str(value)]
    if isinstance(value, float):
        return [f"{value}s"]
    return [str(one) for one in value]
