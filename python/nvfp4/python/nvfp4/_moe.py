"""The MoE layer as a module."""

import torch

from . import _gradients, _native, _operators
from ._operators import Quantized


class Moe(torch.nn.Module):
    """The experts of an MoE layer. The module packs a checkpoint's tensors into the layout that the kernels read.

    ``gate``, ``up`` (``[E, I, H]``) and ``down`` (``[E, H, I]``) are :class:`Quantized` tensors with one global scale per
    expert. They are packed once, on their device, into one tensor, :attr:`weights`, and not kept. They can be views: if one tensor
    has gate and up behind each other, its halves need not be copied.

    :param gate: ``None`` if the activation has no gate.
    :param activation: see :func:`moe`.
    :param biases: biases of gate ``[E, I]`` (or ``None``), up ``[E, I]`` and down ``[E, H]``, float32 or of type ``dtype``.
    :param dtype: bfloat16 or float16: the token type.
    :param shared: gate, up and down of an expert that every token uses, ``[1, I, H]`` or ``[I, H]``, with its own I.
    :param expert_map: ``[named experts]``, int32: see :func:`moe`.
    :param token_format: ``16-bit``, ``fp8`` or ``nvfp4``: see :func:`moe`.
    :param input_scales: with ``nvfp4``, two tensors of global scales of tokens, ``[E]``, or ``[E + 1]`` with the shared expert's scale
        last. The first is for the input of each expert's gate and up (the larger scale if a checkpoint has two), the second for the
        input of its down. If omitted, each token has its own scale. On a GPU, input scales save a launch if there is a gate.
    :param differentiable: keep the checkpoint's tensors too, from which the gradients with respect to tokens, routing weights and
        ``shared_weights`` are computed.
    :raises ValueError: if a type, a shape, a device or a scale is wrong; the message has its name and place.
    :raises Error: if the device fails or has no kernel for the layer.

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
        gate: Quantized | None,
        up: Quantized,
        down: Quantized,
        *,
        dtype: torch.dtype = torch.bfloat16,
        activation: str = "silu",
        biases: tuple[torch.Tensor | None, torch.Tensor, torch.Tensor] | None = None,
        shared: tuple[Quantized | None, Quantized, Quantized] | None = None,
        expert_map: torch.Tensor | None = None,
        token_format: str = "16-bit",
        input_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
        differentiable: bool = False,
    ) -> None:
        super().__init__()
        self.differentiable = differentiable
        if differentiable:
            self._keep("experts", (gate, up, down), biases or (None,) * 3)
            if shared:
                self._keep("shared", shared, (None,) * 3)
        projections = [_projection(tensor, bias) for tensor, bias in zip((gate, up, down), biases or (None,) * 3)]
        shared = shared and [_projection(tensor, None) for tensor in shared]
        name, values = ("up", up.values) if gate is None else ("gate", gate.values)
        if values.dim() != 3:
            raise ValueError(f"{name}.values: expected 3 dimensions, [experts, rows, columns/2], got {list(values.shape)}")
        self.experts, self.intermediate = values.shape[:2]
        self.hidden = 2 * values.shape[2]
        self.shared_intermediate = shared[1][0].shape[1] if shared else None
        self.dtype = dtype
        self.activation, self.biases, self.token_format = activation, biases is not None, token_format
        self.input_scales = input_scales is not None
        # PyTorch takes time for each option, so calls pass only the options that are not the default.
        self._options = {}
        if shared:
            self._options["shared_intermediate"] = self.shared_intermediate
        if activation != "silu":
            self._options["activation"] = activation
        if biases:
            self._options["biases"] = True
        if token_format != "16-bit":
            self._options["token_format"] = token_format
        if self.input_scales:
            self._options["input_scales"] = True
        sizes = self.hidden, self.experts, self.intermediate
        length = _native.moe_weight_bytes(*sizes, dtype, values.is_cuda, **self._options)
        # Not in the state dict: the packed layout depends on the device.
        self.register_buffer("weights", torch.empty(length, dtype=torch.uint8, device=values.device), persistent=False)
        self.register_buffer("expert_map", expert_map, persistent=False)
        scales = input_scales and [scales.tolist() for scales in input_scales]
        _native.pack_moe(self.weights, dtype, projections, shared, scales, **self._options)
        if values.is_cuda:
            _native.check_packed_moe(bytes(self.weights[: _native.MOE_HEAD_BYTES].tolist()), *sizes, **self._options)

    def workspace_bytes(self, tokens: int, top_k: int) -> int:
        """Returns the bytes of workspace that a call with up to ``tokens`` tokens needs on a GPU. Layers can share a workspace."""
        return _operators.moe_workspace_bytes(
            tokens, top_k, self.hidden, self.intermediate, self.experts, self.shared_intermediate, self.token_format
        )

    def expert_parts(self) -> list[torch.Tensor]:
        """Returns views of ``weights``, each ``[E, bytes]``: row e of all parts together is expert e. A copy of these rows to another place,
        or to a layer of the same sizes, moves the expert there. Load balancers move experts between devices in this way.
        """
        sizes = self.hidden, self.experts, self.intermediate
        parts = _native.moe_expert_parts(*sizes, self.dtype, self.weights.is_cuda, **self._options)
        return [self.weights[start : start + self.experts * length].view(self.experts, length) for start, length in parts]

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
        """Returns the layer's output for ``hidden_states`` ``[T, H]``. The arguments are the same as in :func:`moe`."""
        # The operator knows H only up to the padding of the packed weights.
        if hidden_states.shape[-1] != self.hidden:
            raise ValueError(f"hidden_states: expected [T, {self.hidden}], got {list(hidden_states.shape)}")
        if _gradients.needed(hidden_states, topk_weights, shared_weights):
            return self._with_gradients(hidden_states, topk_ids, topk_weights, shared_weights, weights_on_input, out, workspace)
        options = self._options
        if self.expert_map is not None or shared_weights is not None or weights_on_input or workspace is not None:
            options = self._with(options, shared_weights, weights_on_input, workspace)
        if out is None:
            out = torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
        _operators._moe(
            out, hidden_states, topk_ids, topk_weights, self.weights, self.experts, self.intermediate, **options
        )
        return out

    def _keep(self, name, matrices, biases):
        """Keeps the tensors that the backward pass reads as buffers, which move with the layer."""
        for role, matrix, bias in zip(("gate", "up", "down"), matrices, biases):
            if matrix is None:
                continue
            values, scales, factors = (part.detach() for part in matrix)
            if values.dim() == 2:
                values, scales = values.unsqueeze(0), scales.unsqueeze(0)
            parts = {"values": values, "scales": scales, "factors": factors.reshape(-1, 1, 1).to(values.device), "bias": bias}
            for part, tensor in parts.items():
                self.register_buffer(f"_{name}_{role}_{part}", tensor if tensor is None else tensor.detach(), persistent=False)

    def _kept(self, name):
        if not hasattr(self, f"_{name}_up_values"):
            return None
        parts = lambda role: (getattr(self, f"_{name}_{role}_{part}") for part in _gradients.Projection._fields)
        projections = [_gradients.Projection(*parts(role)) if hasattr(self, f"_{name}_{role}_values") else None for role in ("gate", "up", "down")]
        return _gradients.Experts(*projections, self.activation)

    def _with_gradients(self, hidden_states, topk_ids, topk_weights, shared_weights, weights_on_input, out, workspace):
        if out is not None:
            raise ValueError("out: a call that records a gradient returns a new tensor; omit it")

        def compute(x, weights, of_shared):
            return self(x, topk_ids, weights, shared_weights=of_shared, weights_on_input=weights_on_input, workspace=workspace)

        ids = topk_ids if self.expert_map is None else torch.where(topk_ids < 0, topk_ids, self.expert_map[topk_ids.clamp(min=0).long()])
        return _gradients.MoeFunction.apply(
            hidden_states, topk_weights, shared_weights, compute, self._kept("experts"), self._kept("shared"), ids, weights_on_input
        )

    def _with(self, options, shared_weights, weights_on_input, workspace):
        """Returns ``options`` with the options of one call."""
        options = dict(options)
        if self.expert_map is not None:
            options["expert_map"] = self.expert_map
        if shared_weights is not None:
            options["shared_weights"] = shared_weights
        if weights_on_input:
            options["weights_on_input"] = True
        if workspace is not None:
            options["workspace"] = workspace
        return options

    def extra_repr(self):
        shared = f", shared_intermediate={self.shared_intermediate}" if self.shared_intermediate else ""
        return (
            f"experts={self.experts}, hidden={self.hidden}, intermediate={self.intermediate}{shared}, dtype={self.dtype}"
        )


def _projection(tensor, bias):
    """Returns a projection in the form that packing takes: tensors with an expert dimension, global scales as a list, biases on the CPU."""
    if tensor is None:
        return None
    values, scales, global_scale = tensor
    if global_scale.dtype != torch.float32:
        raise ValueError(f"global_scale: expected float32, got {global_scale.dtype}")
    if values.dim() == 2:
        values, scales = values.unsqueeze(0), scales.unsqueeze(0)
    bias = None if bias is None else bias.detach().cpu().contiguous()
    return values, scales, global_scale.reshape(-1).tolist(), bias
