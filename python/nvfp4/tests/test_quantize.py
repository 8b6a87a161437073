"""`quantize` and `dequantize`."""

import numpy as np
import pytest
import reference
import torch

import nvfp4
from nvfp4 import _operators

# The GPU's implementation, run on the CPU: the same PyTorch operations.
composed = {"quantize": _operators._quantize_composed, "dequantize": _operators._dequantize_composed}


def inputs():
    yield torch.randn(3, 5, 64)
    yield torch.randn(7, 48).bfloat16() * 1e-3
    yield torch.randn(2, 32).half() * 100
    yield torch.zeros(2, 16)
    yield torch.cat((torch.randn(1, 16), torch.zeros(1, 16), torch.full((1, 16), -0.0), torch.randn(1, 16) * 1e-12))
    # Halfway between two values, of both signs: the scales are 1.
    halves = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    yield torch.cat((halves, -halves)).expand(28, 16) * 448.0
    yield torch.full((1, 16), 3.4e38)
    yield torch.full((1, 16), 1e-40)
    yield torch.empty(0, 16)


def bits(tensor):
    values, scales, global_scale = (part.cpu() for part in tensor)
    return values.numpy(), scales.view(torch.uint8).numpy(), np.float32(global_scale)


def assert_same(got, want):
    for mine, reference_s, part in zip(bits(got), want, ("values", "scales", "global scale")):
        np.testing.assert_array_equal(mine, reference_s, part)


@pytest.mark.parametrize("x", list(inputs()), ids=lambda x: f"{x.dtype}{list(x.shape)}")
def test_quantize_matches_modelopt_to_the_bit(x, device):
    want = reference.quantize(x)
    assert_same(nvfp4.quantize(x.to(device)), want)
    assert_same(composed["quantize"](x), want)


def test_given_global_scale_is_used_and_larger_numbers_saturate(device):
    x, scale = torch.randn(4, 32), torch.tensor(1e-3)
    want = reference.quantize(x, np.float32(1e-3))
    assert_same(nvfp4.quantize(x.to(device), scale.to(device)), want)
    assert_same(composed["quantize"](x, scale), want)
    assert nvfp4.quantize(x, scale).scales.view(torch.uint8).max() == 0x7E


def test_every_code_and_scale_is_dequantized(device):
    values = torch.arange(256, dtype=torch.uint8).reshape(1, 32, 8).expand(127, 32, 8).reshape(127, 256)
    scales = torch.arange(127, dtype=torch.uint8).reshape(127, 1).expand(127, 32).contiguous().view(torch.float8_e4m3fn)
    packed = nvfp4.Quantized(values, scales, torch.tensor(0.375))
    want = reference.numbers(packed)
    for got in (nvfp4.dequantize([part.to(device) for part in packed]), composed["dequantize"](*packed)):
        np.testing.assert_array_equal(got.double().cpu().numpy(), want)


def test_tensors_with_gaps_are_accepted(device):
    x = torch.randn(6, 64, device=device)[::2, 16:48]
    assert_same(nvfp4.quantize(x), bits(nvfp4.quantize(x.contiguous())))


@pytest.mark.parametrize(
    ("x", "scale", "says"),
    [
        (torch.zeros(2, 24), None, "x: expected the last dimension to be a multiple of 16"),
        (torch.zeros(2, 16, dtype=torch.float64), None, "x: expected float32, bfloat16 or float16"),
        (torch.tensor([[float("nan")] * 16]), None, "x: .*not finite|x: .*NaN"),
        (torch.zeros(2, 16), torch.zeros(2), "global_scale: expected one float32"),
        (torch.zeros(2, 16), torch.tensor(-1.0), "x: .*global scale"),
    ],
)
def test_invalid_input_of_quantize_is_named(x, scale, says):
    with pytest.raises(ValueError, match=says):
        nvfp4.quantize(x, scale)


def test_mismatched_packed_tensors_are_named():
    values, scales, scale = nvfp4.quantize(torch.zeros(2, 32))
    for wrong, name in [
        ((values[:, :15], scales, scale), "values"),
        ((values, scales[:1], scale), "scales"),
        ((values, scales.float(), scale), "scales"),
        ((values, scales, scale.double()), "global_scale"),
    ]:
        with pytest.raises(ValueError, match=f"^{name}: "):
            nvfp4.dequantize(wrong)


def test_compiled_operators_and_their_fakes_agree_with_eager(device, compiled):
    x = torch.randn(4, 32, device=device)
    # `test_schema` multiplies tensors, which PyTorch does not support for float8.
    tests = ("test_faketensor", "test_aot_dispatch_dynamic")
    for operator, arguments in [
        (torch.ops.nvfp4.quantize.default, (x,)),
        (torch.ops.nvfp4.quantize.default, (x, torch.tensor(0.1, device=device))),
        (torch.ops.nvfp4.dequantize.default, tuple(nvfp4.quantize(x))),
    ]:
        torch.library.opcheck(operator, arguments, test_utils=tests)
    graph = compiled(lambda x: nvfp4.dequantize(nvfp4.quantize(x)) + 1)
    torch.testing.assert_close(graph(x), nvfp4.dequantize(nvfp4.quantize(x)) + 1, rtol=0, atol=0)
