"""NVFP4 mixture-of-experts and linear layers for PyTorch, on the CPU and on NVIDIA GPUs.

NVFP4 is a format of 4-bit numbers (e2m1) with one scale (e4m3) per 16 numbers along a row, and one f32 scale per tensor. :class:`Linear`
and :class:`Moe` are layers with NVFP4 weights. The weights come from :func:`quantize` or from a checkpoint; :class:`MoeBlock` is a whole MoE
layer of a checkpoint.

>>> import torch, nvfp4
>>> tensor = nvfp4.quantize(torch.linspace(-1, 1, 64).reshape(2, 32))
>>> tensor.values.shape, tensor.scales.shape, tensor.global_scale.shape
(torch.Size([2, 16]), torch.Size([2, 2]), torch.Size([]))
>>> nvfp4.dequantize(tensor)[0, 0].item()
-1.0

The operators are ``torch.ops.nvfp4.moe``, ``linear``, ``route``, ``quantize`` and ``dequantize``. They run on the tensors' device, on a GPU
on PyTorch's current stream. They can be compiled (``torch.compile(fullgraph=True)``), exported (``torch.export``) and captured into CUDA
graphs. The layers have gradients with respect to tokens if they are created with ``differentiable=True``. A wrong type, shape, device or stride raises a ``ValueError`` that names the argument; a failure of the
device raises an :class:`Error`.
"""

from . import _operators
from ._checkpoint import MoeBlock
from ._linear import Linear
from ._moe import Moe
from ._native import Error
from ._operators import BLOCK, Quantized, dequantize, linear, moe, moe_workspace_bytes, quantize, route

__all__ = [
    "BLOCK",
    "Error",
    "Linear",
    "Moe",
    "MoeBlock",
    "Quantized",
    "dequantize",
    "linear",
    "moe",
    "moe_workspace_bytes",
    "quantize",
    "route",
]

del _operators
