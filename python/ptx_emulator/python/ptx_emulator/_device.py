"""Devices, their memory, and launches."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from . import _options
from ._arguments import Mapped, arrays_of, encode, names_of
from ._errors import failure
from ._memory import pointer
from ._module import Module, module
from ._native import Device as _NativeDevice
from ._report import Exploration, Report

Size = int | Sequence[int]
Args = Sequence[Any] | Mapping[str, Any]


class Buffer:
    """Memory of a device. It lives until `free` or until the device is dropped."""

    def __init__(self, device: Device, address: int, nbytes: int, name: str) -> None:
        self.device = device
        self.address = address
        """Device address of the first byte, a multiple of 256."""
        self.nbytes = nbytes
        self.name = name

    def read(self, dtype: Any = np.uint8) -> np.ndarray:
        """A copy of the memory."""
        array = np.zeros(self.nbytes // np.dtype(dtype).itemsize, dtype)
        self.device.native.copy_out(self.address, pointer(array), array.nbytes, True)
        return array

    def write(self, array: Any, offset: int = 0) -> None:
        """Writes an array's elements at an offset in bytes."""
        array = np.ascontiguousarray(array)
        self.device.native.copy_in(self.address + offset, pointer(array), array.nbytes)

    def free(self) -> None:
        """Frees the memory. A kernel that still uses it faults."""
        self.device.native.free(self.address)

    def __repr__(self) -> str:
        return f"<Buffer {self.name!r}, {self.nbytes} bytes at {self.address:#x}>"


class Device:
    """An emulated GPU with its memory. Variables of modules keep their values between its launches.

    `gpu`: h200, b200, rtx-5090 or another GPU of `ptx_emulator.GPUS`; the default fits the target of the first module.
    `timed`: True or a GPU, whose clock launches run by; then no hazards are searched for.
    `constants` overrides constants of the time model (`{"dram-bandwidth": 4800}`).
    """

    def __init__(
        self,
        gpu: str | None = None,
        *,
        timed: bool | str = False,
        constants: Mapping[str, float] | None = None,
    ) -> None:
        self.timed = _options.timed(gpu, timed)
        self.gpu = gpu or self.timed or "h200"
        settings = [f"{name}={value}" for name, value in (constants or {}).items()]
        self.native = _NativeDevice(_options.sms(self.gpu), self.timed, settings)
        self._allocations = 0

    def empty(self, nbytes: int, name: str | None = None) -> Buffer:
        """Memory that is undefined until something writes it."""
        return self._allocate(nbytes, name, True)

    def zeros(self, nbytes: int, name: str | None = None) -> Buffer:
        """Memory of zero bytes."""
        return self._allocate(nbytes, name, False)

    def upload(self, array: Any, name: str | None = None) -> Buffer:
        """Memory with a copy of an array."""
        array = np.ascontiguousarray(array)
        buffer = self._allocate(array.nbytes, name, False)
        buffer.write(array)
        return buffer

    def _allocate(self, nbytes: int, name: str | None, undefined: bool) -> Buffer:
        self._allocations += 1
        name = name or f"buffer {self._allocations}"
        return Buffer(self, self.native.allocate(nbytes, name, undefined), nbytes, name)

    def launch(
        self,
        ptx: Module | str | bytes,
        entry: str | None = None,
        grid: Size = 1,
        block: Size = 1,
        args: Args = (),
        *,
        cluster: Size | None = None,
        shared_bytes: int = 0,
        level: str = "default",
        schedule: str = "fair",
        schedules: int | Iterable[str] = 1,
        limit: str | int | float | None = "600s",
        allow: str | Iterable[str] = (),
        keep_going: bool = False,
        global_races: bool = True,
        sums: str = "card",
        overlaps: bool = False,
    ) -> Report:
        """Runs a kernel to its end. See `ptx_emulator.launch`."""
        order = _options.schedules(schedule, schedules)
        if self.timed and (len(order) > 1 or order[0].startswith("order:")):
            raise ValueError("schedules: a timed launch runs under the fair schedule only")
        options = {
            "cluster": cluster,
            "shared_bytes": shared_bytes,
            "level": level,
            "sums": sums,
            "allow": allow,
            "keep_going": keep_going,
            "global_races": global_races,
            "overlaps": overlaps,
            "limit": limit,
        }
        with self._prepared(ptx, entry, grid, block, args, options) as call:
            first = self._under_schedules(*call, order)
        return Report(first, tuple(order))

    def explore(
        self,
        ptx: Module | str | bytes,
        entry: str | None = None,
        grid: Size = 1,
        block: Size = 1,
        args: Args = (),
        *,
        cluster: Size | None = None,
        shared_bytes: int = 0,
        level: str = "default",
        limit: str | int | float | None = "600s",
        allow: str | Iterable[str] = (),
        global_races: bool = True,
        sums: str = "card",
        preemptions: int | None = None,
        orders: int = 100_000,
        seconds: float = 60.0,
        every_fault: bool = False,
    ) -> Exploration:
        """Runs a kernel in all orders of its warps and asynchronous operations. See `ptx_emulator.explore`."""
        options = {
            "cluster": cluster,
            "shared_bytes": shared_bytes,
            "level": level,
            "sums": sums,
            "allow": allow,
            "keep_going": False,
            "global_races": global_races,
            "overlaps": False,
            "limit": limit,
        }
        if orders < 1 or (preemptions is not None and preemptions < 0):
            raise ValueError(f"orders: {orders}, preemptions: {preemptions}; expected at least 1 order and 0 preemptions")
        bounds = {"preemptions": preemptions, "orders": orders, "seconds": seconds, "every_fault": every_fault}
        with self._prepared(ptx, entry, grid, block, args, options) as (code, entry, options, values, mapped):
            mapped.fill()
            options = {**options, "schedule": "fair"}
            text, fault = self.native.explore(code.native, entry, options, values, bounds)
            mapped.fetch()
        if fault is not None:
            raise failure(json.loads(fault))
        found = Exploration(text)
        if found.failures and not every_fault:
            raise found.failures[0]
        return found

    @contextmanager
    def _prepared(self, ptx, entry, grid, block, args, options):
        """The checked parts of a call: module, entry, options, the bytes of each argument, and the arrays' memory."""
        code = module(ptx)
        if entry is None:
            if len(code.entries) != 1:
                raise ValueError(f"the module has {len(code.entries)} entries; name one of {', '.join(code.entries)}")
            entry = code.entries[0]
        declared = code.parameters(entry)
        named = names_of(args, declared)
        if len(named) != len(declared):
            takes = ", ".join(name for name, _ in declared) or "none"
            raise TypeError(f"{entry} takes {len(declared)} arguments ({takes}); {len(named)} were given")
        cluster = options["cluster"]
        options = options | {
            "grid": _options.size("grid", grid),
            "block": _options.size("block", block),
            "cluster": _options.size("cluster", cluster) if cluster is not None else code.cluster(entry) or (1, 1, 1),
            "allow": _options.allow(options["allow"]),
            "limit": _options.limit(options["limit"]),
        }
        mapped = Mapped(self)
        try:
            mapped.add(arrays_of(named))
            values = [encode(name, value, size, mapped) for (name, value), (_, size) in zip(named, declared)]
            yield code, entry, options, values, mapped
        finally:
            mapped.free()

    def _under_schedules(self, code, entry, options, values, mapped, order):
        """Runs the launch under each schedule, from the same arrays. The arrays get the first schedule's results."""
        first = None
        # The first schedule is the last to run, so that its results stay.
        for schedule in [*order[1:], order[0]]:
            mapped.fill()
            first, fault = self.native.launch(code.native, entry, {**options, "schedule": schedule}, values)
            if fault is not None:
                mapped.fetch()
                raise failure(json.loads(fault), schedule)
        mapped.fetch()
        return first


