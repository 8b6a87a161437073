"""The operators registered with PyTorch, and one function per operator."""

from typing import NamedTuple

import torch

from . import _native

BLOCK = 16
"""Number of values that share a scale."""

_library = torch.library.Library("nvfp4", "DEF")


class Quantized(NamedTuple):
    """A tensor ``[…, K]`` in NVFP4, packed along its last dimension.

    Its numbers are ``e2m1(values) · scales · global_scale``.
    """

    values: torch.Tensor
    """``[…, K/2]``, uint8: two numbers per byte, the number with the even index in the low four bits."""
    scales: torch.Tensor
    """``[…, K/16]``, float8_e4m3fn."""
    global_scale: torch.Tensor
    """One float32, or one per expert of a layer."""


def _define(schema, fake, **implementations):
    """Registers an operator: its schema, its fake (allocates the results without computing) and its implementations."""
    name = schema.split("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key, function in implementations.items():
        _library.impl(name, function, key)
    torch.library.register_fake(f"nvfp4::{name}", fake, lib=_library)
    return getattr(torch.ops.nvfp4, name).default


# The MoE layer.

_moe = _define(
    "moe(Tensor(a!) out, Tensor hidden_states, Tensor topk_ids, Tensor topk_weights, Tensor weights, int experts,"
    " int intermediate, *, int? shared_intermediate=None, Tensor? expert_map=None, Tensor? shared_weights=None,"
    " bool weights_on_input=False, Tensor(b!)? workspace=None, str activation='silu', bool biases=False,"
    " str token_format='16-bit', bool input_scales=False) -> ()",
    fake=lambda *arguments, **named: None,
    CPU=_native.moe,
    CUDA=_native.moe,
)


def moe(
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    weights: torch.Tensor,
    experts: int,
    intermediate: int,
    *,
    shared_intermediate: int | None = None,
    expert_map: torch.Tensor | None = None,
    shared_weights: torch.Tensor | None = None,
    weights_on_input: bool = False,
    activation: str = "silu",
    biases: bool = False,
    token_format: str = "16-bit",
    input_scales: bool = False,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes an MoE layer and returns the sum of ``weight · (silu(x·gateᵀ) ∘ (x·upᵀ))·downᵀ`` over each token's experts.

    :class:`Moe` calls it with the arguments that belong to the weights.

    :param hidden_states: ``[T, H]``, bfloat16 or float16, the type that the weights were packed for; rows may have gaps between them.
    :param topk_ids: ``[T, k]``, int32: the experts of each token; a negative id contributes nothing.
    :param topk_weights: ``[T, k]``, float32.
    :param weights: the packed weights, :attr:`Moe.weights`.
    :param experts: E, number of experts in the weights.
    :param intermediate: I, rows of gate and up.
    :param shared_intermediate: I of the shared expert, if there is one.
    :param expert_map: ``[named experts]``, int32: index in the E experts for each id that a token can name, -1 for experts on other
        devices.
    :param shared_weights: ``[T]``, float32: the shared expert's weight for each token; 1 if omitted.
    :param weights_on_input: multiply the tokens by their weights, instead of the experts' results (k = 1 only).
    :param activation: a word of the library's ``Activation``, such as ``silu``, ``silu-limit=7``, ``swiglu-step=7``, ``gelu``, ``gelu-tanh``,
        ``gpt-oss``, ``swigluoai=1.702,7,1``, ``situ=8,4``, ``relu2-gated`` or, without a gate, ``relu2``. An unknown word's error lists all.
    :param biases: whether the weights have biases.
    :param token_format: the format that the weights were packed for. ``16-bit``: tokens are multiplied unchanged. ``fp8``: tokens and
        the intermediate are multiplied as e4m3 with one scale per token, and weights are rounded to e4m3; faster on Hopper for many
        tokens, and less accurate. ``nvfp4``: tokens and the intermediate are multiplied as NVFP4, with weights unchanged; among GPUs,
        only Blackwell supports it.
    :param input_scales: whether the weights have input scales, which ``nvfp4`` then uses to quantize.
    :param out: output tensor, ``[T, H]``; a new tensor if omitted.
    :param workspace: bytes on a GPU, at least :meth:`Moe.workspace_bytes`; newly allocated if omitted.
    :raises ValueError: if an argument has the wrong type, shape, device or stride.
    :raises Error: if the device fails or has no kernel for the layer.
    """
    if out is None:
        out = torch.empty_like(hidden_states, memory_format=torch.contiguous_format)
    _moe(
        out,
        hidden_states,
        topk_ids,
        topk_weights,
        weights,
        experts,
        intermediate,
        shared_intermediate=shared_intermediate,
        expert_map=expert_map,
        shared_weights=shared_weights,
        weights_on_input=weights_on_input,
        workspace=workspace,
        activation=activation,
        biases=biases,
        token_format=token_format,
        input_scales=input_scales,
    )
    return out


def moe_workspace_bytes(
    tokens: int,
    top_k: int,
    hidden: int,
    intermediate: int,
    experts: int,
    shared_intermediate: int | None = None,
    token_format: str = "16-bit",
) -> int:
    """Returns the bytes of workspace that :func:`moe` needs on a GPU with up to ``tokens`` tokens. Layers can share a workspace.

    >>> import nvfp4
    >>> nvfp4.moe_workspace_bytes(1, top_k=2, hidden=4096, intermediate=14336, experts=8)
    82176
    """
    options = {"shared_intermediate": shared_intermediate, "token_format": token_format}
    return _native.moe_workspace_bytes(tokens, top_k, hidden, experts, intermediate, **options)


# The linear layer.


def _linear_native(x, weights, out_features, *, token_format="16-bit"):
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    out = x.new_empty((rows.shape[0], out_features))
    _native.linear(out, rows, weights, out_features, token_format)
    return out if x.dim() == 2 else out.view(*x.shape[:-1], out_features)


_linear = _define(
    "linear(Tensor x, Tensor weights, int out_features, *, str token_format='16-bit') -> Tensor",
    fake=lambda x, weights, out_features, *, token_format="16-bit": x.new_empty((*x.shape[:-1], out_features)),
    CPU=_linear_native,
    CUDA=_linear_native,
)


def linear(x: torch.Tensor, weights: torch.Tensor, out_features: int, *, token_format: str = "16-bit") -> torch.Tensor:
    """Computes a linear layer, ``x·Wᵀ + bias``, in the type of ``x``. :class:`Linear` calls it with its weights.

    :param x: ``[…, K]``, bfloat16 or float16, the type that the weights were packed for; rows may have gaps between them.
    :param weights: the packed weights, :attr:`Linear.weights`; their size tells whether there is a bias.
    :param out_features: N, rows of W.
    :param token_format: ``16-bit``, ``fp8`` or ``nvfp4``, the format that the weights were packed for: see :func:`moe`.
    :raises ValueError: if an argument has the wrong type, shape, device or stride.
    :raises Error: if the device fails or has no kernel for the layer.
    """
    return _linear(x, weights, out_features, token_format=token_format)


# Routers.


def _empty_routes(logits, top_k, **_):
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


def _route_native(
    logits,
    top_k,
    scoring="softmax",
    bias=None,
    groups=1,
    top_groups=1,
    renormalize=True,
    scale=1.0,
    expert_scale=None,
    null_experts=0,
    table=None,
    token_ids=None,
):
    if logits.dim() != 2:
        raise ValueError(f"logits: expected 2 dimensions, [tokens, experts], got {list(logits.shape)}")
    weights, ids = _empty_routes(logits, top_k)
    if logits.device.type == "cpu":
        logits = logits.contiguous()
    if scoring == "sigmoid" and bias is None:
        bias = logits.new_zeros(logits.shape[1], dtype=torch.float32)
    options = {
        "scoring": scoring,
        "groups": groups,
        "top_groups": top_groups,
        "renormalize": renormalize,
        "scale": scale,
        "null_experts": null_experts,
    }
    _native.route(weights, ids, logits, [bias, expert_scale, table, token_ids], options)
    return weights, ids


_route = _define(
    "route(Tensor logits, int top_k, *, str scoring='softmax', Tensor? bias=None, int groups=1, int top_groups=1,"
    " bool renormalize=True, float scale=1.0, Tensor? expert_scale=None, int null_experts=0, Tensor? table=None,"
    " Tensor? token_ids=None) -> (Tensor, Tensor)",
    fake=_empty_routes,
    CPU=_route_native,
    CUDA=_route_native,
)


def route(
    logits: torch.Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    bias: torch.Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    renormalize: bool = True,
    scale: float = 1.0,
    expert_scale: torch.Tensor | None = None,
    null_experts: int = 0,
    table: torch.Tensor | None = None,
    token_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Selects the experts of each token, best first. Returns their weights, ``[T, k]`` float32, and their ids, ``[T, k]`` int32.

    Among equal experts, the lower id comes first. Every device gives the same bits.

    :param logits: ``[T, E]``, float32, bfloat16 or float16; E up to 1024, k up to 32.
    :param scoring: ``softmax`` over all experts (Qwen3, Mixtral), ``topk-softmax`` over the chosen experts (gpt-oss), ``sigmoid``
        (DeepSeek-V3), ``sqrt-softplus`` (DeepSeek-V4) or ``sigmoid-top1`` (Llama 4). The arguments below are for ``softmax``,
        ``sigmoid`` and ``sqrt-softplus``.
    :param bias: ``[E]``, float32: is added to the scores for the selection, but not to the weights.
    :param groups: number of groups of neighboring experts; experts come from the best ``top_groups`` groups. Groups are compared by
        their two best experts with a bias, by the best one without.
    :param renormalize: whether a token's weights add up to ``scale``.
    :param scale: factor of the weights.
    :param expert_scale: ``[E]``, float32: a factor of the weights for each expert (Gemma 4).
    :param null_experts: number of the last experts without weights (LongCat-Flash). If one is selected, its id is -1 and its weight
        stays; a layer ignores it.
    :param table: ``[V, k]``, int32: the experts of each token id, instead of a selection (DeepSeek-V4's first layers).
    :param token_ids: ``[T]``, int32, with ``table``. An id outside of the table gives ids of -1.
    :raises ValueError: if an argument has the wrong type, shape, device or stride, or is out of range.

    >>> import torch, nvfp4
    >>> nvfp4.route(torch.tensor([[0.5, 2.0, -1.0, 2.0]]), 2)
    (tensor([[0.5000, 0.5000]]), tensor([[1, 3]], dtype=torch.int32))
    """
    return _route(
        logits,
        top_k,
        scoring=scoring,
        bias=bias,
        groups=groups,
        top_groups=top_groups,
        renormalize=renormalize,
        scale=scale,
        expert_scale=expert_scale,
        null_experts=null_experts,
        table=table,
        token_ids=token_ids,
    )


# Quantizing and dequantizing. The GPU versions use PyTorch's operations in the same order as the CPU, and give the same bits.


def _check_numbers(x):
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"x: expected float32, bfloat16 or float16, got {x.dtype}")
    if x.dim() == 0 or x.shape[-1] == 0 or x.shape[-1] % BLOCK:
        raise ValueError(f"x: expected the last dimension to be a multiple of {BLOCK}, got the shape {tuple(x.shape)}")


def _check_global_scale(global_scale, like):
    if global_scale.dtype != torch.float32 or global_scale.numel() != 1:
        raise ValueError(f"global_scale: expected one float32, got {global_scale.dtype} of shape {tuple(global_scale.shape)}")
    if global_scale.device != like.device:
        raise ValueError(f"global_scale: expected a tensor on {like.device}, got one on {global_scale.device}")


def _empty_quantized(x, global_scale=None):
    _check_numbers(x)
    if global_scale is not None:
        _check_global_scale(global_scale, x)
    *rows, k = x.shape
    values = x.new_empty((*rows, k // 2), dtype=torch.uint8)
    scales = x.new_empty((*rows, k // BLOCK), dtype=torch.float8_e4m3fn)
    return values, scales, x.new_empty((), dtype=torch.float32)


def _quantize_cpu(x, global_scale=None):
    values, scales, scale = _empty_quantized(x, global_scale)
    if global_scale is not None:
        scale.copy_(global_scale.reshape(()))
    _native.quantize(x.contiguous(), values, scales, scale, global_scale is not None)
    return values, scales, scale


def _quantize_composed(x, global_scale=None):
    _empty_quantized(x, global_scale)
    number = lambda value: torch.full((), value, dtype=torch.float32, device=x.device)
    numbers = x.float()
    # Divisors are tensors: PyTorch replaces the division by a number with a multiplication by its reciprocal, which rounds twice.
    if global_scale is None:
        amax = numbers.abs().amax() if x.numel() else number(0.0)
        scale = (amax / number(6 * 448.0)).clamp(min=torch.finfo(torch.float32).tiny)
        scale = torch.where(amax == 0, number(1.0), scale)
    else:
        scale = global_scale.reshape(()).clone()
    *rows, k = x.shape
    blocks = numbers.reshape(*rows, k // BLOCK, BLOCK)
    wanted = blocks.abs().amax(-1) / (6 * scale)
    rounded = wanted.clamp(2.0**-9, 448.0).to(torch.float8_e4m3fn)
    scales = torch.where(wanted == 0, number(1.0), rounded.float()).to(torch.float8_e4m3fn)
    quotient = blocks / (scales.float() * scale).unsqueeze(-1)
    magnitude = quotient.abs()
    # Ties go to the even code.
    above = [magnitude > 0.25, magnitude >= 0.75, magnitude > 1.25, magnitude >= 1.75]
    above += [magnitude > 2.5, magnitude >= 3.5, magnitude > 5.0]
    codes = sum(bound.to(torch.uint8) for bound in above) + (quotient < 0).to(torch.uint8) * 8
    pairs = codes.reshape(*rows, k // 2, 2)
    return pairs[..., 0] | pairs[..., 1] << 4, scales, scale


_quantize = _define(
    "quantize(Tensor x, Tensor? global_scale=None) -> (Tensor, Tensor, Tensor)",
    fake=_empty_quantized,
    CPU=_quantize_cpu,
    CUDA=_quantize_composed,
)


def quantize(x: torch.Tensor, global_scale: torch.Tensor | None = None) -> Quantized:
    """Quantizes a tensor with the algorithm of NVIDIA's ModelOpt.

    :param x: ``[…, K]``, float32, bfloat16 or float16, K a multiple of 16, every number finite. (A GPU does not check for finite
        numbers, because the host would have to wait for the result.)
    :param global_scale: one float32, for example from calibration; if omitted, ``amax / (6 · 448)``.
    :returns: a :class:`Quantized`.
    :raises ValueError: if the type or the shape is wrong, or, on the CPU, if a number is not finite.

    >>> import torch, nvfp4
    >>> nvfp4.quantize(torch.ones(1, 16)).values
    tensor([[119, 119, 119, 119, 119, 119, 119, 119]], dtype=torch.uint8)
    """
    return Quantized(*_quantize(x, global_scale))


def _check_packed(values, scales, global_scale):
    if values.dtype != torch.uint8 or values.dim() == 0 or values.shape[-1] == 0 or values.shape[-1] % 8:
        raise ValueError(f"values: expected uint8 […, K/2], K a multiple of {BLOCK}, got {values.dtype} {tuple(values.shape)}")
    expected = (*values.shape[:-1], values.shape[-1] // 8)
    if scales.dtype != torch.float8_e4m3fn or tuple(scales.shape) != expected:
        raise ValueError(f"scales: expected float8_e4m3fn {expected}, got {scales.dtype} {tuple(scales.shape)}")
    if scales.device != values.device:
        raise ValueError(f"scales: expected a tensor on {values.device}, got one on {scales.device}")
    _check_global_scale(global_scale, values)


def _empty_numbers(values, scales, global_scale):
    _check_packed(values, scales, global_scale)
    return values.new_empty((*values.shape[:-1], 2 * values.shape[-1]), dtype=torch.float32)


def _dequantize_cpu(values, scales, global_scale):
    numbers = _empty_numbers(values, scales, global_scale)
    _native.dequantize(values.contiguous(), scales.contiguous(), global_scale, numbers)
    return numbers


def _dequantize_composed(values, scales, global_scale):
    _check_packed(values, scales, global_scale)
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    table = torch.tensor(magnitudes + [-magnitude for magnitude in magnitudes], device=values.device)
    codes = torch.stack((values & 0xF, values >> 4), dim=-1).reshape(*scales.shape, BLOCK)
    factors = scales.float() * global_scale.reshape(())
    return (table[codes.int()] * factors.unsqueeze(-1)).reshape(*values.shape[:-1], 2 * values.shape[-1])


_dequantize = _define(
    "dequantize(Tensor values, Tensor scales, Tensor global_scale) -> Tensor",
    fake=_empty_numbers,
    CPU=_dequantize_cpu,
    CUDA=_dequantize_composed,
)


def dequantize(tensor: Quantized, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns the numbers of a :class:`Quantized` (or of a tuple of its parts), ``[…, K]``.

    They are computed in float32 and then rounded to ``dtype``.

    :raises ValueError: if a type, a shape or a device is wrong.
    """
    return _dequantize(*tensor).to(dtype)
