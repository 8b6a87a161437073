"""Exceptions of launches, made from the emulator's description of a fault."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Place:
    """Position of an instruction."""

    line: int
    """Line of the PTX text, from 1."""
    instruction: str
    """The full opcode."""
    source: str | None
    """`file:line:column` of the source, and the call sites that it was inlined into. None: the PTX names no source."""

    @property
    def file(self) -> str | None:
        """File of the source."""
        return self._part(1)

    @property
    def source_line(self) -> int | None:
        """Line of the source, from 1."""
        line = self._part(2)
        return None if line is None else int(line)

    def _part(self, number: int) -> str | None:
        found = re.match(r"(.*?):(\d+)(?::\d+)?(?=$|[\s,])", self.source or "")
        return found[number] if found else None

    def __str__(self) -> str:
        source = f"  ({self.source})" if self.source else ""
        return f"PTX line {self.line}: {self.instruction}{source}"


@dataclass(frozen=True)
class Party:
    """The other side of a conflict, or a thread that waits."""

    what: str
    """The party and its access or wait."""
    place: Place | None

    def __str__(self) -> str:
        return self.what if self.place is None else f"{self.what}, at {self.place}"


def _place(fields: Mapping[str, Any] | None) -> Place | None:
    return None if fields is None else Place(fields["line"], fields["instruction"], fields.get("source"))


class Description:
    """Fields that faults and warnings share."""

    kind: str
    """Kind in kebab-case, such as `data-race` (README, "Kinds of faults")."""
    message: str
    """The access or the rule, with addresses."""
    entry: str
    """Entry of the module."""
    cta: tuple[int, int, int] | None
    """Index of the CTA."""
    warp: int | None
    """Index of the warp in its CTA."""
    lane: int | None
    """Lane of the warp. None: the whole warp."""
    place: Place | None
    """The instruction at fault."""
    others: tuple[Party, ...]
    """The other parties."""
    remedy: str
    """Usual remedy."""
    text: str
    """The description as the command prints it."""

    def _fill(self, fields: Mapping[str, Any]) -> None:
        self.kind = fields["kind"]
        self.message = fields["message"]
        self.entry = fields["kernel"]
        self.cta = tuple(fields["cta"]) if fields.get("cta") else None
        self.warp = fields.get("warp")
        self.lane = fields.get("lane")
        self.place = _place(fields.get("place"))
        self.others = tuple(Party(other["what"], _place(other.get("place"))) for other in fields.get("others", ()))
        self.remedy = fields.get("remedy", "")
        self.text = fields["text"]

    @property
    def addresses(self) -> tuple[int, ...]:
        """Addresses that the description names, in its order."""
        texts = [self.message, *(other.what for other in self.others)]
        return tuple(int(number, 16) for text in texts for number in re.findall(r"\b0x[0-9a-fA-F]+\b", text))

    @property
    def file(self) -> str | None:
        """File of the source line at fault."""
        return self.place.file if self.place else None

    @property
    def line(self) -> int | None:
        """Line of the source at fault, or of the PTX text if the PTX names no source."""
        if self.place is None:
            return None
        return self.place.source_line if self.place.source_line is not None else self.place.line


class LaunchFailed(Description, RuntimeError):
    """A launch ended early. The subclasses say why."""

    schedule: str | None
    """Schedule of the launch."""

    def __init__(self, fields: Mapping[str, Any], schedule: str | None = None) -> None:
        self._fill(fields)
        self.schedule = schedule
        note = f"\n  under the schedule {schedule}" if schedule not in (None, "fair") else ""
        if self.asserts:
            # Tests look for CUDA's words.
            note += "\n  CUDA's error on a GPU: device-side assert triggered"
        RuntimeError.__init__(self, self.text + note)
        self._fields = dict(fields)

    @property
    def asserts(self) -> bool:
        """Whether an assertion of the kernel failed."""
        return self.kind == "trap" and "assertion" in self.message

    def __reduce__(self):  # so that pytest-xdist and multiprocessing can pass a fault between processes
        return (type(self), (self._fields, self.schedule))


class Fault(LaunchFailed):
    """The kernel did something wrong."""


class Unsupported(LaunchFailed):
    """The kernel uses a feature that the emulator does not model."""


class BadLaunch(LaunchFailed, ValueError):
    """The launch does not fit the kernel: arguments, threads or shared memory."""


_CLASSES: dict[str, type[LaunchFailed]] = {"unsupported": Unsupported, "bad-launch": BadLaunch}


def failure(fields: Mapping[str, Any], schedule: str | None = None) -> LaunchFailed:
    """The exception for a description."""
    return _CLASSES.get(fields["kind"], Fault)(fields, schedule)
