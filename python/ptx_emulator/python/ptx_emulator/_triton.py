"""Triton's driver on the emulator.

Kernels are compiled by Triton's NVIDIA backend up to PTX, and launched by its own launcher through the emulated
`libcuda.so.1`. This file replaces what needs a GPU around that: ptxas, PyTorch's memory and streams, and the timing of
configurations.
"""

from __future__ import annotations

import hashlib
import os
import time
from typing import Any

from . import _install, _libcuda, _process

_driver: Any = None


def active() -> Any:
    """The driver, for Triton's own search for one."""
    if _driver is None:
        _install.install()
    return _driver


def install() -> None:
    """Makes the emulator Triton's active driver."""
    global _driver
    import triton

    if not hasattr(triton, "runtime") or not hasattr(triton.runtime, "driver"):
        return  # Triton is being imported; its search for a driver leads to `active`.
    if _driver is not None:
        triton.runtime.driver.set_active(_driver)
        return
    # Triton caches a kernel by its text, with the path of its file inside. A cache per folder keeps the paths of faults right.
    folder = hashlib.sha256(os.getcwd().encode()).hexdigest()[:16]
    os.environ.setdefault("TRITON_CACHE_DIR", os.path.join(os.path.expanduser("~"), ".triton", "ptx-emulator", folder))
    _driver = _make_driver()
    _keep_ptx()
    _replace_cublas()
    _patch_autotuner()
    # The exceptions of launches have the faults.
    _libcuda.set_option("QUIET", "1")
    triton.runtime.driver.set_active(_driver)


def _keep_ptx() -> None:
    """The emulator runs PTX, so ptxas is not needed."""
    from triton.backends.nvidia import compiler

    compiler.CUDABackend.make_cubin = lambda self, source, *rest, **options: source.encode() + b"\0"


def _replace_cublas() -> None:
    """Triton's tests compare with cuBLAS, which needs a GPU. PyTorch computes on the CPU instead."""
    from triton._C.libtriton import nvidia

    class CublasLt:
        """Products of a row-major `a` and a row-major, transposed `b`."""

        def __init__(self, workspace):
            pass

        def matmul(self, a, b, c):
            c.copy_(a.float() @ b.float().T)

        def gemm(self, a, b, c, d, alpha, beta):
            d.copy_(alpha * (a.float() @ b.float().T) + beta * c.float())

        def block_scaled_matmul_mxfp8(self, *args):
            raise NotImplementedError("ptx-emulator: cuBLAS's products with block scales are not emulated")

        block_scaled_matmul_nvfp4 = block_scaled_matmul_mxfp8

    if hasattr(nvidia, "cublas"):
        nvidia.cublas.CublasLt = CublasLt


def _make_launcher() -> type:
    from triton.backends.nvidia import driver as nvidia

    class EmulatedLauncher(nvidia.CudaLauncher):
        """Maps the tensors of a launch, waits for it, and raises its fault."""

        def __init__(self, src, metadata):
            super().__init__(src, metadata)
            function = getattr(src, "fn", None)
            self._names = list(getattr(function, "arg_names", None) or ())
            self._inner = self.launch
            if getattr(metadata, "global_scratch_size", 0) or getattr(metadata, "profile_scratch_size", 0):
                self.launch = self._with_scratch

        def _with_scratch(self, *args):
            named = [pair for n, one in enumerate(args) for pair in _process.tensors_of("scratch memory", one)]
            with _process.mapped(named):
                self._inner(*args)
                # Scratch memory is freed after this call, so the launch must end here.
                _libcuda.library().cuCtxSynchronize()

        def __call__(self, *args, **kwargs):
            __tracebackhide__ = True
            values = args[len(args) - len(self._names) :] if self._names else args
            names = self._names or [f"argument {n}" for n in range(len(values))]
            named = [pair for name, one in zip(names, values) for pair in _process.tensors_of(name, one)]
            launch = super().__call__
            _process.run(lambda: launch(*args, **kwargs), named)

    return EmulatedLauncher


def _make_driver() -> Any:
    from triton.backends.nvidia import driver as nvidia

    class Driver(nvidia.CudaDriver):
        """NVIDIA's driver without PyTorch's CUDA."""

        def __new__(cls):
            return object.__new__(cls)

        def __init__(self):
            self.utils = nvidia.CudaUtils()
            self.launcher_cls = _make_launcher()
            card = _libcuda.card()
            self.get_device_capability = lambda device=0: card["capability"]
            self.get_current_stream = lambda device=0: 0
            self.get_current_device = lambda: 0
            self.set_current_device = lambda device: None

        @staticmethod
        def is_active():
            return True

        def get_active_torch_device(self):
            import torch

            return torch.device("cuda", 0)

        def get_device_interface(self):
            import torch

            return torch.cuda

        def get_benchmarker(self):
            return _benchmark

        def get_empty_cache_for_benchmark(self):
            import torch

            # The emulator has no cache to flush.
            return torch.zeros(1, dtype=torch.int, device="cuda")

        def clear_cache(self, cache):
            pass

    return Driver()


def _benchmark(call, quantiles=None, **options) -> Any:
    """Milliseconds of a call, made once: the model's prediction if launches are timed, else the emulation's time."""
    state = _install.state
    began, before = time.perf_counter(), state.predicted_us
    call()
    ms = (state.predicted_us - before) / 1e3 if state.settings.timed else (time.perf_counter() - began) * 1e3
    return [ms] * len(quantiles) if quantiles else ms


def _patch_autotuner() -> None:
    """Without predicted times, the emulation's time says nothing about a configuration: the first that fits is used."""
    from triton.runtime import autotuner

    run, bench = autotuner.Autotuner.run, autotuner.Autotuner._bench

    def run_once(self, *args, **kwargs):
        self._ptx_emulator_found = False
        return run(self, *args, **kwargs)

    def bench_first(self, *args, **kwargs):
        if _install.state.settings.timed:
            return bench(self, *args, **kwargs)
        if getattr(self, "_ptx_emulator_found", False):
            return [float("inf")] * 3
        times = bench(self, *args, **kwargs)
        self._ptx_emulator_found = times[0] != float("inf")
        return times

    autotuner.Autotuner.run, autotuner.Autotuner._bench = run_once, bench_first
