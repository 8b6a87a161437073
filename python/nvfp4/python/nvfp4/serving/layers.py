"""Packing of loaded layers, and calls of packed ones."""

import functools
from typing import NamedTuple

import torch

import nvfp4

from .choices import Refused

# Layers of experts.


def split_rows(w13, bias, has_gate, in_turn=False):
    """Returns gate (or `None`), up and their biases (or `None`) of a matrix that engines load as one.

    :param w13: values ``[E, 2I, H/2]``, scales ``[E, 2I, H/16]`` and global scales ``[E, 2]`` of gate and up. Without a gate, they have I
        rows and one global scale per expert.
    :param bias: ``[E, 2I]`` (or ``[E, I]``), or `None`.
    :param in_turn: whether rows of gate and up alternate (gpt-oss).
    """
    *parts, global_scales = w13
    if not has_gate:
        return None, nvfp4.Quantized(*parts, global_scales.reshape(-1)), (None, bias)
    rows = parts[0].shape[1]
    halves = (slice(0, rows, 2), slice(1, rows, 2)) if in_turn else (slice(0, rows // 2), slice(rows // 2, rows))

    def half(tensor, index):
        if tensor is None:
            return None
        # The packing reads views if an expert's rows are contiguous.
        part = tensor[:, halves[index]]
        return part.contiguous() if in_turn else part

    gate, up = (nvfp4.Quantized(*(half(part, index) for part in parts), global_scales[:, index]) for index in (0, 1))
    return gate, up, (half(bias, 0), half(bias, 1))


class PackedExperts(NamedTuple):
    """The experts of a layer, packed."""

    plain: torch.Tensor
    """The weights for 16-bit tokens; empty if no call uses them."""
    other: torch.Tensor
    """The weights for another token format; empty if no call uses them."""
    options: dict
    """The options of :func:`nvfp4.moe`."""
    parts: list
    """Views of both weights ``[E, bytes]``, by which a load balancer moves experts (:meth:`nvfp4.Moe.expert_parts`)."""


def pack_experts(name, gate, up, down, tokens, *, dtype, activation, biases, input_scales):
    """Packs a layer. Gate and up keep separate global scales.

    :param name: the layer's name, for messages.
    :param biases: biases of gate (or `None`), up and down; `None` if there are none.
    :param tokens: a :class:`Tokens`.
    :param input_scales: the checkpoint's global scales of tokens, ``[E, 2]`` (or ``[E, 1]``) and ``[E]``; NaN where it has none.
    :returns: a :class:`PackedExperts`.
    """
    pack = functools.partial(nvfp4.Moe, gate, up, down, dtype=dtype, activation=activation, biases=biases)
    plain = other = torch.empty(0, dtype=torch.uint8, device=down.values.device)
    options = {"activation": activation, "biases": biases is not None, "token_format": tokens.name}
    parts = []
    if "16-bit" in tokens.formats:
        layer = pack()
        plain = layer.weights
        parts += layer.expert_parts()
    if tokens.name != "16-bit":
        scales = _scales_of_tokens(name, input_scales) if tokens.name == "nvfp4" else None
        options["input_scales"] = scales is not None
        layer = pack(token_format=tokens.name, input_scales=scales)
        other = layer.weights
        parts += layer.expert_parts()
    return PackedExperts(plain, other, options, parts)


def _scales_of_tokens(name, input_scales):
    """Returns the checkpoint's input scales for `nvfp4`; `None` if it has none, and then each token has its own."""
    w13, w2 = (scales.float() for scales in input_scales)
    unknown = torch.cat([w13.isnan().flatten(), w2.isnan().flatten()])
    if unknown.all():
        return None
    if unknown.any():
        raise Refused(f"{name}: the checkpoint has input scales for some experts only; use another token format")
    return w13.reshape(len(w2), -1).amax(dim=1), w2


class Experts:
    """Calls of a packed layer.

    :param tokens: the layer's :class:`Tokens`.
    :param options: the options that :func:`pack_experts` returned.
    """

    def __init__(self, tokens, options):
        self.tokens, self.options = tokens, options
        # NVFP4's input scales and the format belong to one of the layouts.
        self.plain_options = {key: value for key, value in options.items() if key not in ("token_format", "input_scales")}

    def compute(self, hidden_states, topk_ids, topk_weights, plain, other, experts, intermediate, **more):
        """Computes the layer; the other arguments are the same as of `nvfp4.moe`.

        :param plain: the weights for 16-bit tokens.
        :param other: the weights for the other format.
        """
        is_plain = self.tokens.name == "16-bit" or hidden_states.shape[0] < self.tokens.from_tokens
        return nvfp4.moe(
            hidden_states,
            topk_ids.to(torch.int32),
            topk_weights.to(torch.float32),
            plain if is_plain else other,
            experts,
            intermediate,
            **(self.plain_options if is_plain else self.options),
            **more,
        )


# Linear layers.

# A call whose format depends on the number of tokens. `torch.compile` must not see the branch: it compiles for any number.
_library = torch.library.Library("nvfp4_serving", "DEF")
_library.define(
    "linear_split(Tensor x, Tensor weights, Tensor weights_of_many, int out_features, int from_tokens, str token_format) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _linear_split(x, weights, weights_of_many, out_features, from_tokens, token_format):
    if x.numel() // x.shape[-1] < from_tokens:
        return torch.ops.nvfp4.linear(x, weights, out_features)
    return torch.ops.nvfp4.linear(x, weights_of_many, out_features, token_format=token_format)


for _device in ("CPU", "CUDA"):
    _library.impl("linear_split", _linear_split, _device)
torch.library.register_fake(
    "nvfp4_serving::linear_split",
    lambda x, weights, weights_of_many, out_features, from_tokens, token_format: x.new_empty((*x.shape[:-1], out_features)),
    lib=_library,
)


def pack_linear(matrix, bias, tokens, *, dtype, rows, input_scales):
    """Packs a loaded layer. Each projection of a fused layer keeps its own global scale.

    :param matrix: a :class:`nvfp4.Quantized` with one global scale per projection.
    :param rows: rows of each projection.
    :param input_scales: the checkpoint's global scales of tokens, one per projection; `None`, or with NaN, if it has none.
    :returns: the weights by the names `weight` and, if the format depends on the number of tokens, `weight_of_many`.
    """
    scale = None
    if tokens.name == "nvfp4" and input_scales is not None and not input_scales.isnan().any():
        scale = input_scales.float().max().item()

    def packed(**options):
        return nvfp4.Linear(matrix, bias, dtype=dtype, rows=rows, **options).weights

    other = functools.partial(packed, token_format=tokens.name, input_scale=scale)
    return {"weight": packed(), "weight_of_many": other()} if tokens.is_split else {"weight": other()}


def linear(layer, x, rows, tokens):
    """Computes a packed layer, whose weights are attributes of `layer` by :func:`pack_linear`'s names."""
    if x.dim() > 1 and x.stride(-2) % 8:
        x = x.contiguous()  # the rows' addresses are not multiples of 16 bytes
    if tokens.is_split:
        return torch.ops.nvfp4_serving.linear_split(x, layer.weight, layer.weight_of_many, rows, tokens.from_tokens, tokens.name)
    if tokens.name == "16-bit":
        return torch.ops.nvfp4.linear(x, layer.weight, rows)
    return torch.ops.nvfp4.linear(x, layer.weight, rows, token_format=tokens.name)
