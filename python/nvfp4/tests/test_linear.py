"""`linear` and `Linear`."""

import numpy as np
import pytest
import reference
import torch

import nvfp4

ROWS, K = (48, 16, 32), 80
N = sum(ROWS)


def projections():
    """Returns stacked matrices with different global scales, and their numbers."""
    parts = [nvfp4.quantize(torch.randn(rows, K) * size / K**0.5) for rows, size in zip(ROWS, (1.0, 3.0, 0.2))]
    scales = torch.cat([part.scales.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
    weight = nvfp4.Quantized(torch.cat([part.values for part in parts]), scales, torch.stack([part.global_scale for part in parts]))
    return weight, np.concatenate([reference.numbers(part) for part in parts])


def to(tensor, device):
    return nvfp4.Quantized(*(part.to(device) for part in tensor))


def check(got, x, matrix, bias=None):
    """Compares with the product in f64. The bound has the rounding to the token type and f32 sums."""
    x, got = x.detach().cpu(), got.detach().cpu()
    unit = 2.0**-8 if x.dtype == torch.bfloat16 else 2.0**-11
    want = x.double().numpy() @ matrix.T + (0 if bias is None else bias.double().numpy())
    bound = unit * np.abs(want) + 2.0**-20 * (np.abs(x.double().numpy()) @ np.abs(matrix.T)) + 1e-30
    error = np.abs(got.double().numpy() - want)
    assert got.dtype == x.dtype and (error <= bound).all(), (error / bound).max(initial=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [0, 1, 7, 130])
@pytest.mark.parametrize("bias", [None, torch.float32, "tokens'"])
def test_stacked_projections_keep_their_global_scales(dtype, count, bias, device):
    weight, matrix = projections()
    bias = bias and torch.randn(N).to(dtype if bias == "tokens'" else bias)
    layer = nvfp4.Linear(to(weight, device), bias, dtype=dtype, rows=ROWS)
    x = torch.randn(count, K).to(dtype).to(device)
    check(layer(x), x, matrix, bias)


def test_fp8_tokens_cost_only_accuracy():
    weight, _ = projections()
    layer, fp8 = (nvfp4.Linear(weight, rows=ROWS, token_format=token_format) for token_format in ("16-bit", "fp8"))
    x = torch.randn(9, K).bfloat16()
    want, got = layer(x).double(), fp8(x).double()
    assert 0.01 < (torch.linalg.vector_norm(got - want) / torch.linalg.vector_norm(want)).item() < 0.1
    assert torch.equal(fp8(x[4:5]).double(), got[4:5])
    assert torch.equal(nvfp4.linear(x, fp8.weights, N, token_format="fp8").double(), got)
    with pytest.raises(ValueError, match="^token_format: "):
        nvfp4.Linear(weight, rows=ROWS, token_format="fp4")


def test_nvfp4_tokens_use_the_input_scale_or_their_own():
    weight, _ = projections()
    x = torch.randn(9, K).bfloat16()
    want = nvfp4.Linear(weight, rows=ROWS)(x).double()
    outputs = []
    for input_scale in (None, x.abs().max().item() / 2688):
        layer = nvfp4.Linear(weight, rows=ROWS, token_format="nvfp4", input_scale=input_scale)
        got = layer(x).double()
        assert 0.03 < (torch.linalg.vector_norm(got - want) / torch.linalg.vector_norm(want)).item() < 0.3
        assert torch.equal(layer(x[4:5]).double(), got[4:5])
        outputs.append(got)
    assert not torch.equal(*outputs)
    with pytest.raises(ValueError, match="^input_scale: .* must be from"):
        nvfp4.Linear(weight, rows=ROWS, token_format="nvfp4", input_scale=-1.0)


def test_one_projection_takes_tokens_with_any_leading_dimensions(device):
    weight = nvfp4.quantize(torch.randn(32, K))
    layer = nvfp4.Linear(to(weight, device))
    x = torch.randn(2, 3, K, device=device).bfloat16()
    got = layer(x)
    assert got.shape == (2, 3, 32)
    check(got.reshape(6, 32), x.reshape(6, K), reference.numbers(weight))


def test_row_gaps_and_batch_do_not_change_a_token(device):
    weight, _ = projections()
    layer = nvfp4.Linear(to(weight, device), rows=ROWS)
    wide = torch.full((70, K + 16), float("nan"), device=device).bfloat16()
    wide[:, :K] = torch.randn(70, K, device=device)
    want = layer(wide[:, :K])
    for part in (slice(0, 1), slice(5, 30)):
        assert torch.equal(layer(wide[part, :K].contiguous()), want[part])


def test_compiled_operator_and_its_fake_agree_with_eager(device, compiled):
    weight, _ = projections()
    layer = nvfp4.Linear(to(weight, device), rows=ROWS)
    x = torch.randn(5, K, device=device).bfloat16()
    torch.library.opcheck(torch.ops.nvfp4.linear.default, (x, layer.weights, N))
    graph = compiled(lambda x: layer(x * 2).relu() + 1)
    for count in (5, 8, 13):
        x = torch.randn(count, K, device=device).bfloat16()
        assert torch.equal(graph(x), layer(x * 2).relu() + 1)


def wrong_calls():
    """Yields the name of an argument and a change that makes a valid call's argument wrong."""
    yield "x", lambda call: call | {"x": call["x"].float()}
    yield "x", lambda call: call | {"x": call["x"].t().contiguous().t()}
    yield "x", lambda call: call | {"out_features": 24}
    yield "weights", lambda call: call | {"x": call["x"].repeat(1, 3)}
    yield "weights", lambda call: call | {"out_features": N + 64}
    yield "weights", lambda call: call | {"weights": call["weights"][:-1]}
    yield "weights", lambda call: call | {"weights": call["weights"].view(torch.int8)}


@pytest.mark.parametrize(("name", "change"), list(wrong_calls()))
def test_wrong_argument_is_named_in_a_value_error(name, change, device):
    weight, _ = projections()
    layer = nvfp4.Linear(to(weight, device), rows=ROWS)
    call = {"x": torch.randn(5, K, device=device).bfloat16(), "weights": layer.weights, "out_features": N}
    with pytest.raises(ValueError, match=f"^{name}: "):
        nvfp4.linear(**change(call))
    assert nvfp4.linear(**call).shape == (5, N)


def test_tokens_of_another_width_are_refused(device):
    weight, _ = projections()
    layer = nvfp4.Linear(to(weight, device), rows=ROWS)
    for width in (48, K + 16, 3 * K):
        with pytest.raises(ValueError, match=f"^x: .*{K}.*{width}"):
            layer(torch.randn(5, width, device=device).bfloat16())


def test_mismatched_tensors_are_named(device):
    weight, _ = projections()
    weight = to(weight, device)
    for wrong, rows, says in [
        (weight._replace(scales=weight.scales[:, :4]), ROWS, "scales: "),
        (weight._replace(values=weight.values.int()), ROWS, "values: "),
        (weight._replace(global_scale=weight.global_scale[:2]), ROWS, "global_scale: 2 numbers for 3"),
        (weight, (40, 24, 32), "global_scale: a projection of 40 rows"),
        (weight, (48, 16, 16), "global_scale: the projections' rows do not add up"),
        (weight._replace(global_scale=weight.global_scale.double()), ROWS, "global_scale: expected float32"),
        (weight._replace(global_scale=weight.global_scale * float("nan")), ROWS, ".*global scale"),
    ]:
        with pytest.raises(ValueError, match=f"^{says}"):
            nvfp4.Linear(wrong, rows=rows)
    with pytest.raises(ValueError, match="^bias"):
        nvfp4.Linear(weight, torch.zeros(N - 1), rows=ROWS)
    weight.scales.view(torch.uint8)[3, 2] = 0x80
    with pytest.raises(ValueError, match="row 3, block 2"):
        nvfp4.Linear(weight, rows=ROWS)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_captured_graph_is_correct_for_later_tokens():
    weight, _ = projections()
    layer = nvfp4.Linear(to(weight, "cuda"), rows=ROWS)
    x = torch.randn(33, K, device="cuda").bfloat16()
    layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x)
    for _ in range(3):
        x.copy_(torch.randn(33, K))
        graph.replay()
        assert torch.equal(out, layer(x))
