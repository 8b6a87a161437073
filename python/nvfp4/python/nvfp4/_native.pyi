"""The native module, of the package's own use alone: what is meant for others has its types where it is exported."""

from typing import Any

class Error(RuntimeError):
    """A device is missing, failed, or computes no such layer."""

def __getattr__(name: str) -> Any: ...
