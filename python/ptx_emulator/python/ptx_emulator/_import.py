"""What `import triton` starts: on a machine without a GPU, the stand-in for `torch.cuda`.

PyTorch itself imports Triton to ask whether it can compile for a GPU. Such an import starts nothing.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys

from . import _install

wanted = False
"""True: Triton's launches are to run in the emulator."""


def with_triton() -> None:
    """Called while Triton is imported."""
    global wanted
    wanted = _install.asked() and (bool(os.environ.get(_install.ASKED)) or not _asked_by_torch())
    if not wanted:
        return
    _silence_nvidia()
    if "torch" in sys.modules and hasattr(sys.modules["torch"], "overrides"):
        _install.install()
    else:
        sys.meta_path.insert(0, _AfterTorch())


def _asked_by_torch() -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("torch."):
            return True
        frame = frame.f_back
    return False


def _silence_nvidia() -> None:
    """Triton accepts one active driver. With a GPU or the stand-in, NVIDIA's would be a second one."""
    from triton.backends.nvidia import driver

    driver.CudaDriver.is_active = staticmethod(lambda: False)


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Installs the stand-in when PyTorch has been imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        loader, execute = spec.loader, spec.loader.exec_module

        def exec_module(module):
            execute(module)
            _install.install()

        loader.exec_module = exec_module
        return spec
