"""Types of the native module. It is private to the package; the exported functions have their types in the package."""

from typing import Any

class Error(RuntimeError):
    """A device is missing, failed, or has no kernel for the layer."""

def __getattr__(name: str) -> Any: ...
