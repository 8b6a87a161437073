"""Reports of launches."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ._errors import Description, LaunchFailed, failure
from ._native import Report as _NativeReport


class Finding(Description):
    """A warning, or a hazard that the launch continued after."""

    times: int
    """Number of occurrences at this place."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fill(fields)
        self.times = fields.get("times", 1)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<{self.kind} at {self.place}>"


@dataclass(frozen=True)
class Time:
    """Predicted time of a launch. It comes from a model of the GPU, not from a measurement."""

    us: float
    """Microseconds from the grid's first instruction to its end."""
    busy: Mapping[str, float]
    """Share of the time for which each unit was busy."""
    from_machine_code: bool
    """True: costs of instructions come from machine code, because ptxas and nvdisasm were found."""
    details: Mapping[str, Any]
    """Phases, and the reasons for which the warps of each role waited."""


class Report:
    """Counters of a launch that ended without a fault."""

    def __init__(self, native: _NativeReport, schedules: tuple[str, ...]) -> None:
        self._native = native
        self.schedules = schedules
        """Schedules under which the kernel ran. The counters belong to the first."""

    @cached_property
    def fields(self) -> Mapping[str, Any]:
        """Everything, as `ptx-emulator launch --json` prints it."""
        return json.loads(self._native.json())

    @property
    def ctas(self) -> int:
        """Number of CTAs."""
        return self._native.ctas

    @property
    def output(self) -> str:
        """Output of `printf`."""
        return self._native.output

    @property
    def counters(self) -> Mapping[str, Any]:
        """Counters summed over all warps: instructions by class, bytes by space, bank conflicts, matrix operations."""
        return self.fields["total"]

    @property
    def roles(self) -> list[Mapping[str, Any]]:
        """Counters by the warp's index in its CTA."""
        return self.fields["roles"]

    @property
    def buffers(self) -> list[Mapping[str, Any]]:
        """Traffic of each argument's memory and of each variable of the module."""
        return self.fields["buffers"]

    @cached_property
    def warnings(self) -> list[Finding]:
        """Violations of the manual that GPUs are known to tolerate."""
        return [Finding(one) for one in self.fields["warnings"]] if self._native.found[0] else []

    @cached_property
    def hazards(self) -> list[Finding]:
        """Hazards that the launch continued after (`keep_going=True`)."""
        return [Finding(one) for one in self.fields["hazards"]] if self._native.found[1] else []

    @cached_property
    def time(self) -> Time | None:
        """Predicted time, if the launch was `timed`."""
        time = self.fields["time"]
        if time is None:
            return None
        return Time(time["end_us"] - time["start_us"], time["busy"], time["from_machine_code"], time)

    def __str__(self) -> str:
        return str(self._native)


class Exploration:
    """Result of a search through the orders of a launch."""

    def __init__(self, text: str) -> None:
        self.fields: Mapping[str, Any] = json.loads(text)
        """Everything, as `ptx-emulator launch --explore --json` prints it."""

    @property
    def whole(self) -> bool:
        """Whether no order is left. Otherwise `end` names the bound, or the search ended at a fault."""
        return self.end == "whole"

    @property
    def end(self) -> str:
        """Why the search ended: whole, fault, preemptions, orders or time."""
        return self.fields["end"]

    @property
    def orders(self) -> int:
        """Number of orders that ran to their end."""
        return self.fields["orders"]

    @property
    def results(self) -> int:
        """Number of different contents of memory that the orders without a fault end with."""
        return self.fields["results"]

    @cached_property
    def failures(self) -> list[LaunchFailed]:
        """Each fault. Its `schedule` is a short order that shows it, which `launch` takes."""
        return [failure(one["fault"], one["order"]) for one in self.fields["failures"]]

    def __str__(self) -> str:
        return self.fields["text"]
