"""PTX modules."""

from __future__ import annotations

import os
import re
from functools import lru_cache

from ._native import Module as _NativeModule


class Module:
    """PTX text, parsed and decoded. Raises ValueError with the line if the text is not PTX."""

    def __init__(self, ptx: str | bytes) -> None:
        text = ptx.decode() if isinstance(ptx, bytes) else ptx
        self.native = _NativeModule(text)
        target = re.search(r"^\s*\.target\s+(\w+)", text, re.MULTILINE)
        self.target: str = target[1] if target else ""
        """Target of the text, such as `sm_90a`."""
        self.entries: list[str] = self.native.entries
        """Entries, in the order of the text."""
        self._parameters = {entry: self.native.parameters(entry) for entry in self.entries}
        self._clusters = {entry: self.native.required_cluster(entry) for entry in self.entries}

    def parameters(self, entry: str) -> list[tuple[str, int]]:
        """Name and size in bytes of each parameter of an entry."""
        if entry not in self._parameters:
            raise ValueError(f"the module has no entry {entry!r}; its entries are {', '.join(self.entries)}")
        return self._parameters[entry]

    def cluster(self, entry: str) -> tuple[int, int, int] | None:
        """Cluster size that an entry requires."""
        cluster = self._clusters.get(entry)
        if cluster is None:
            return None
        x, y, z = cluster
        return x, y, z

    def unsupported(self, entry: str) -> list[tuple[int, str]]:
        """PTX line and text of each instruction of an entry that the emulator cannot run."""
        return self.native.unsupported(entry)


@lru_cache(maxsize=64)
def _of_text(ptx: str | bytes) -> Module:
    return Module(ptx)


def module(ptx: Module | str | bytes | os.PathLike) -> Module:
    """A module from itself, from PTX text, or from the path of a file."""
    if isinstance(ptx, Module):
        return ptx
    if isinstance(ptx, os.PathLike):
        with open(ptx, encoding="utf-8") as file:
            return _of_text(file.read())
    if isinstance(ptx, (str, bytes)):
        return _of_text(ptx)
    raise TypeError(f"ptx: expected PTX text, a path or a Module, not {type(ptx).__name__}")