def launch(
    ptx: Module | str | bytes,
    entry: str | None = None,
    grid: Size = 1,
    block: Size = 1,
    args: Args = (),
    *,
    gpu: str | None = None,
    timed: bool | str = False,
    constants: Mapping[str, float] | None = None,
    **options: Any,
) -> Report:
    """Runs a kernel to its end on a new device, and raises `Fault` if it does something wrong.

    ptx          PTX text, a path (`pathlib.Path`), or a `Module`
    entry        name of the kernel; may be left out if the module has only one
    grid, block  numbers of CTAs and of threads per CTA: an int, or up to three
    args         a value per parameter, in order; a mapping also names them for faults. Arrays and CPU tensors are passed as
                 pointers to their elements, with their whole storage as memory; a list of arrays as a pointer to an array
                 of pointers. Python numbers take the parameter's size. Other values: NumPy scalars, `TensorMap`, bytes,
                 ctypes.
    cluster      CTAs per cluster; the default is what the kernel requires
    shared_bytes dynamic shared memory per CTA
    level        machine, default or strict (README, "Levels")
    schedule     fair, worst, seed:N, or the order of a fault that `explore` found
    schedules    number of schedules to run under (fair, worst, seed:1, ...), or their names. Arrays get the results of
                 the first
    limit        seconds ("60s") or instructions of a warp (a number); a list of both; None: no limit
    allow        kinds of hazards to ignore: "data-race", or "data-race:40" for a PTX line
    keep_going   continue after hazards, and list them in `Report.hazards`
    global_races look for races between CTAs in global memory
    sums         card (as the tensor cores add, to the bit) or exact
    overlaps     the launch may begin before the previous launch of the device ends (programmatic dependent launch)
    gpu, timed, constants: see `Device`
    """
    code = module(ptx)
    device = Device(gpu or (None if timed else _options.gpu_of(code.target)), timed=timed, constants=constants)
    return device.launch(code, entry, grid, block, args, **options)


def explore(
    ptx: Module | str | bytes,
    entry: str | None = None,
    grid: Size = 1,
    block: Size = 1,
    args: Args = (),
    *,
    gpu: str | None = None,
    **options: Any,
) -> Exploration:
    """Runs a small launch in all orders that its warps and asynchronous operations can take.

    Of orders that give the same result because they differ only in independent steps, one is run. The first fault is
    raised. Its `schedule` is a short order that shows it: `launch(..., schedule=fault.schedule)` replays it. Arrays get
    the first order's results; after a fault they are as before.

    preemptions  explore only orders in which warps that could run on let another warp run at most this many times
    orders       maximum number of orders
    seconds      maximum time
    every_fault  go on behind faults, and list each once in `Exploration.failures` instead of raising the first

    The other arguments are the same as of `launch`, without `schedule`, `schedules`, `keep_going`, `overlaps` and `timed`.
    """
    code = module(ptx)
    device = Device(gpu or _options.gpu_of(code.target))
    return device.explore(code, entry, grid, block, args, **options)
