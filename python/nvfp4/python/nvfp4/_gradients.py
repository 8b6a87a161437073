"""Gradients with respect to tokens and routing weights. Weights are constants: this is for training adapters (LoRA) around them.

The forward pass is the operator. The backward pass computes the layer again from the checkpoint's tensors, with PyTorch's own operations in
the token type, one expert at a time, so that memory holds the plain weights of one expert.
"""

from typing import NamedTuple

import torch

from ._operators import Quantized, dequantize

F = torch.nn.functional


def needed(*tensors: torch.Tensor | None) -> bool:
    """Whether a call with these tensors records a gradient."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _refuse(layer):
    """Raises the error of a layer that did not keep what the backward pass reads."""
    raise ValueError(f"{layer} has no gradient: create the layer with differentiable=True, which keeps the checkpoint's tensors too")


class Projection(NamedTuple):
    """A matrix ``[N, K]``, or one per expert, as a checkpoint has it."""

    values: torch.Tensor
    scales: torch.Tensor
    factors: torch.Tensor
    """Global scales, of a shape that broadcasts to the matrix: ``[N, 1]`` or ``[E, 1, 1]``."""
    bias: torch.Tensor | None

    def numbers(self, dtype, expert=None):
        """Returns the matrix, or one expert's matrix, in a token type."""
        values, scales, factors, _ = self if expert is None else Projection(*self[:3], None).of(expert)
        one = torch.ones((), dtype=torch.float32, device=values.device)
        return (dequantize(Quantized(values, scales, one)) * factors).to(dtype)

    def of(self, expert):
        """Returns one expert's part."""
        return Projection(*(None if part is None else part[expert] for part in self))


# Linear layers.


class LinearFunction(torch.autograd.Function):
    """``compute(x)``, whose gradient is ``g·W``; without a projection, the backward pass is an error."""

    @staticmethod
    def forward(ctx, x, compute, projection):
        ctx.projection, ctx.dtype = projection, x.dtype
        return compute(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        if ctx.projection is None:
            _refuse("nvfp4.Linear")
        return gradient @ ctx.projection.numbers(ctx.dtype), None, None


# Layers of experts.


def activate(word, gate, up):
    """Computes an activation of :func:`nvfp4.moe` by its word, in f32."""
    name, _, numbers = word.partition("=")
    numbers = [float(number) for number in numbers.split(",")] if numbers else []
    if name == "silu":
        return F.silu(gate) * up
    if name in ("gelu", "gelu-tanh"):
        return F.gelu(gate, approximate="tanh" if name == "gelu-tanh" else "none") * up
    if name == "relu2":
        return torch.relu(up).square()
    if name == "relu2-gated":
        return torch.relu(gate).square() * up
    if name == "situ":
        beta, *linear = numbers
        up = up if not linear else linear[0] * torch.tanh(up / linear[0])
        return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * up
    if name == "swiglu-step":
        (limit,) = numbers
        return F.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)
    if name == "silu-limit":
        (limit,) = numbers
        return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    if name in ("gpt-oss", "swigluoai"):
        slope, limit, offset = (*(numbers or (1.702, 7.0)), 1.0)[:3]
        gate = gate.clamp(max=limit)
        return gate * torch.sigmoid(slope * gate) * (up.clamp(-limit, limit) + offset)
    raise ValueError(f"activation: {word} has no gradient here")


class Experts(NamedTuple):
    """What the backward pass reads of a layer of experts: gate (or ``None``), up and down."""

    gate: Projection | None
    up: Projection
    down: Projection
    activation: str

    def compute(self, rows, expert):
        """Computes one expert for rows of tokens."""
        project = lambda x, projection: F.linear(x, projection.numbers(x.dtype, expert), _bias(projection, expert, x.dtype))
        gate = None if self.gate is None else project(rows, self.gate).float()
        hidden = activate(self.activation, gate, project(rows, self.up).float())
        return project(hidden.to(rows.dtype), self.down)


def _bias(projection, expert, dtype):
    return None if projection.bias is None else projection.bias[expert].to(dtype)


class MoeFunction(torch.autograd.Function):
    """``compute(x, topk_weights, shared_weights)``, with gradients of all three; without experts, the backward pass is an error."""

    @staticmethod
    def forward(ctx, x, weights, shared_weights, compute, experts, shared, ids, on_input):
        ctx.save_for_backward(x, weights, shared_weights, ids)
        ctx.experts, ctx.shared, ctx.on_input = experts, shared, on_input
        return compute(x, weights, shared_weights)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        if ctx.experts is None:
            _refuse("nvfp4.Moe")
        x, weights, shared_weights, ids = ctx.saved_tensors
        of_x = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        of_weights = torch.zeros_like(weights)
        for expert in range(len(ctx.experts.up.values)):
            token, slot = (ids == expert).nonzero(as_tuple=True)
            if len(token) == 0:
                continue
            compute = lambda rows: ctx.experts.compute(rows, expert)  # noqa: B023 (called in this turn)
            of_rows, of_weight = _weighted(compute, x[token], weights[token, slot], gradient[token], ctx.on_input)
            of_x.index_add_(0, token, of_rows.float())
            of_weights[token, slot] = of_weight
        of_shared = None
        if ctx.shared is not None:
            factors = torch.ones(len(x), dtype=torch.float32, device=x.device) if shared_weights is None else shared_weights
            of_rows, of_shared = _weighted(lambda rows: ctx.shared.compute(rows, 0), x, factors, gradient, False)
            of_x += of_rows.float()
        return of_x.to(x.dtype), of_weights, None if shared_weights is None else of_shared, *[None] * 5


def _weighted(compute, rows, weights, gradient, on_input):
    """Returns the gradients of ``compute(rows) · weights``, or of ``compute(rows · weights)``, for rows and weights."""
    with torch.enable_grad():
        rows, weights = rows.detach().requires_grad_(), weights.detach().requires_grad_()
        if on_input:
            out = compute((rows.float() * weights[:, None]).to(rows.dtype))
        else:
            out = (compute(rows).float() * weights[:, None]).to(rows.dtype)
        return torch.autograd.grad(out, (rows, weights), gradient)
