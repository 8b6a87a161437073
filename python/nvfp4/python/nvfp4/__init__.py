"""NVFP4 mixture-of-experts and linear layers for PyTorch, on the CPU and on NVIDIA GPUs.

NVFP4 is 4-bit numbers (e2m1) with a scale (e4m3) for every 16 along a row, and one f32 scale for the tensor. A layer of such
weights is a :class:`Linear` or a :class:`Moe`; :func:`quantize` makes them, checkpoints have them.

>>> import torch, nvfp4
>>> tensor = nvfp4.quantize(torch.linspace(-1, 1, 64).reshape(2, 32))
>>> tensor.values.shape, tensor.scales.shape, tensor.global_scale.shape
(torch.Size([2, 16]), torch.Size([2, 2]), torch.Size([]))
>>> nvfp4.dequantize(tensor)[0, 0].item()
-1.0

The operators are ``torch.ops.nvfp4.moe``, ``linear``, ``route``, ``quantize`` and ``dequantize``. They run on the tensors' device, there on PyTorch's
current stream, and may be compiled (``torch.compile(fullgraph=True)``) and captured into CUDA graphs. They are for inference:
none has a gradient. A wrong type, shape, device or stride is a ``ValueError`` that names the argument; a failure of the device is
an :class:`Error`.
"""

from . import _operators
from ._linear import Linear
from ._moe import Moe
from ._native import Error
from ._operators import BLOCK, Quantized, dequantize, linear, moe, moe_workspace_bytes, quantize, route

__all__ = [
    "BLOCK",
    "Error",
    "Linear",
    "Moe",
    "Quantized",
    "dequantize",
    "linear",
    "moe",
    "moe_workspace_bytes",
    "quantize",
    "route",
]

del _operators
