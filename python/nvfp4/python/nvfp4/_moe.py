"""The MoE layer as a module."""

import torch

from . import _native, _operators
from ._operators import Quantized

class Moe(torch.nn.Module):
    """The experts of an MoE layer, from a checkpoint's tensors to what the kernels read.

    ``gate``, ``up`` (``[E, I, H]``) and ``down`` (``[E, H, I]``) are :class:`Quantized` tensors with a global scale for each
    expert. They are packed once, on the device where they lie, into one tensor, :attr:`weights`, and not kept. Views do: the halves
    of a tensor that has gate and up behind each other need not be copied.

    :param dtype: bfloat16 or float16: the type of tokens.
    :param shared: gate, up and down of an expert that every token has, ``[1, I, H]`` or ``[I, H]``, with an I of its own.
    :param expert_map: ``[named experts]``, int32: see :func:`moe`.
    :raises ValueError: if a type, a shape, a device or a scale is wrong, with its name and place.
    :raises Error: if the device fails, or computes no such layers.

    >>> import torch, nvfp4
    >>> E, I, H, T, k = 4, 32, 64, 3, 2
    >>> def experts(*shape):
    ...     tensors = [nvfp4.quantize(torch.randn(*shape)) for _ in range(E)]
    ...     return nvfp4.Quantized(*(torch.stack(parts) for parts in zip(*tensors)))
    >>> layer = nvfp4.Moe(experts(I, H), experts(I, H), experts(H, I))
    >>> weights, ids = torch.randn(T, E).softmax(-1).topk(k)
    >>> layer(torch.randn(T, H).bfloat16(), ids.int(), weights).shape
    torch.Size([3, 64])
    """

    def __init__(
        self,
        gate: Quantized,
        up: Quantized,
        down: Quantized,
        *,
        dtype: torch.dtype = torch.bfloat16,
        shared: tuple[Quantized, Quantized, Quantized] | None = None,
        expert_map: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        projections = [_projection(*tensor) for tensor in (gate, up, down)]
        shared = shared and [_projection(*tensor) for tensor in shared]
        values = projections[0][0]
        if values.dim() != 3:
            raise ValueError(f"gate.values: expected 3 dimensions, [experts, rows, columns/2], got {list(values.shape)}")
        self.experts, self.intermediate = values.shape[:2]
        self.hidden = 2 * values.shape[2]
        self.shared_intermediate = shared[0][0].shape[1] if shared else None
        self.dtype = dtype
        length = _native.moe_weight_bytes(
            self.hidden, self.intermediate, self.experts, self.shared_intermediate, dtype, values.is_cuda
        )
        # Not in the state: how they lie is the device's affair, and the checkpoint's tensors are the state.
        self.register_buffer("weights", torch.empty(length, dtype=torch.uint8, device=values.device), persistent=False)
        self.register_buffer("expert_map", expert_map, persistent=False)
        _native.pack_moe(self.weights, dtype, projections, shared)
        if values.is_cuda:
            _native.check_packed_moe(
                bytes(self.weights[: _native.MOE_HEAD_BYTES].tolist()),
                self.hidden,
                self.intermediate,
                self.experts,
                self.shared_intermediate,
                dtype,
            )

    def workspace_bytes(self, tokens: int, top_k: int) -> int:
        """Bytes of workspace that a call with up to so many tokens needs on a GPU; layers can share one."""
        return _operators.moe_workspace_bytes(
            tokens, top_k, self.hidden, self.intermediate, self.experts, self.shared_intermediate
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        shared_weights: torch.Tensor | None = None,
        weights_on_input: bool = False,
        out: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The layer's output for ``hidden_states`` ``[T, H]``; the arguments are those of :func:`moe`."""
        # Only what is not as usual is handed over: each option that PyTorch has to look at takes time.
        options = {}
        if self.shared_intermediate is not None:
            options["shared_intermediate"] = self.shared_intermediate
        if self.expert_map is not None:
            options["expert_map"] = self.expert_map
        if shared_weights is not None:
            options["shared_weights"] = shared_weights
        if weights_on_input:
            options["weights_on_input"] = True
        if workspace is not None:
            options["workspace"] = workspace
        if out is None:
            out = torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
        _operators._moe(
            out, hidden_states, topk_ids, topk_weights, self.weights, self.experts, self.intermediate, **options
        )
        return out

    def extra_repr(self):
        shared = f", shared_intermediate={self.shared_intermediate}" if self.shared_intermediate else ""
        return (
            f"experts={self.experts}, hidden={self.hidden}, intermediate={self.intermediate}{shared}, dtype={self.dtype}"
        )


def _projection(values, scales, global_scale):
    """A projection as the packing takes it: of every expert, the global scales as numbers."""
    if global_scale.dtype != torch.float32:
        raise ValueError(f"global_scale: expected float32, got {global_scale.dtype}")
    if values.dim() == 2:
        values, scales = values.unsqueeze(0), scales.unsqueeze(0)
    return values, scales, global_scale.reshape(-1).tolist()
