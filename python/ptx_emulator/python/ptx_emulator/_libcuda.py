"""The emulated `libcuda.so.1` in this process."""

from __future__ import annotations

import ctypes
import json
import os
from pathlib import Path
from typing import Any

LIB = Path(__file__).parent / "lib"
"""Folder of `libcuda.so.1`, `libcudart.so.13` and the command."""

_library: ctypes.CDLL | None = None
_context = ctypes.c_void_p()

# CUdevice_attribute (cuda.h)
_ATTRIBUTES = {
    "multiprocessors": 16, "l2": 38, "threads": 39, "major": 75, "minor": 76, "shared_multiprocessor": 81,
    "registers": 82, "shared": 97,
}  # fmt: skip


def library() -> ctypes.CDLL:
    """The library. The first call loads it, globally: later lookups of `libcuda.so.1` in the process find it."""
    global _library
    if _library is None:
        path = LIB / "libcuda.so.1"
        if not path.exists():
            raise RuntimeError(f"{path} is missing; install the wheel of ptx-emulator, or build it with maturin")
        loaded = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        if not hasattr(loaded, "ptxEmulatorSet"):
            raise RuntimeError("another libcuda.so.1 is loaded; install the emulator before anything uses CUDA")
        for name, types in {
            "cuMemHostRegister_v2": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint),
            "cuMemHostUnregister": (ctypes.c_void_p,),
            "ptxEmulatorName": (ctypes.c_uint64, ctypes.c_char_p),
            "ptxEmulatorUndefine": (ctypes.c_uint64, ctypes.c_uint64),
            "ptxEmulatorSet": (ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p)),
            "ptxEmulatorReports": (ctypes.POINTER(ctypes.c_void_p),),
            "ptxEmulatorFree": (ctypes.c_void_p,),
        }.items():
            getattr(loaded, name).argtypes = types
        _library = loaded
        # Libraries on the CUDA runtime find this one by its name.
        ctypes.CDLL(str(LIB / "libcudart.so.13"), mode=ctypes.RTLD_GLOBAL)
    return _library


def loaded() -> bool:
    """Whether this process has loaded the library."""
    return _library is not None


def check(code: int, what: str) -> None:
    """Raises RuntimeError for an error of CUDA."""
    if code:
        text = ctypes.c_char_p()
        library().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"ptx-emulator: {what}: {(text.value or b'unknown').decode()} (CUDA error {code})")


def _taken(pointer: ctypes.c_void_p) -> str:
    """A text of the library, which is freed."""
    if not pointer.value:
        return ""
    text = ctypes.string_at(pointer.value).decode("utf-8", "replace")
    library().ptxEmulatorFree(pointer)
    return text


def set_option(name: str, value: str) -> None:
    """Sets an option for later launches. Raises ValueError if the value is invalid."""
    message = ctypes.c_void_p()
    if library().ptxEmulatorSet(name.encode(), value.encode(), ctypes.byref(message)):
        raise ValueError(f"{name.lower()}: {_taken(message) or 'refused'}")


def reports() -> list[dict[str, Any]]:
    """Reports of the launches since the last call."""
    text = ctypes.c_void_p()
    check(library().ptxEmulatorReports(ctypes.byref(text)), "reading reports")
    return [json.loads(line) for line in _taken(text).splitlines()]


def open_context() -> None:
    """Makes the primary context current in this thread."""
    cuda = library()
    check(cuda.cuInit(0), "cuInit")
    if not _context.value:
        check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(_context), 0), "opening the context")
    check(cuda.cuCtxSetCurrent(_context), "opening the context")


def reset() -> None:
    """Makes the context usable again after a fault. Modules and page-locked memory stay."""
    cuda = library()
    check(cuda.cuDevicePrimaryCtxReset_v2(0), "resetting the context")
    check(cuda.cuCtxSetCurrent(_context), "resetting the context")


def card() -> dict[str, Any]:
    """Properties of the GPU."""
    cuda = library()
    check(cuda.cuInit(0), "cuInit")
    value = ctypes.c_int()
    found: dict[str, Any] = {}
    for name, number in _ATTRIBUTES.items():
        check(cuda.cuDeviceGetAttribute(ctypes.byref(value), number, 0), name)
        found[name] = value.value
    text = ctypes.create_string_buffer(100)
    check(cuda.cuDeviceGetName(text, 100, 0), "the name")
    total = ctypes.c_size_t()
    check(cuda.cuDeviceTotalMem_v2(ctypes.byref(total), 0), "the memory")
    return {
        **found,
        "name": text.value.decode(),
        "memory": total.value,
        "capability": (found["major"], found["minor"]),
    }


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU."""
    return any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg"))
