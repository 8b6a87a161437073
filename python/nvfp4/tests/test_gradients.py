"""Gradients with respect to tokens and routing weights, against differences and against PyTorch's own in f64."""

import pytest
import torch

import nvfp4

E, H, I, T, TOP_K = 3, 32, 48, 5, 2
ACTIVATIONS = ["silu", "silu-limit=1.5", "gelu", "gelu-tanh", "gpt-oss", "gpt-oss=1.5,2.0", "swigluoai=1.5,2.0,0.5", "situ=0.5", "situ=0.5,0.75",
               "relu2", "relu2-gated"]  # fmt: skip


def matrix(device, *shape):
    """Returns a quantized matrix, or one per expert, and its numbers in f64. They are bf16 numbers, because the scale is a power of two."""
    scale = torch.tensor(2.0**-10, device=device)
    numbers = [torch.randn(shape[-2:], device=device) / shape[-1] ** 0.5 * (index + 1) for index in range(shape[0] if len(shape) == 3 else 1)]
    matrices = [nvfp4.quantize(each, scale) for each in numbers]
    numbers = torch.stack([nvfp4.dequantize(each).double() for each in matrices])
    stacked = nvfp4.Quantized(*(torch.stack(parts) for parts in zip(*matrices)))
    return (stacked, numbers) if len(shape) == 3 else (matrices[0], numbers[0])


def activate(word, gate, up):
    """The activations by their definitions, in f64."""
    name, _, numbers = word.partition("=")
    numbers = [float(number) for number in numbers.split(",")] if numbers else [1.702, 7.0]
    if name == "relu2":
        return up.clamp(min=0) ** 2
    if name == "relu2-gated":
        return gate.clamp(min=0) ** 2 * up
    if name == "situ":
        up = numbers[1] * torch.tanh(up / numbers[1]) if len(numbers) > 1 else up
        return numbers[0] * torch.tanh(gate / numbers[0]) / (1 + torch.exp(-gate)) * up
    if name == "gelu":
        return gate / 2 * (1 + torch.erf(gate / 2**0.5)) * up
    if name == "gelu-tanh":
        return gate / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up
    if name in ("gpt-oss", "swigluoai"):
        slope, limit, offset = (*numbers, 1.0)[:3]
        gate = gate.clamp(max=limit)
        return gate / (1 + torch.exp(-slope * gate)) * (up.clamp(-limit, limit) + offset)
    if name == "silu-limit":
        gate, up = gate.clamp(max=numbers[0]), up.clamp(-numbers[0], numbers[0])
    return gate / (1 + torch.exp(-gate)) * up


def close(got, want):
    """Whether a gradient in the token type is near the exact one."""
    return (got.double() - want).norm() <= 0.02 * want.norm()


def tokens_away_from(limit, projections, device):
    """Returns tokens whose projections are not near a limit: there the derivative jumps, and rounding can cross it."""
    for _ in range(1000):
        x = torch.randn(T, H, device=device).bfloat16()
        found = torch.cat([torch.einsum("th,eih->tei", x.double(), numbers) + bias.double()[None] for numbers, bias in projections])
        if limit is None or ((found.abs() - limit).abs() > 2.0**-8 * limit).all():
            return x.requires_grad_()
    raise AssertionError("no such tokens")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [False, True])
def test_gradient_of_a_linear_layer_is_its_transpose(device, dtype, biased):
    parts = [nvfp4.quantize(torch.randn(rows, H, device=device) * size) for rows, size in ((16, 1.0), (32, 8.0))]
    fused = nvfp4.Quantized(*(torch.cat([part[index] for part in parts]) for index in (0, 1)), torch.stack([part.global_scale for part in parts]))
    numbers = torch.cat([nvfp4.dequantize(part) for part in parts]).double()
    bias = torch.randn(48, device=device) if biased else None
    layer = nvfp4.Linear(fused, bias, dtype=dtype, rows=[16, 32], differentiable=True)
    x = torch.randn(2, T, H, device=device).to(dtype).requires_grad_()
    gradient = torch.randn(2, T, 48, device=device).to(dtype)
    layer(x).backward(gradient)
    assert x.grad.dtype == dtype and close(x.grad, gradient.double() @ numbers)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("biased", [False, True])
def test_gradients_of_experts(device, activation, biased):
    (gate, gates), (up, ups), (down, downs) = (matrix(device, E, *shape) for shape in ((I, H), (I, H), (H, I)))
    has_gate = activation != "relu2"
    biases = tuple(torch.randn(E, rows, device=device).bfloat16() for rows in (I, I, H))
    used = (biases[0] if has_gate else None, *biases[1:]) if biased else None
    layer = nvfp4.Moe(gate if has_gate else None, up, down, activation=activation, biases=used, differentiable=True)
    added = [bias.double() if biased else torch.zeros_like(bias, dtype=torch.float64) for bias in biases]
    limit = {"silu-limit=1.5": 1.5, "gpt-oss": 7.0, "gpt-oss=1.5,2.0": 2.0, "swigluoai=1.5,2.0,0.5": 2.0}.get(activation)
    x = tokens_away_from(limit, [(gates, added[0]), (ups, added[1])], device)
    weights = torch.rand(T, TOP_K, device=device, requires_grad=True)
    ids = torch.stack([torch.randperm(E)[:TOP_K] for _ in range(T)]).int().to(device)
    ids[0, 0] = -1  # contributes nothing
    gradient = torch.randn(T, H, device=device).bfloat16()
    layer(x, ids, weights).backward(gradient)

    exact_x, exact_weights = x.detach().double().requires_grad_(), weights.detach().double().requires_grad_()
    total = 0
    for token in range(T):
        for slot in range(TOP_K):
            expert = ids[token, slot]
            if expert >= 0:
                row = exact_x[token]
                hidden = activate(activation, gates[expert] @ row + added[0][expert], ups[expert] @ row + added[1][expert])
                out = downs[expert] @ hidden + added[2][expert]
                total = total + (exact_weights[token, slot] * out * gradient[token].double()).sum()
    total.backward()
    assert close(x.grad, exact_x.grad)
    assert close(weights.grad, exact_weights.grad)
    assert weights.grad[0, 0] == 0


