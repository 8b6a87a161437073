"""Arguments of a launch as the bytes of the kernel's parameters."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ._memory import Storage, pointer, storage, used
from ._tensor_map import TensorMap

if TYPE_CHECKING:
    from ._device import Device


class Mapped:
    """Memory of arrays on a device, for one launch."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pieces: list[tuple[Storage, int, str]] = []
        """Storage, its address on the device, and its name."""
        self._buffers: list[int] = []
        """Arrays of pointers, which this launch made."""
        self._arrays: list[Any] = []

    def add(self, named: Sequence[tuple[str, Any]]) -> None:
        """Allocates the storages of all arrays. Storages that overlap become one allocation."""
        found = [(name, storage(array)) for name, array in named]
        self._arrays = [array for _, array in named]
        pieces = sorted(((one, name) for name, one in found if one is not None), key=lambda piece: piece[0].address)
        merged: list[tuple[Storage, str]] = []
        for one, name in pieces:
            last = merged[-1][0] if merged else None
            if last is not None and one.address < last.address + last.bytes:
                end = max(last.address + last.bytes, one.address + one.bytes)
                both = Storage(
                    last.address, end - last.address, last.writable or one.writable, last.undefined and one.undefined
                )
                names = merged[-1][1]
                merged[-1] = (both, names if name in names.split(" = ") else f"{names} = {name}")
            else:
                merged.append((one, name))
        for one, name in merged:
            address = self._device.native.allocate(one.bytes, name, False)
            self._pieces.append((one, address, name))

    def address(self, array: Any) -> int:
        """Device address of an array's first element."""
        host = pointer(array)
        for one, address, _ in self._pieces:
            if one.address <= host <= one.address + one.bytes:
                return address + host - one.address
        raise AssertionError("every array was added")

    def pointers(self, name: str, addresses: Sequence[int]) -> int:
        """Device address of an array of pointers."""
        values = np.array(addresses, np.uint64)
        address = self._device.native.allocate(values.nbytes, name, False)
        self._device.native.copy_in(address, pointer(values), values.nbytes)
        self._buffers.append(address)
        return address

    def fill(self) -> None:
        """Copies the arrays to the device."""
        for one, address, _ in self._pieces:
            self._device.native.copy_in(address, one.address, one.bytes)
            if one.undefined:
                self._device.native.undefine(address, one.bytes)

    def fetch(self) -> None:
        """Copies what the kernel has changed back to the arrays."""
        spoiled = []
        for one, address, name in self._pieces:
            changed = self._device.native.copy_out(address, one.address, one.bytes, one.writable)
            if changed and not one.writable:
                spoiled.append(name)
        for array in self._arrays:
            used(array)
        if spoiled:
            raise ValueError(f"the kernel wrote to {', '.join(spoiled)}, which is read-only; pass a writable array")

    def free(self) -> None:
        """Frees the memory."""
        for address in [*(address for _, address, _ in self._pieces), *self._buffers]:
            self._device.native.free(address)


def names_of(args: Sequence[Any] | Mapping[str, Any], declared: Sequence[tuple[str, int]]) -> list[tuple[str, Any]]:
    """Arguments with their names, for faults: the keys of a mapping, or the names that the PTX declares."""
    if isinstance(args, Mapping):
        return list(args.items())
    known = [f"{name}" for name, _ in declared]
    return [(known[n] if n < len(known) else f"argument {n}", value) for n, value in enumerate(args)]


def arrays_of(named: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """The arrays among the arguments, also those in lists and tensor maps, with their names."""
    found: list[tuple[str, Any]] = []
    for name, value in named:
        if isinstance(value, TensorMap):
            value = value.array
        if isinstance(value, (list, tuple)):
            found += arrays_of([(f"{name}[{n}]", one) for n, one in enumerate(value)])
        elif is_array(value):
            found.append((name, value))
    return found


def is_array(value: Any) -> bool:
    """Whether an argument is memory of this process. NumPy's scalars are values."""
    return not isinstance(value, np.generic) and (
        isinstance(value, np.ndarray) or hasattr(value, "untyped_storage") or hasattr(value, "__array_interface__")
    )


def encode(name: str, value: Any, size: int, mapped: Mapped) -> bytes:
    """The bytes of one parameter."""
    from ._device import Buffer

    if value is None:
        return bytes(size)
    if isinstance(value, (bytes, bytearray, memoryview)):
        data = bytes(value)
    elif isinstance(value, ctypes._SimpleCData | ctypes.Structure | ctypes.Union | ctypes.Array):
        data = bytes(value)
    elif isinstance(value, np.generic):
        data = value.tobytes()
    elif isinstance(value, TensorMap):
        data = value.encode(value.address(mapped))
    elif isinstance(value, Buffer):
        data = struct.pack("<Q", value.address)
    elif isinstance(value, (list, tuple)):
        data = struct.pack("<Q", mapped.pointers(f"pointers of {name}", [_address(name, one, mapped) for one in value]))
    elif is_array(value):
        data = struct.pack("<Q", mapped.address(value))
    elif isinstance(value, (bool, int)):
        data = _integer(name, int(value), size)
    elif isinstance(value, float):
        formats = {2: "<e", 4: "<f", 8: "<d"}
        if size not in formats:
            raise TypeError(f"{name}: a Python float for a parameter of {size} bytes; pass a NumPy scalar or bytes")
        data = struct.pack(formats[size], value)
    else:
        raise TypeError(
            f"{name}: cannot pass {type(value).__name__}; expected an array, a tensor, a Buffer, a TensorMap, a number, "
            "bytes, a ctypes value, or a list of arrays"
        )
    if len(data) != size:
        raise TypeError(
            f"{name}: {type(value).__name__} has {len(data)} bytes, and the kernel's parameter has {size}; "
            "pass a NumPy scalar of that size"
        )
    return data


def _address(name: str, value: Any, mapped: Mapped) -> int:
    from ._device import Buffer

    if value is None:
        return 0
    if isinstance(value, Buffer):
        return value.address
    if is_array(value):
        return mapped.address(value)
    if isinstance(value, int):
        return value
    raise TypeError(f"{name}: a list may contain arrays, Buffers and addresses, not {type(value).__name__}")


def _integer(name: str, value: int, size: int) -> bytes:
    bits = 8 * size
    if not -(1 << (bits - 1)) <= value < 1 << bits:
        raise OverflowError(f"{name}: {value} does not fit the parameter's {size} bytes")
    return (value % (1 << bits)).to_bytes(size, "little")
