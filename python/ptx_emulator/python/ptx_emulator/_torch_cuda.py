"""A stand-in for what scripts ask of `torch.cuda`, for PyTorch without a GPU.

Tensors "on cuda" are CPU tensors whose storage carries a mark. A mode that sees every call of PyTorch's Python API marks
new tensors, hands the mark on to results, and answers `device` and `is_cuda`. PyTorch computes on the CPU; only kernels
run in the emulator. The mark belongs to the storage, so views share it.

Fresh memory is aligned as PyTorch's CUDA allocator aligns it, and ends where the tensor ends, so that the emulator finds
overruns. Memory of `torch.empty` is undefined until something writes it, and is filled with 0xff.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import time
import weakref
from typing import Any

import numpy as np
import torch
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import _device_constructors

ALIGNMENT = 512
"""Alignment of PyTorch's CUDA allocator in bytes (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)."""
CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")


class Mark:
    """What the stand-in knows of a storage."""

    __slots__ = ("undefined",)

    def __init__(self) -> None:
        self.undefined = False
        """True: nothing has written the memory since `torch.empty` allocated it."""


def mark_of(tensor: torch.Tensor) -> Mark | None:
    """The mark of a tensor's storage. None: the tensor is an ordinary CPU tensor."""
    try:
        with torch._C.DisableTorchFunction():
            return getattr(tensor.untyped_storage(), "_ptx_emulator", None)
    except (NotImplementedError, RuntimeError):
        return None  # a tensor without a storage, such as a sparse one


def mark(tensor: torch.Tensor, undefined: bool = False, movable: bool = True) -> torch.Tensor:
    """Makes a tensor one "on cuda". Fresh memory moves to an aligned place, so the result may be another tensor.

    A tensor that autograd has recorded keeps its place, which is aligned to 64 bytes.
    """
    with torch._C.DisableTorchFunction():
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return tensor
        found = getattr(storage, "_ptx_emulator", None)
        if found is None and tensor.device == CPU:
            movable = movable and not tensor.requires_grad
            if movable and type(tensor) is torch.Tensor and storage.nbytes() > 0:
                tensor = aligned(tensor, copy=not undefined)
                storage = tensor.untyped_storage()
            found = storage._ptx_emulator = Mark()
            found.undefined = undefined
            _alive[storage.data_ptr()] = storage
    return tensor


