"""Launches of programs in this process: memory of tensors, schedules, and faults as exceptions."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import _install, _libcuda, _options
from ._errors import failure

_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE
_NOT_REGISTERED = 713  # CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED
_mapped: dict[int, int] = {}
"""Registered storages: address and bytes."""


_thread = threading.local()


@dataclass
class _Piece:
    address: int
    bytes: int
    names: list[str]
    mark: Any = None


def _storage(value: Any) -> tuple[int, int, Any] | None:
    """Address, bytes and mark of the storage behind an argument."""
    torch_cuda = sys.modules.get("ptx_emulator._torch_cuda")
    if hasattr(value, "untyped_storage"):
        with _without_mode():
            whole = value.untyped_storage()
            if hasattr(whole, "nbytes"):
                return whole.data_ptr(), whole.nbytes(), getattr(whole, "_ptx_emulator", None)
    array = getattr(value, "__array_interface__", None)
    if array is not None:
        whole = np.asarray(value)
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        return whole.__array_interface__["data"][0], whole.nbytes, None
    # What `triton.reinterpret` and the like make.
    inner = getattr(value, "base", None)
    if inner is not None:
        return _storage(inner)
    # A pointer that a project made of a tensor's address.
    whole = torch_cuda.storage_at(value.data_ptr()) if torch_cuda is not None and hasattr(value, "data_ptr") else None
    return (whole.data_ptr(), whole.nbytes(), whole._ptx_emulator) if whole is not None else None


def _without_mode() -> contextlib.AbstractContextManager[Any]:
    torch = sys.modules.get("torch")
    return torch._C.DisableTorchFunction() if torch is not None else contextlib.nullcontext()


def tensors_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Memory among the arguments, also in tuples, descriptors and wrappers, with names."""
    if isinstance(value, (int, float, str, bool, type(None))):
        return
    if isinstance(value, (tuple, list)):
        for n, one in enumerate(value):
            yield from tensors_of(f"{name}[{n}]", one)
    elif hasattr(value, "data_ptr") or hasattr(value, "__array_interface__"):
        yield name, value
    elif hasattr(value, "base") and hasattr(value, "block_shape"):
        yield from tensors_of(name, value.base)


def _pieces(named: Iterable[tuple[str, Any]]) -> list[_Piece]:
    """Storages by ascending address. Storages that overlap become one."""
    found = []
    for name, value in named:
        storage = _storage(value)
        if storage is not None and storage[1] > 0:
            found.append(_Piece(storage[0], storage[1], [name], storage[2]))
    found.sort(key=lambda piece: piece.address)
    merged: list[_Piece] = []
    for piece in found:
        last = merged[-1] if merged else None
        if last is not None and piece.address < last.address + last.bytes:
            end = max(last.address + last.bytes, piece.address + piece.bytes)
            last.bytes = end - last.address
            last.names += [name for name in piece.names if name not in last.names]
            last.mark = last.mark or piece.mark
        else:
            merged.append(piece)
    return merged


@contextlib.contextmanager
def mapped(named: Iterable[tuple[str, Any]]) -> Iterator[list[_Piece]]:
    """Makes the storages of arguments accessible to kernels."""
    cuda = _libcuda.library()
    pieces = [piece for piece in _pieces(named) if piece.address not in _mapped]
    done: list[_Piece] = []
    try:
        for piece in pieces:
            if piece.address % 4:
                raise ValueError(
                    f"{piece.names[0]}: its memory begins at {piece.address:#x}, not at a multiple of 4; copy it"
                )
            done.append(piece)
            code = cuda.cuMemHostRegister_v2(piece.address, piece.bytes, _PORTABLE)
            _libcuda.check(code, f"mapping {piece.names[0]} of {piece.bytes} bytes")
            _mapped[piece.address] = piece.bytes
            cuda.ptxEmulatorName(piece.address, " = ".join(piece.names).encode())
            if piece.mark is not None and piece.mark.undefined:
                cuda.ptxEmulatorUndefine(piece.address, piece.bytes)
        yield pieces
    finally:
        for piece in done:
            _unregister(piece.address)
            _mapped.pop(piece.address, None)
            if piece.mark is not None:
                piece.mark.undefined = False


def _unregister(address: int) -> None:
    """Ends a mapping, also behind a faulty launch whose wait an exception has interrupted: later launches would read freed memory."""
    cuda = _libcuda.library()
    if cuda.cuMemHostUnregister(address) not in (0, _NOT_REGISTERED):
        _libcuda.reset()
        cuda.cuMemHostUnregister(address)


def with_pointees(named: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Adds the tensors that 64-bit integers of tensors point to. Only tensors "on cuda" are found this way."""
    torch_cuda = sys.modules.get("ptx_emulator._torch_cuda")
    if torch_cuda is None:
        return named
    found, queue = list(named), list(named)
    seen = {id(value) for _, value in named}
    while queue:
        name, value = queue.pop()
        for n, pointee in torch_cuda.pointees(value):
            if id(pointee) not in seen:
                seen.add(id(pointee))
                found.append((f"the target of {name}[{n}]", pointee))
                queue.append(found[-1])
    return found


def run(call: Callable[[], Any], named: list[tuple[str, Any]]) -> Any:
    """Launches by `call` under the schedules of the settings, and waits. Raises the fault of a kernel."""
    __tracebackhide__ = True
    state = _install.state
    if not getattr(_thread, "open", False):
        _libcuda.open_context()
        _thread.open = True
    order = _options.schedules(state.settings.schedule, state.settings.schedules)
    with mapped(with_pointees(named)) as pieces:
        if len(order) == 1 or state.settings.timed:
            return _once(call, order[0])
        before = [ctypes.string_at(piece.address, piece.bytes) for piece in pieces]
        try:
            for schedule in order[1:]:
                _libcuda.set_option("SCHEDULE", schedule)
                _once(call, schedule)
                for piece, bytes_ in zip(pieces, before):
                    ctypes.memmove(piece.address, bytes_, piece.bytes)
                    if piece.mark is not None and piece.mark.undefined:
                        _libcuda.library().ptxEmulatorUndefine(piece.address, piece.bytes)
        finally:
            _libcuda.set_option("SCHEDULE", state.settings.schedule)
        return _once(call, order[0])


def _once(call: Callable[[], Any], schedule: str) -> Any:
    __tracebackhide__ = True
    try:
        result = call()
    finally:
        wait(schedule)
    return result


def wait(schedule: str | None = None) -> None:
    """Runs all queued work. Raises the fault of a kernel, after which the context works again."""
    __tracebackhide__ = True
    state = _install.state
    code = _libcuda.library().cuCtxSynchronize()
    fault = order = None
    for report in _libcuda.reports():
        state.launches += 1
        state.warnings += report.get("warnings", ())
        if report.get("prediction"):
            time = report["prediction"]
            us = time["end_us"] - time["start_us"]
            state.times.append((report["kernel"], us))
            state.predicted_us += us
        for found in report.get("faults", ()):
            if fault is None:
                fault, order = found, (report.get("explored") or {}).get("order")
    if code:
        _libcuda.reset()
    if fault is not None:
        error = failure(fault, order or schedule or state.settings.schedule)
        if error.asserts:
            print(error.message, file=sys.stderr, flush=True)  # as CUDA does
        raise error from None
    _libcuda.check(code, "a launch")


def recover() -> None:
    """Leaves a working context behind a launch whose wait was interrupted, as by the time limit of a test."""
    broken = _libcuda.library().cuCtxSynchronize()
    _libcuda.reports()
    if broken:
        _libcuda.reset()