def test_gradients_of_shared_experts_and_weights_on_the_input(device):
    (gate, gates), (up, ups), (down, downs) = (matrix(device, 1, *shape) for shape in ((I, H), (I, H), (H, I)))
    with_shared = nvfp4.Moe(gate, up, down, shared=(gate, up, down), differentiable=True)
    alone = nvfp4.Moe(gate, up, down, differentiable=True)
    x = torch.randn(T, H, device=device).bfloat16().requires_grad_()
    weights, of_shared = (torch.rand(*shape, device=device, requires_grad=True) for shape in ((T, 1), (T,)))
    ids = torch.zeros(T, 1, dtype=torch.int32, device=device)
    gradient = torch.randn(T, H, device=device).bfloat16()

    def expert(rows):
        return activate("silu", rows @ gates[0].T, rows @ ups[0].T) @ downs[0].T

    with_shared(x, ids, weights, shared_weights=of_shared).backward(gradient)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weights, of_shared)]
    (expert(exact[0]) * exact[1] + expert(exact[0]) * exact[2][:, None]).backward(gradient.double())
    assert all(close(got.grad, want.grad) for got, want in zip((x, weights, of_shared), exact))

    x.grad = weights.grad = None
    alone(x, ids, weights, weights_on_input=True).backward(gradient)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weights)]
    expert(exact[0] * exact[1]).backward(gradient.double())
    assert all(close(got.grad, want.grad) for got, want in zip((x, weights), exact))


def test_experts_of_other_devices_get_no_gradient(device):
    (gate, _), (up, _), (down, _) = (matrix(device, 2, *shape) for shape in ((I, H), (I, H), (H, I)))
    places = torch.tensor([-1, 1, 0], dtype=torch.int32, device=device)
    mapped = nvfp4.Moe(gate, up, down, expert_map=places, differentiable=True)
    plain = nvfp4.Moe(gate, up, down, differentiable=True)
    gradients = []
    for layer, ids in ((mapped, [[0, 2], [1, 0], [1, 2]]), (plain, [[-1, 0], [1, -1], [1, 0]])):
        torch.manual_seed(1)
        x = torch.randn(3, H, device=device).bfloat16().requires_grad_()
        layer(x, torch.tensor(ids, dtype=torch.int32, device=device), torch.ones(3, 2, device=device)).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


class Rounded(torch.autograd.Function):
    """f64 → f16, exactly invertible for the numbers that `gradcheck` gives; its gradient is the identity."""

    @staticmethod
    def forward(ctx, x):
        return x.to(torch.float16)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.double()


def test_gradcheck_of_small_layers():
    # Differences of f16 outputs: with steps of 1/8, rounding adds at most 2⁻¹¹ / 2⁻³ per unit of the output.
    torch.manual_seed(0)
    linear = nvfp4.Linear(matrix("cpu", 32, H)[0], dtype=torch.float16, differentiable=True)
    (gate, _), (up, _), (down, _) = (matrix("cpu", E, *shape) for shape in ((I, H), (I, H), (H, I)))
    moe = nvfp4.Moe(gate, up, down, dtype=torch.float16, differentiable=True)
    x = (torch.randint(-8, 9, (2, H)).double() / 8).requires_grad_()
    ids, weights = torch.tensor([[0, 2], [1, 0]], dtype=torch.int32), torch.tensor([[0.5, 0.25], [0.75, 0.125]])
    options = {"eps": 1 / 8, "atol": 0.05, "rtol": 0.05}
    assert torch.autograd.gradcheck(lambda x: linear(Rounded.apply(x)).double(), (x,), **options)
    assert torch.autograd.gradcheck(lambda x: moe(Rounded.apply(x), ids, weights).double(), (x,), **options)


def test_layers_without_the_checkpoint_have_no_gradient(device):
    linear = nvfp4.Linear(matrix(device, 32, H)[0])
    (gate, _), (up, _), (down, _) = (matrix(device, E, *shape) for shape in ((I, H), (I, H), (H, I)))
    moe = nvfp4.Moe(gate, up, down)
    x = torch.randn(1, H, device=device).bfloat16().requires_grad_()
    ids, weights = torch.zeros(1, 1, dtype=torch.int32, device=device), torch.ones(1, 1, device=device)
    for layer, call in (("nvfp4.Linear", lambda: linear(x)), ("nvfp4.Moe", lambda: moe(x, ids, weights))):
        out = call()  # a model in evaluation may run outside of `no_grad`
        with pytest.raises(ValueError, match=f"{layer} has no gradient: create the layer with differentiable=True"):
            out.sum().backward()
        with torch.no_grad():
            assert torch.equal(out, call())
