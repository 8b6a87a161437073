"""References in numpy, written from the definition of NVFP4 without the package's code."""

import math

import numpy as np
import torch

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def e4m3(codes):
    """Returns the numbers of e4m3 codes, by OCP's "8-bit Floating Point Specification", without NaN."""
    codes = codes.astype(np.int64)
    sign, exponent, fraction = codes >> 7, codes >> 3 & 15, codes & 7
    magnitude = np.where(exponent == 0, fraction * 2.0**-9, (8 + fraction) * 2.0 ** (exponent - 10.0))
    return np.where(sign == 1, -magnitude, magnitude)


def numbers(tensor):
    """Returns the numbers of packed values and scales in f64, with each matrix's global scale. They are exact."""
    values, scales, global_scale = (part.detach().cpu() for part in tensor)
    values, scales = values.numpy(), e4m3(scales.view(torch.uint8).numpy())
    codes = np.stack((values & 15, values >> 4), axis=-1).reshape(*scales.shape, 16)
    matrix = (E2M1[codes] * scales[..., None]).reshape(*values.shape[:-1], -1)
    globals_of = global_scale.double().numpy()
    return matrix * globals_of.reshape(*globals_of.shape, *[1] * (matrix.ndim - globals_of.ndim))


def quantize(x, global_scale=None):
    """ModelOpt's algorithm in f32, one number at a time."""
    x = x.float().numpy()
    f32 = np.float32
    if global_scale is None:
        amax = np.abs(x).max(initial=0)
        global_scale = f32(1) if amax == 0 else max(amax / f32(6 * 448), np.finfo(f32).tiny)
    blocks = x.reshape(-1, 16)
    scales_of = e4m3(np.arange(127))
    values, scales = np.zeros(blocks.shape, np.uint8), np.zeros(len(blocks), np.uint8)
    for index, block in enumerate(blocks):
        wanted = np.abs(block).max() / (f32(6) * global_scale)
        code = 0x38 if wanted == 0 else max(nearest(scales_of, wanted), 1)
        scales[index] = code
        unit = f32(scales_of[code]) * global_scale
        for lane, number in enumerate(block):
            quotient = number / unit
            values[index, lane] = nearest(E2M1[:8], abs(quotient)) | (8 if quotient < 0 else 0)
    packed = values[:, 0::2] | values[:, 1::2] << 4
    *rows, k = x.shape
    return packed.reshape(*rows, k // 2), scales.reshape(*rows, k // 16), global_scale


def nearest(grid, number):
    """Returns the index of the nearest number in an ascending grid; ties go to the even index."""
    distance = np.abs(grid - np.float64(number))
    best = np.flatnonzero(distance == distance.min())
    return int(best[0] if len(best) == 1 or best[0] % 2 == 0 else best[1])


def round_to(dtype, array):
    """Rounds an array of f64 to a PyTorch type and back."""
    return torch.from_numpy(array).to(dtype).double().numpy()


def silu(gate, up):
    return gate / (1 + np.exp(-gate)) * up


def gelu_tanh(gate, up):
    return gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up


def gpt_oss(gate, up, alpha=1.702, limit=7.0):
    x = np.minimum(gate, limit)
    return x / (1 + np.exp(-alpha * x)) * (np.clip(up, -limit, limit) + 1)


def silu_limit(gate, up, limit=1.5):
    return silu(np.minimum(gate, limit), np.clip(up, -limit, limit))


def relu2(_, up):
    return np.maximum(up, 0) ** 2


def gated_relu2(gate, up):
    return np.maximum(gate, 0) ** 2 * up


def gelu(gate, up):
    return gate / 2 * (1 + np.vectorize(math.erf)(gate / np.sqrt(2))) * up


def swigluoai(gate, up, alpha, limit, offset):
    x = np.minimum(gate, limit)
    return x / (1 + np.exp(-alpha * x)) * (np.clip(up, -limit, limit) + offset)


def swiglu_step(gate, up, limit=7.0):
    return np.minimum(silu(gate, 1.0), limit) * np.clip(up, -limit, limit)


def situ(gate, up, beta, linear=None):
    up = up if linear is None else linear * np.tanh(up / linear)
    return beta * np.tanh(gate / beta) / (1 + np.exp(-gate)) * up


def moe(
    hidden_states, ids, weights, gate, up, down,
    *, activation=silu, biases=None, shared=None, shared_weights=None, weights_on_input=False,
):  # fmt: skip
    """Returns the layer's output in f64, with the intermediate rounded like the layer's, and the error bound of a correct layer.

    A correct layer rounds each row of the intermediate and of the down projection, and the output, to the token type, after sums
    in f32. Each rounding error is at most half a unit of the last place, which is at most `unit` relative. An intermediate near the
    middle of two numbers may round to the other number. The errors of sums in f32 are below another tenth of `unit`.
    """
    unit = 2.0**-8 if hidden_states.dtype == torch.bfloat16 else 2.0**-11
    x = hidden_states.detach().cpu().double().numpy()
    ids, weights = ids.cpu().numpy(), weights.cpu().double().numpy()
    up, down = numbers(up), numbers(down)
    gate = np.zeros_like(up) if gate is None else numbers(gate)
    biases = [None if bias is None else bias.double().numpy() for bias in biases or (None,) * 3]
    out, bound = np.zeros_like(x), np.zeros_like(x)

    def add(token, row, matrices, weight, added=(0, 0, 0)):
        gate, up, down = matrices
        left, right = gate @ row + added[0], up @ row + added[1]
        intermediate = round_to(hidden_states.dtype, activation(left, right))
        magnitudes = np.abs(down) @ np.abs(intermediate)
        # Rounding errors of the two f32 sums, carried through the product.
        inner = 2.0**-20 * (np.abs(gate) @ np.abs(row) * (np.abs(right) + 1) + np.abs(up) @ np.abs(row) * (np.abs(left) + np.abs(right)))
        out[token] += weight * (down @ intermediate + added[2])
        bound[token] += abs(weight) * (2 * unit * magnitudes + np.abs(down) @ inner)

    for token in range(len(x)):
        for expert, weight in zip(ids[token], weights[token]):
            if 0 <= expert < len(gate):
                row = round_to(hidden_states.dtype, x[token] * weight) if weights_on_input else x[token]
                added = [0 if bias is None else bias[expert] for bias in biases]
                add(token, row, (gate[expert], up[expert], down[expert]), 1 if weights_on_input else weight, added)
        if shared is not None:
            add(token, x[token], [numbers(m)[0] for m in shared], 1 if shared_weights is None else float(shared_weights[token]))
    return out, bound + unit * np.abs(out) + 1e-30
