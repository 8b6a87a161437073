"""Tensor maps as arguments."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ._native import tensor_map

if TYPE_CHECKING:
    from ._arguments import Mapped

_TYPES = {
    "uint8": "u8", "int8": "u8", "bool": "u8", "uint16": "u16", "int16": "u16", "uint32": "u32", "int32": "s32",
    "uint64": "u64", "int64": "s64", "float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64",
}  # fmt: skip


class TensorMap:
    """A tensor map of an array, as `cuTensorMapEncodeTiled` makes it.

    `box` has an extent per dimension, in the array's order (outermost first). The array's last dimension must be
    contiguous. `dtype` is a type of `cuTensorMapEncodeTiled` in lower case (`u8`, `f16`, `bf16`, `tf32`,
    `u4x16_align8`, ...); the default is the array's. `swizzle`: none, 32B, 64B, 128B, 128B_atom_32B and so on.
    """

    def __init__(
        self,
        array: Any,
        box: Sequence[int],
        *,
        swizzle: str = "none",
        dtype: str | None = None,
        interleave: str = "none",
        fill: str = "zero",
        element_strides: Sequence[int] | None = None,
    ) -> None:
        from ._device import Buffer

        if isinstance(array, Buffer):
            raise TypeError("TensorMap: expected an array or a tensor, which has a shape; a Buffer has none")
        self.array = array
        strides, item = _strides(array)
        shape = list(array.shape)
        if len(box) != len(shape):
            raise ValueError(f"TensorMap: a box of {len(box)} dimensions for an array of {len(shape)}")
        if strides and strides[-1] != item:
            raise ValueError("TensorMap: the array's last dimension must be contiguous")
        spec: dict[str, Any] = {
            "buffer": "tensor",
            "type": dtype or _type(array),
            "dims": shape[::-1],
            "strides": strides[:-1][::-1],
            "box": list(box)[::-1],
            "swizzle": swizzle,
            "interleave": interleave,
            "oob_fill": fill,
        }
        if element_strides is not None:
            spec["element_strides"] = list(element_strides)[::-1]
        self._spec = json.dumps({"tensor_map": spec})

    def address(self, mapped: Mapped) -> int:
        """Device address of the tensor."""
        return mapped.address(self.array)

    def encode(self, address: int) -> bytes:
        """The 128 bytes of the map for a tensor at a device address."""
        return bytes(tensor_map(self._spec, address))


def _strides(array: Any) -> tuple[list[int], int]:
    if hasattr(array, "untyped_storage"):
        item = array.element_size()
        return [stride * item for stride in array.stride()], item
    array = np.asarray(array)
    return list(array.strides), array.itemsize


def _type(array: Any) -> str:
    name = str(array.dtype).removeprefix("torch.")
    if name not in _TYPES:
        raise TypeError(f"TensorMap: no default for elements of type {name}; pass `dtype`")
    return _TYPES[name]
