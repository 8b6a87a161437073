"""Memory of arrays and tensors: the whole storage that an array is a view of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Storage:
    """Memory of this process that an argument lies in."""

    address: int
    bytes: int
    writable: bool
    undefined: bool = False
    """True: nothing has written the memory."""


def storage(array: Any) -> Storage | None:
    """The whole storage behind an array or a tensor. None: `array` is neither.

    A view is passed with the memory of its base, so an access between two views of one array is in bounds, as on a GPU,
    and an access past the end of the base is not.
    """
    if isinstance(array, np.ndarray):
        return _numpy_storage(array)
    if hasattr(array, "untyped_storage"):
        if array.device.type not in ("cpu", "cuda"):
            raise TypeError(f"a tensor on {array.device}; the emulator's memory is the CPU's: use a CPU tensor")
        whole = array.untyped_storage()
        return Storage(whole.data_ptr(), whole.nbytes(), True)
    if hasattr(array, "__array_interface__"):
        return _numpy_storage(np.asarray(array))
    return None


def _numpy_storage(array: np.ndarray) -> Storage:
    base = _base(array)
    undefined = isinstance(base, _Fresh) and base.undefined
    low, high = _bounds(base)
    # A base may be smaller than a view that `as_strided` made; the view then extends the storage.
    first, last = _bounds(array)
    low, high = min(low, first), max(high, last)
    return Storage(low, high - low, array.flags.writeable, undefined)


def _bounds(array: np.ndarray) -> tuple[int, int]:
    low = high = array.__array_interface__["data"][0]
    if array.size == 0:
        return low, low
    for extent, stride in zip(array.shape, array.strides):
        if stride < 0:
            low += (extent - 1) * stride
        else:
            high += (extent - 1) * stride
    return low, high + array.itemsize


def pointer(array: Any) -> int:
    """Address of the first element."""
    if hasattr(array, "untyped_storage"):
        return array.data_ptr()
    return np.asarray(array).__array_interface__["data"][0]


class _Fresh(np.ndarray):
    """An array of `empty`."""

    undefined = False
    """True until the first launch. Views have their own attribute, so the base's counts."""


def empty(shape: int | tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    """An array whose bytes are undefined until the kernel of its first launch writes them.

    A kernel that uses a byte before it writes it faults with `uninitialised-global`. The bytes are 0xff.
    """
    array = _Fresh(shape, dtype)
    array.view(np.ndarray).reshape(-1).view(np.uint8)[:] = 0xFF
    array.undefined = True
    return array


def used(array: Any) -> None:
    """Notes that a launch has used an array."""
    if isinstance(array, _Fresh):
        _base(array).undefined = False


def _base(array: np.ndarray) -> np.ndarray:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
