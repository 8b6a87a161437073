"""What `import triton` starts: on a machine without a GPU, the stand-in for `torch.cuda`.

PyTorch itself imports Triton to ask whether it can compile for a GPU. That import starts nothing.
"""

from __future__ import annotations

import importlib.abc
import os
import sys
from collections.abc import Callable

from . import _install

_wanted = False
"""True: the import of Triton has started the emulator."""


def wanted() -> bool:
    """Whether Triton's launches are to run in the emulator. Triton asks when it needs a driver."""
    return _wanted or _may()


def _may() -> bool:
    return _install.asked() and (bool(os.environ.get(_install.ASKED)) or not _asked_by_torch())


def with_triton() -> None:
    """Called while Triton is imported."""
    global _wanted
    _wanted = _may()
    if not _wanted:
        return
    _silence_nvidia()
    if os.environ.get("TRITON_DEFAULT_BACKEND") == "nvidia":
        os.environ["TRITON_DEFAULT_BACKEND"] = "ptx_emulator"
    after("torch", _install.install)


def _asked_by_torch() -> bool:
    """Whether PyTorch asks: the caller of Triton is PyTorch's. A kernel in an autograd function has PyTorch further out."""
    frame = sys._getframe(1)
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("ptx_emulator", "triton", "importlib"):
            return package == "torch"
        frame = frame.f_back
    return False


def _silence_nvidia() -> None:
    """Triton accepts one active driver. With a GPU or the stand-in, NVIDIA's would be a second one."""
    from triton.backends.nvidia import driver

    driver.CudaDriver.is_active = staticmethod(lambda: False)


def after(name: str, action: Callable[[], None]) -> None:
    """Calls `action` when a module has been imported: now, or later."""
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        action()
    else:
        sys.meta_path.insert(0, _After(name, action))


class _After(importlib.abc.MetaPathFinder):
    """Waits for the import of a module."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self._name, self._action = name, action

    def find_spec(self, name, path=None, target=None):
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if hasattr(finder, "find_spec"))
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            # The actions may themselves wait for this module.
            module.__spec__._initializing = False
            self._action()

        spec.loader.exec_module = exec_module
        return spec
