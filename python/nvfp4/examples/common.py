"""What the examples share: NVFP4 weights for a Transformers module, and the comparison of two outputs."""

import torch
from torch.nn import functional as F

import nvfp4

# Half of a bf16's last bit, relative to the number. Factor for the errors of f32 sums, which are far smaller.
HALF_ULP, MORE = 2.0**-9, 1.01


def randomized(module, seed=0):
    """Gives a module random numbers of ordinary size, in float64."""
    torch.manual_seed(seed)
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.is_floating_point():
            tensor.data = torch.randn(tensor.shape, dtype=torch.float64) / max(tensor.shape[-1], 4) ** 0.5
    return module.double().eval()


def rounded(numbers):
    """Quantizes a matrix, or each matrix of a stack, in place: the tensor then has the numbers of its NVFP4 form, which is returned."""
    matrices = numbers.data if numbers.dim() == 3 else numbers.data.unsqueeze(0)
    tensors = [nvfp4.quantize(matrix.float().contiguous()) for matrix in matrices]
    for matrix, tensor in zip(matrices, tensors):
        matrix.copy_(nvfp4.dequantize(tensor).double())
    return nvfp4.Quantized(*(torch.stack(parts) for parts in zip(*tensors)))


def halves(stack):
    """Returns gate and up of experts that have both in one matrix, one behind the other."""
    values, scales, global_scales = stack
    half = values.shape[1] // 2
    return [nvfp4.Quantized(values[:, part], scales[:, part], global_scales) for part in (slice(half), slice(half, None))]


def tokens(count, hidden, seed=1):
    """Returns random tokens in bf16."""
    torch.manual_seed(seed)
    return torch.randn(count, hidden).bfloat16()


def slack(x, gate_up, down, activate, weights, bias=None):
    """Returns the largest change of the rows of one expert, times their weights, if the intermediate and each row are rounded to bf16.

    :param activate: the intermediate as a function of the product with gate and up.
    """
    inner = activate(F.linear(x.double(), gate_up))
    row = F.linear(inner, down) + (0 if bias is None else bias)
    moved = F.linear(inner.abs() * HALF_ULP, down.abs())
    return weights.abs().unsqueeze(-1) * (moved + HALF_ULP * (row.abs() + moved))


def routed_slack(x, gate_up, down, activate, ids, weights, biases=(None, None)):
    """Returns the sum of `slack` over the experts of each token. `gate_up` and `down` have one matrix per expert."""
    total = torch.zeros(len(x), down.shape[1], dtype=torch.float64)
    for token, (of_token, shares) in enumerate(zip(ids.tolist(), weights.double())):
        for expert, share in zip(of_token, shares):
            first, second = ((None if bias is None else bias[expert]) for bias in biases)
            apply = lambda product: activate(product if first is None else product + first)
            total[token] += slack(x[token : token + 1], gate_up[expert], down[expert], apply, share.reshape(1), second)[0]
    return total


def check_routes(name, ids, weights, want_ids, want_weights):
    """Checks that two routers chose the same experts with the same weights, in any order."""
    order, want_order = ids.argsort(-1), want_ids.argsort(-1)
    if not torch.equal(ids.gather(1, order).long(), want_ids.gather(1, want_order).long()):
        raise SystemExit(f"{name}: other experts were chosen")
    torch.testing.assert_close(weights.gather(1, order).double(), want_weights.gather(1, want_order).double(), rtol=2e-5, atol=1e-6)


def check(name, output, reference, bound):
    """Checks that every element of a bf16 output is within its bound, and prints the largest share of the bound."""
    bound = MORE * (bound + HALF_ULP * (reference.abs() + bound)) + 1e-6
    share = ((output.double() - reference).abs() / bound).max().item()
    size = (output.double() - reference).norm() / reference.norm()
    print(f"{name}: {output.shape[0]} tokens, at most {share:.2f} of the bound, {100 * size:.2f} % of the root mean square")
    if not share <= 1:
        raise SystemExit(f"{name}: the outputs differ by more than rounding")