def aligned(tensor: torch.Tensor, copy: bool) -> torch.Tensor:
    """The tensor in memory of its own, aligned and without slack behind it."""
    storage = tensor.untyped_storage()
    count = storage.nbytes()
    room = np.empty(count + ALIGNMENT, np.uint8)
    begin = -room.ctypes.data % ALIGNMENT
    memory = torch.from_numpy(room[begin : begin + count])
    if copy:
        memory.untyped_storage().copy_(storage)
    else:
        memory.fill_(0xFF)
    fresh = torch.empty(0, dtype=tensor.dtype)
    fresh.set_(memory.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
    return fresh


# Tensors "on cuda" by the address of their storage, for pointers that tensors hold.
_alive: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()
_LARGEST_TABLE = 1 << 20
"""Bytes of the largest tensor that is searched for pointers."""


def storage_at(address: int) -> torch.UntypedStorage | None:
    """The storage "on cuda" that contains an address."""
    alive = (one for one in list(_alive.values()) if one is not None)
    return next((one for one in alive if one.data_ptr() <= address < one.data_ptr() + one.nbytes()), None)


def pointees(tensor: Any) -> list[tuple[int, torch.Tensor]]:
    """Tensors "on cuda" that the 64-bit integers of a tensor point to, with the index of the first such integer."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in (torch.int64, torch.uint64):
        return []
    with torch._C.DisableTorchFunction():
        storage = tensor.untyped_storage()
        if not 0 < storage.nbytes() <= _LARGEST_TABLE:
            return []
        words = np.frombuffer(ctypes.string_at(storage.data_ptr(), storage.nbytes() // 8 * 8), np.uint64)
        targets = sorted((address, one) for address, one in _alive.items() if one is not None and one.nbytes() > 0)
        starts = np.array([address for address, _ in targets], np.uint64)
        at = np.searchsorted(starts, words, side="right").astype(np.int64) - 1
        found: dict[int, int] = {}
        for n in np.nonzero(at >= 0)[0]:
            address, one = targets[at[n]]
            if words[n] < address + one.nbytes() and address != storage.data_ptr():
                found.setdefault(int(at[n]), int(n))
        return [(n, torch.empty(0, dtype=torch.uint8).set_(targets[index][1])) for index, n in found.items()]


def is_cuda(device: Any) -> bool:
    """Whether a device argument names the GPU."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device == "cuda" or device.startswith("cuda:")
    # PyTorch takes a number for a device of the accelerator.
    return isinstance(device, int) and not isinstance(device, bool)


def tensors(value: Any):
    """Tensors in arguments or results, also inside lists, tuples and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors(one)


def mapped(value: Any, change: Any) -> Any:
    """A result with each tensor replaced."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(mapped(one, change) for one in value)
    if isinstance(value, tuple):
        # A named tuple of PyTorch cannot be made from Python, so its tensors stay where they are.
        for one in tensors(value):
            mark(one, movable=False)
    return value


T = torch.Tensor
_EMPTY = {torch.empty, torch.empty_like, torch.empty_strided, T.new_empty, T.new_empty_strided}
# Questions about a tensor whose answers are no tensors.
_ASK = {
    T.data_ptr, T.stride, T.size, T.dim, T.numel, T.element_size, T.storage_offset, T.is_contiguous, T.untyped_storage,
    T.__len__, T.__hash__, T.nelement, T.ndimension, T.is_floating_point, T.is_complex, torch.is_tensor, torch.numel,
    torch.is_floating_point,
}  # fmt: skip
# Calls that neither read nor write elements.
_VIEWS = {
    T.view, T.reshape, T.permute, T.transpose, T.t, T.expand, T.unsqueeze, T.squeeze, T.flatten, T.detach, T.narrow,
    T.select, T.as_strided, T.unflatten, T.view_as, T.expand_as, T.__getitem__, T.movedim, T.requires_grad_,
    torch.transpose, torch.permute, torch.reshape, torch.squeeze, torch.unsqueeze, torch.flatten, torch.narrow,
    torch.select,
}  # fmt: skip


class CudaMode(TorchFunctionMode):
    """Sees every call of PyTorch's Python API."""

    default = False
    """True: `torch.set_default_device` named the GPU."""
    context = contextlib.nullcontext
    """What a call with tensors "on cuda" runs in."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _ASK:
            return func(*args, **kwargs)
        special = _SPECIAL.get(func)
        if special is not None:
            return special(func, *args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "__get__":
            out = func(*args, **kwargs)
            if isinstance(out, torch.Tensor) and mark_of(args[0]) is not None:
                out = mark(out, movable=False)  # `grad`, `data`, `T`, `real`
            return out
        if self.default and kwargs.get("device") is None and func in _device_constructors():
            kwargs = {**kwargs, "device": CUDA}
        marks = [one for tensor in tensors((args, kwargs)) if (one := mark_of(tensor)) is not None]
        wanted = "device" in kwargs and kwargs["device"] is not None
        cuda = is_cuda(kwargs["device"]) if wanted else bool(marks)
        if wanted and cuda:
            kwargs = {**kwargs, "device": CPU}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func not in _VIEWS and func not in _EMPTY:
            for one in marks:
                one.undefined = False
        if not cuda:
            return func(*args, **kwargs)
        with CudaMode.context():
            out = func(*args, **kwargs)
        if out is None:
            return out
        inputs = {id(tensor) for tensor in tensors((args, kwargs))}
        undefined = func in _EMPTY
        return mapped(out, lambda tensor: tensor if id(tensor) in inputs else mark(tensor, undefined))


def _device_get(func, tensor):
    return CUDA if mark_of(tensor) is not None else func(tensor)


def _is_cuda_get(func, tensor):
    return mark_of(tensor) is not None or func(tensor)


def _is_cpu_get(func, tensor):
    return mark_of(tensor) is None and func(tensor)


def _get_device(func, tensor):
    return 0 if mark_of(tensor) is not None else func(tensor)


def _to_device(tensor: torch.Tensor, cuda: bool, func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """Converts, and copies between "cuda" and the CPU as a transfer would."""
    here = mark_of(tensor)
    out = func(tensor, *args, **kwargs)
    if here is not None and not cuda:
        here.undefined = False
        return out.clone() if mark_of(out) is not None else out
    if here is None and cuda:
        with torch._C.DisableTorchFunction():
            if out is tensor or out.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
                out = out.clone()
    return mark(out) if cuda else out


def _to(func, tensor, *args, **kwargs):
    def plain(value):
        return CPU if is_cuda(value) and not isinstance(value, int) else value

    wanted = [*args, kwargs.get("device"), kwargs.get("other")]
    cuda = mark_of(tensor) is not None
    for one in wanted:
        if isinstance(one, torch.Tensor):
            cuda = mark_of(one) is not None
        elif isinstance(one, (str, torch.device)) or isinstance(one, int) and not isinstance(one, bool):
            cuda = is_cuda(one)
    args = tuple(CPU if isinstance(one, int) and not isinstance(one, bool) else plain(one) for one in args)
    kwargs = {name: CPU if name == "device" and is_cuda(one) else one for name, one in kwargs.items()}
    return _to_device(tensor, cuda, func, args, kwargs)


def _cuda(func, tensor, *args, **kwargs):
    return _to_device(tensor, True, lambda one: one, (), {})


def _cpu(func, tensor, *args, **kwargs):
    return _to_device(tensor, False, func, args, kwargs)


def _numpy(func, tensor, *args, **kwargs):
    if mark_of(tensor) is not None and not kwargs.get("force"):
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
        )
    return func(tensor, *args, **kwargs)


def _same(func, tensor, *args, **kwargs):
    return tensor


def _type_of(func, tensor, dtype=None, *args, **kwargs):
    if dtype is None:
        name = func(tensor)
        return name.replace("torch.", "torch.cuda.", 1) if mark_of(tensor) is not None else name
    if isinstance(dtype, str) and dtype.startswith("torch.cuda."):
        return _to_device(tensor, True, func, (dtype.replace("torch.cuda.", "torch.", 1), *args), kwargs)
    return (
        mark(func(tensor, dtype, *args, **kwargs))
        if mark_of(tensor) is not None
        else func(tensor, dtype, *args, **kwargs)
    )


def _repr(func, tensor, *args, **kwargs):
    text = func(tensor, *args, **kwargs)
    return text[:-1] + ", device='cuda:0')" if mark_of(tensor) is not None and text.endswith(")") else text


_SPECIAL = {
    T.device.__get__: _device_get,
    T.is_cuda.__get__: _is_cuda_get,
    T.is_cpu.__get__: _is_cpu_get,
    T.get_device: _get_device,
    T.to: _to,
    T.cuda: _cuda,
    T.cpu: _cpu,
    T.numpy: _numpy,
    T.type: _type_of,
    T.__repr__: _repr,
    T.pin_memory: _same,
    T.is_pinned: lambda func, tensor, *args, **kwargs: False,
    T.record_stream: lambda func, tensor, stream: None,
}


# ---- torch.cuda ----


class Properties:
    """`torch.cuda.get_device_properties`."""

    def __init__(self, card: dict[str, Any]) -> None:
        self.name = card["name"]
        self.major, self.minor = card["capability"]
        self.total_memory = card["memory"]
        self.multi_processor_count = card["multiprocessors"]
        self.warp_size = 32
        self.max_threads_per_multi_processor = card["threads"]
        self.regs_per_multiprocessor = card["registers"]
        self.shared_memory_per_block = 48 << 10
        self.shared_memory_per_block_optin = card["shared"]
        self.shared_memory_per_multiprocessor = card["shared_multiprocessor"]
        self.L2_cache_size = card["l2"]
        self.is_integrated = self.is_multi_gpu_board = 0
        self.uuid = "ptx-emulator"
        self.gcnArchName = ""

    def __repr__(self) -> str:
        return f"_CudaDeviceProperties(name={self.name!r}, major={self.major}, minor={self.minor}, emulated)"


class Stream:
    """A stream. Launches run when they are called, so every order of streams holds."""

    cuda_stream = 0
    stream_id = 0
    device_index = 0
    device = CUDA
    priority = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self):
        return self

    def __exit__(self, *exception: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event

    def synchronize(self, *args: Any) -> None:
        pass

    wait_stream = wait_event = synchronize


class Event:
    """An event. It measures the time of the emulation or, with `timed`, the predicted time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._at: float | None = None
        self._model: float = 0.0

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()
        self._model = _model_clock()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds between two events."""
        if self._at is None or end._at is None:
            raise RuntimeError("both events must be recorded before their times are compared")
        return end._model - self._model if _timed() else (end._at - self._at) * 1e3


def _timed() -> bool:
    from ._install import state

    return bool(state.settings.timed)


def _model_clock() -> float:
    """Milliseconds of predicted launches so far."""
    from ._install import state

    return state.predicted_us / 1e3


class Graph:
    """CUDA graphs would replay launches without Python, which the stand-in cannot."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("ptx-emulator: CUDA graphs of PyTorch are not emulated; launch without a graph")


class _Generator(torch.Generator):
    """A generator of the CPU, also for "cuda"."""

    def __new__(cls, device: Any = "cpu"):
        return super().__new__(cls, device=CPU if is_cuda(device) else device)


class _Philox:
    """The default generator of the GPU, for projects whose kernels draw from its seed and offset. PyTorch draws from the CPU's."""

    device = CUDA

    def __init__(self) -> None:
        self._state = [torch.initial_seed(), 0]

    def get_state(self) -> torch.Tensor:
        seed, offset = self._state
        return torch.from_numpy(np.array([seed % 2**64, offset], np.uint64).view(np.uint8))

    def set_state(self, state: torch.Tensor) -> None:
        self._state = state.view(torch.int64).tolist()

    def initial_seed(self) -> int:
        return self._state[0]

    def manual_seed(self, seed: int) -> _Philox:
        self._state = [int(seed), 0]
        return self

    def get_offset(self) -> int:
        return self._state[1]

    def set_offset(self, offset: int) -> None:
        self._state[1] = offset


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))
    for generator in torch.cuda.default_generators:
        generator.manual_seed(seed)


