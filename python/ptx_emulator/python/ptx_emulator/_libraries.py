"""Libraries that would link or compile machine code: they launch their PTX instead."""

from __future__ import annotations

from . import _process
from ._import import after


def install() -> None:
    """Adapts each library when it is imported."""
    after("numba.cuda.codegen", _numba)
    after("tilelang.jit.adapter.nvrtc.libgen", _tilelang_compiler)
    after("tilelang.jit.adapter.nvrtc.adapter", _tilelang_launcher)


def _numba() -> None:
    from cuda.core import ObjectCode
    from numba.cuda import codegen

    def get_cubin(self, cc=None):
        return ObjectCode.from_ptx(self.get_asm_str(cc=cc).encode())

    codegen.CUDACodeLibrary.get_cubin = get_cubin


def _tilelang_compiler() -> None:
    from tilelang.jit.adapter.nvrtc import libgen

    compile_cuda = libgen.compile_cuda

    def compile_ptx(code, target_format="ptx", **options):
        return compile_cuda(code, target_format="ptx", **options)

    libgen.compile_cuda = compile_ptx


def _tilelang_launcher() -> None:
    from tilelang.jit.adapter.nvrtc import adapter

    forward = adapter.NVRTCKernelAdapter._forward_from_prebuild_lib

    def forward_mapped(self, *args, **options):
        names = [str(getattr(param, "name", f"argument {n}")) for n, param in enumerate(self.prim_func.params)]
        names += [f"argument {n}" for n in range(len(names), len(args))]
        named = [pair for name, one in zip(names, args) for pair in _process.tensors_of(name, one)]
        return _process.run(lambda: forward(self, *args, **options), named)

    adapter.NVRTCKernelAdapter._forward_from_prebuild_lib = forward_mapped
