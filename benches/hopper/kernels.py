"""The library's binary, `benches/src/bin/hopper/`, as a separate process."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any


class Kernels:
    """The library's binary. It takes commands as lines of JSON."""

    def __init__(self, binary: str) -> None:
        self.process = subprocess.Popen([binary], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def send(self, **command: Any) -> None:
        """Sends a command without waiting."""
        assert self.process.stdin
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Waits for the next answer."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"the binary ended with status {self.process.wait()}; its message is above")
        return json.loads(line)

    def ask(self, **command: Any) -> dict[str, Any]:
        """Sends a command and waits for its answer."""
        self.send(**command)
        return self.answer()
