"""A whole MoE layer of a checkpoint as a module."""

import os

import torch
from torch.nn import functional as F

from . import _native
from ._gradients import activate
from ._moe import Moe
from ._operators import Quantized, route


class MoeBlock(torch.nn.Module):
    """An MoE layer of a checkpoint: router, experts, shared expert, and what the model has around its experts.

    The experts and the branch beside them are :class:`Moe`. PyTorch computes the router's logits, norms and projections on the tokens'
    device: latent experts of Nemotron 3 and Kimi-K3, norms and the dense branch of Gemma 4, identity experts of LongCat-Flash, and a
    shared expert or dense branch that is not NVFP4 (floats, FP8). ``nvfp4 run --op moe`` computes the same layer. The numbers of norms and of
    the router are float32; a projection has the token type if this type holds its numbers.

    :param path: a folder with ``config.json`` and safetensors files.
    :param layer: number of the layer.
    :param dtype: bfloat16 or float16: the token type.
    :param device: the CPU or a CUDA device.
    :param token_format: ``16-bit``, ``fp8`` or ``nvfp4``: see :func:`moe`. With ``nvfp4``, the checkpoint's input scales are used.
    :raises ValueError: if a tensor is missing or wrong; the message has its name.
    :raises Error: if the layer has a part that is not computed, or the device has no kernel for it. Only the command's CPU backend
        changes tokens inside of experts.

    ``used`` has the names of the checkpoint's tensors that belong to the layer. The tokens are those behind the norm before the block;
    Gemma 4's tokens are the residual stream, because its branches have norms of their own. The output is the sum of all branches.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        layer: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        token_format: str = "16-bit",
    ) -> None:
        super().__init__()
        parts = _native.read_moe(os.fspath(path), layer, dtype)
        self.hidden, self.top_k, self.dtype, self.used = parts["hidden"], parts["top_k"], dtype, parts["used"]
        router, around = parts["router"], parts["around"]
        self.factor, self.shared_factor, self.weights_on_input = router["factor"], router["shared_factor"], router["weights_on_input"]
        self._put("matrix", _numbers(router["matrix"]).reshape(-1, self.hidden), device)
        for name in ("logit_bias", "shared_gate", "token_factors"):
            self._put(name, _numbers(router[name]), device)
        self._put("table", _numbers(router["table"], torch.int32), device)
        self._lists = [name for name in ("bias", "expert_scale") if router["options"].get(name) is not None]
        for name in self._lists:
            self._put(f"router_{name}", _numbers(router["options"][name]), device)
        self._options = {name: value for name, value in router["options"].items() if name not in ("bias", "expert_scale")}
        self.router_norm = _norm(router["norm"], device)
        self.experts = _experts(parts["experts"], dtype, device, token_format)
        self.is_surrounded = around is not None
        self.identity_experts = around["identity_experts"] if around else 0
        self.before, self.behind = (_steps(around and around[name], dtype, device) for name in ("before", "behind"))
        self.branch_norms = torch.nn.ModuleList(_norm(norm, device) for norm in (around["branch_norms"] if around else (None, None)))
        self.branch = None
        if around and around["branch"] is not None:
            self.branch = _experts(around["branch"], dtype, device, token_format)
        elif around and around["torch_branch"] is not None:
            self.branch = _FeedForward(around["torch_branch"], dtype, device)

    def _put(self, name, tensor, device):
        self.register_buffer(name, None if tensor is None else tensor.to(device), persistent=False)

    def route(self, hidden_states: torch.Tensor, token_ids: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the weights and the ids of each token's experts, ``[T, k]``, for tokens ``[T, H]``."""
        logits = F.linear(self.router_norm(hidden_states.float()), self.matrix, self.logit_bias)
        lists = {name: getattr(self, f"router_{name}") for name in self._lists}
        if self.table is not None:
            if token_ids is None:
                raise ValueError("token_ids: the layer's router chooses experts by token ids; pass them")
            lists |= {"table": self.table.reshape(-1, self.top_k), "token_ids": token_ids}
        weights, ids = route(logits, self.top_k, **self._options, **lists)
        return weights * self.factor, ids

    def forward(self, hidden_states: torch.Tensor, token_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the layer's output for tokens ``[T, H]``. A router with a table also needs the tokens' ids ``[T]``, int32."""
        if hidden_states.dim() != 2 or hidden_states.shape[1] != self.hidden:
            raise ValueError(f"hidden_states: expected [T, {self.hidden}], got {list(hidden_states.shape)}")
        weights, ids = self.route(hidden_states, token_ids)
        gate = None
        if self.shared_gate is not None:
            gate = torch.sigmoid(hidden_states.float() @ self.shared_gate)
        if self.shared_factor != 1:
            gate = self.shared_factor * (torch.ones(len(hidden_states), device=hidden_states.device) if gate is None else gate)
        tokens = self.before(hidden_states).to(self.dtype) if self.is_surrounded else hidden_states
        if self.token_factors is not None:
            tokens = (tokens.float() * self.token_factors).to(self.dtype)
        if not self.is_surrounded:
            return self.experts(tokens, ids, weights, shared_weights=gate, weights_on_input=self.weights_on_input)
        output = self.behind(self.experts(tokens, ids, weights, weights_on_input=self.weights_on_input))
        if self.identity_experts:  # the id of a chosen one is -1
            output = output + (weights * (ids < 0)).sum(1, keepdim=True) * hidden_states.float()
        if self.branch is not None:
            first, last = self.branch_norms
            output = output + last(self._branch(first(hidden_states.float()), gate).float())
        return output.to(self.dtype)

    def _branch(self, x, gate):
        """Returns the output of the branch beside the experts, times its gate."""
        if isinstance(self.branch, _FeedForward):
            output = self.branch(x)
            return output if gate is None else output * gate[:, None]
        one = torch.zeros(len(x), 1, dtype=torch.int32, device=x.device)
        gate = torch.ones(len(x), device=x.device) if gate is None else gate
        return self.branch(x.to(self.dtype), one, gate[:, None])


class _Norm(torch.nn.Module):
    """A norm of float32 rows by their root mean square; nothing without weights."""

    def __init__(self, weights, epsilon):
        super().__init__()
        self.epsilon = epsilon
        self.register_buffer("weights", weights, persistent=False)

    def forward(self, x):
        if self.weights is None:
            return x
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon) * self.weights


class _Steps(torch.nn.Module):
    """A norm and then a projection, each if there is one. Takes tokens and returns float32 numbers."""

    def __init__(self, norm, weights, bias):
        super().__init__()
        self.norm = norm
        self.register_buffer("weights", weights, persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, tokens):
        x = self.norm(tokens.float())
        if self.weights is None:
            return x
        product = F.linear(x.to(self.weights.dtype), self.weights).float()
        return product if self.bias is None else product + self.bias


class _FeedForward(torch.nn.Module):
    """A shared expert or dense branch that is not NVFP4. Takes rows and returns float32 numbers."""

    def __init__(self, parts, dtype, device):
        super().__init__()
        self.activation = parts["activation"]
        self.gate, self.up, self.down = (part and _steps((None, part), dtype, device) for part in parts["projections"])

    def forward(self, x):
        gate = None if self.gate is None else self.gate(x)
        return self.down(activate(self.activation, gate, self.up(x)))


def _numbers(data, dtype=torch.float32):
    """Returns a tensor of the numbers in ``bytes``; ``None`` for ``None``."""
    return None if data is None else torch.frombuffer(bytearray(data), dtype=dtype)


def _norm(parts, device):
    weights, epsilon = parts or (None, 0.0)
    return _Norm(None if weights is None else _numbers(weights, torch.float64).float().to(device), epsilon)


def _steps(parts, dtype, device):
    norm, projection = parts or (None, None)
    columns, weights, bias = projection or (0, None, None)
    if weights is not None:
        weights = _numbers(weights).reshape(-1, columns).to(device)
        rounded = weights.to(dtype)
        weights = rounded if torch.equal(rounded.float(), weights) else weights
        bias = None if bias is None else _numbers(bias).to(device)
    return _Steps(_norm(norm, device), weights, bias)


def _experts(parts, dtype, device, token_format):
    """Returns the layer of experts."""
    if token_format == "nvfp4" and parts["input_scale_fault"]:
        raise ValueError(f"token_format: NVFP4 tokens are not possible: {parts['input_scale_fault']}")
    projections = [_quantized(part, device) for part in parts["projections"]]
    shared, biases, scales = None, None, None
    if parts["shared"]:
        if any(part and any(_numbers(part[4]).tolist()) for part in parts["shared"]):
            raise _native.Error("nvfp4.Moe has no biases of a shared expert; use `nvfp4 run --op moe`")
        shared = tuple(_quantized(part, device) for part in parts["shared"])
    if parts["biases"]:
        biases = tuple(part and _numbers(part[4]).reshape(part[0][:2]) for part in parts["projections"])
    if token_format == "nvfp4" and parts["input_scales"]:
        scales = tuple(torch.tensor(numbers, dtype=torch.float32) for numbers in zip(*parts["input_scales"]))
    return Moe(
        *projections, dtype=dtype, activation=parts["activation"], biases=biases, shared=shared, token_format=token_format, input_scales=scales
    )


def _quantized(part, device):
    if part is None:
        return None
    (experts, rows, columns), values, scales, global_scales, _ = part
    values = _numbers(values, torch.uint8).reshape(experts, rows, columns // 2).to(device)
    scales = _numbers(scales, torch.uint8).reshape(experts, rows, columns // 16).to(device).view(torch.float8_e4m3fn)
    return Quantized(values, scales, torch.tensor(global_scales))
