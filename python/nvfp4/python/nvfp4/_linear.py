"""The linear layer as a module."""

from collections.abc import Sequence

import torch

from . import _gradients, _native, _operators
from ._operators import Quantized


class Linear(torch.nn.Module):
    """A linear layer. The module packs a checkpoint's tensors into the layout that the kernels read.

    ``weight`` is a :class:`Quantized` ``[N, K]``. Several stacked projections (q, k and v; gate and up) can be one layer. Then
    ``weight.global_scale`` has one number per projection, and ``rows`` has the number of rows per projection. The tensor is packed
    once, on its device, into one tensor, :attr:`weights`, and not kept.

    :param bias: ``[N]``, float32 or of type ``dtype``.
    :param dtype: bfloat16 or float16: the token type.
    :param token_format: ``16-bit``, ``fp8`` or ``nvfp4``: see :func:`moe`.
    :param input_scale: with ``nvfp4``, the tokens' global scale from a checkpoint; if omitted, each token has its own global scale.
    :param rows: rows of each projection, multiples of 16; if omitted, the weight has one global scale.
    :param differentiable: keep the checkpoint's tensors too, from which the gradient with respect to ``x`` is computed.
    :raises ValueError: if a type, a shape, a device or a scale is wrong; the message has its name and place.
    :raises Error: if the device fails or has no kernel for the layer.

    >>> import torch, nvfp4
    >>> layer = nvfp4.Linear(nvfp4.quantize(torch.randn(48, 64)), torch.zeros(48))
    >>> layer(torch.randn(2, 3, 64).bfloat16()).shape
    torch.Size([2, 3, 48])
    """

    def __init__(
        self,
        weight: Quantized,
        bias: torch.Tensor | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        rows: Sequence[int] | None = None,
        token_format: str = "16-bit",
        input_scale: float | None = None,
        differentiable: bool = False,
    ) -> None:
        super().__init__()
        values, scales, global_scale = weight
        if values.dim() != 2:
            raise ValueError(f"values: expected 2 dimensions, [N, K/2], got {list(values.shape)}")
        if global_scale.dtype != torch.float32:
            raise ValueError(f"global_scale: expected float32, got {global_scale.dtype}")
        self.out_features, self.in_features = values.shape[0], 2 * values.shape[1]
        self.dtype = dtype
        rows = [self.out_features] if rows is None else list(rows)
        if global_scale.numel() != len(rows):
            raise ValueError(f"global_scale: {global_scale.numel()} numbers for {len(rows)} projections")
        # PyTorch takes time for each option, so calls pass only the options that are not the default.
        self._options = {} if token_format == "16-bit" else {"token_format": token_format}
        is_biased = bias is not None
        length = _native.linear_weight_bytes(
            self.out_features, self.in_features, dtype, is_biased, token_format, values.is_cuda
        )
        # Not in the state dict: the packed layout depends on the device.
        self.register_buffer("weights", torch.empty(length, dtype=torch.uint8, device=values.device), persistent=False)
        self.differentiable = differentiable
        if differentiable:
            factors = global_scale.reshape(-1).repeat_interleave(torch.tensor(rows, device=global_scale.device))
            for name, tensor in (("values", values), ("scales", scales), ("factors", factors.unsqueeze(-1).to(values.device))):
                self.register_buffer(f"_{name}", tensor.detach(), persistent=False)
        bias = None if bias is None else bias.detach().cpu().contiguous()
        projections = list(zip(rows, global_scale.reshape(-1).tolist()))
        _native.pack_linear(self.weights, dtype, values, scales, projections, bias, token_format, input_scale)
        if values.is_cuda:
            head = bytes(self.weights[: _native.LINEAR_HEAD_BYTES].tolist())
            _native.check_packed_linear(head, self.out_features, self.in_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns ``x·Wᵀ + bias`` for ``x`` ``[…, K]``."""
        if _gradients.needed(x):
            source = _gradients.Projection(self._values, self._scales, self._factors, None) if self.differentiable else None
            return _gradients.LinearFunction.apply(x, self._compute, source)
        return self._compute(x)

    def _compute(self, x):
        # The operator knows K only up to the padding of the packed weights.
        if x.shape[-1] != self.in_features:
            raise ValueError(f"x: expected [..., {self.in_features}], got {list(x.shape)}")
        return _operators._linear(x, self.weights, self.out_features, **self._options)

    def extra_repr(self):
        return f"in_features={self.in_features}, out_features={self.out_features}, dtype={self.dtype}"