def _answer(value: Any) -> Any:
    """A function that returns a value for any arguments. Dynamo wants each function of PyTorch to be another object."""
    return lambda *args, **kwargs: value


def _set_default_device(real: Any, device: Any) -> None:
    cuda = device is not None and is_cuda(device)
    # PyTorch's own mode for the default device would run below this one.
    real(None if cuda else device)
    if _mode is not None:
        _mode.default = cuda


def _get_default_device(real: Any) -> torch.device:
    return CUDA if _mode is not None and _mode.default else real()


def _with_mode(backward: Any) -> Any:
    """Makes a function's `backward` see gradients "on cuda".

    PyTorch calls it inside of a call that the mode sees, where the mode is off, with gradients that the engine made.
    """

    @functools.wraps(backward)
    def apply(self, *args):
        saved = [mark_of(one) for one in self.saved_tensors if one is not None]
        if not saved or any(saved):
            for one in tensors(args):
                mark(one, movable=False)
        with mode():
            return backward(self, *args)

    return apply


def mode() -> contextlib.AbstractContextManager[Any]:
    """The mode, for code that PyTorch calls where it is off."""
    return contextlib.nullcontext() if _mode in _get_current_function_mode_stack() else _mode


_mode: CudaMode | None = None


def install(card: dict[str, Any]) -> None:
    """Puts the stand-in in place. `card`: properties of the GPU."""
    global _mode
    if _mode is not None:
        return
    properties = Properties(card)
    cuda = torch.cuda
    for name, value in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "device_count": lambda: 1,
        "current_device": _answer(0),
        "get_device_name": lambda *args: properties.name,
        "get_device_capability": lambda *args: (properties.major, properties.minor),
        "get_device_properties": lambda *args: properties,
        "get_arch_list": lambda: [f"sm_{properties.major}{properties.minor}"],
        "mem_get_info": lambda *args: (properties.total_memory, properties.total_memory),
        "current_stream": lambda *args: Stream(),
        "default_stream": lambda *args: Stream(),
        "stream": lambda stream: contextlib.nullcontext(stream),
        "memory_stats": lambda *args: {},
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": lambda *args, **kwargs: Graph(),
        "default_generators": (_Philox(),),
        # `torch.manual_seed` calls these two, so they may not call it.
        "manual_seed": _seed,
        "manual_seed_all": _seed,
        "seed": lambda: torch.seed() and None,
        "seed_all": lambda: torch.seed() and None,
        "initial_seed": lambda: torch.initial_seed(),
        "get_rng_state": lambda *args: torch.get_rng_state(),
        "set_rng_state": lambda state, *args: torch.set_rng_state(state),
        "is_current_stream_capturing": _answer(False),
        "_exchange_device": _answer(0),
        "_maybe_exchange_device": _answer(0),
    }.items():
        setattr(cuda, name, value)
    for name in (
        "init", "_lazy_init", "synchronize", "set_device", "empty_cache", "ipc_collect", "set_stream",
        "reset_peak_memory_stats", "reset_max_memory_allocated", "reset_accumulated_memory_stats",
    ):  # fmt: skip
        setattr(cuda, name, _answer(None))
    for name in (
        "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "utilization",
    ):  # fmt: skip
        setattr(cuda, name, _answer(0))
    for name in ("range_push", "range_pop", "mark"):
        setattr(cuda.nvtx, name, _answer(None))
    cuda.nvtx.range = lambda *args, **kwargs: contextlib.nullcontext()
    cuda.graphs.is_current_stream_capturing = _answer(False)
    # What a build of PyTorch for CUDA calls by itself.
    for name, value in {
        "_cuda_isCurrentStreamCapturing": False,
        "_cuda_getCurrentRawStream": 0,
        "_cuda_getDevice": 0,
        "_cuda_getDeviceCount": 1,
        "_cuda_setDevice": None,
        "_cuda_synchronize": None,
    }.items():
        if hasattr(torch._C, name):
            setattr(torch._C, name, _answer(value))
    if getattr(torch, "accelerator", None) is not None:
        for name, value in {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_accelerator": lambda *args, **kwargs: torch.device("cuda"),
            "current_device_index": _answer(0),
            "current_device_idx": _answer(0),
            "current_stream": lambda *args: Stream(),
            "synchronize": _answer(None),
            "set_device_index": _answer(None),
            "set_device_idx": _answer(None),
        }.items():
            setattr(torch.accelerator, name, value)
    # A compiled function would run code for the CPU, and its tracer does not understand the mode. Uncompiled, it runs as it is.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    if torch.version.cuda is None:
        torch.version.cuda = "13.0"
    torch.Generator = _Generator
    torch.set_default_device = functools.partial(_set_default_device, torch.set_default_device)
    torch.get_default_device = functools.partial(_get_default_device, torch.get_default_device)
    torch.nn.Module.cuda = lambda self, device=None: self.to(CUDA)
    BackwardCFunction.apply = _with_mode(BackwardCFunction.apply)
    from . import _torch_library

    _torch_library.install()
    CudaMode.context = staticmethod(_torch_library.context)
    _mode = CudaMode()
    _mode.__enter__()
