"""Kernels that a project registers with PyTorch for "CUDA" (`torch.library`).

PyTorch chooses an operator's kernel by the device of its tensors, which are CPU tensors here. A mode below autograd makes
the choice instead, for calls with tensors "on cuda".
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import _torch_cuda

_kernels: dict[str, Callable[..., Any]] = {}
"""Registered kernels by PyTorch's own key. PyTorch forgets the key when the library is deleted; the kernel may stay here."""


class Kernels(TorchDispatchMode):
    """Sees every operator that a call of PyTorch's API runs."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.replace("::", "/")
        overload = func._schema.overload_name
        key = f"{name}.{overload}/CUDA" if overload else f"{name}/CUDA"
        kernel = _kernels.get(key) if key in torch.library._impls else None
        inputs = list(_torch_cuda.tensors((args, kwargs)))
        cuda = any(_torch_cuda.mark_of(one) is not None for one in inputs)
        if kernel is not None and (cuda or not inputs):
            if "device" in kwargs:
                kwargs = {**kwargs, "device": _torch_cuda.CUDA}
            with _torch_cuda.mode():
                return kernel(*args, **kwargs)
        out = func(*args, **kwargs)
        if not cuda:
            return out
        known = set(map(id, inputs))
        return _torch_cuda.mapped(out, lambda one: one if id(one) in known else _torch_cuda.mark(one))


def context() -> contextlib.AbstractContextManager[Any]:
    """What calls with tensors "on cuda" run in."""
    return Kernels() if any(key in torch.library._impls for key in _kernels) else contextlib.nullcontext()


def install() -> None:
    """Notes kernels that are registered from now on."""
    register = torch.library.Library.impl

    @functools.wraps(register)
    def impl(self, op_name, fn, dispatch_key="", **options):
        register(self, op_name, fn, dispatch_key, **options)
        if (dispatch_key or self.dispatch_key) == "CUDA":
            name = op_name if isinstance(op_name, str) else op_name._qualified_op_name.replace(".default", "")
            _kernels[f"{self.ns}/{name.split('::')[-1]}/CUDA"] = fn

    torch.library.Library.impl = impl
