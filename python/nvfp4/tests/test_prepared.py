"""CPU layers are prepared once, and a tensor with other bytes is never computed with an old layer."""

import copy
import io
import weakref

import pytest
import torch

import nvfp4

E, I, H, K, N = 6, 48, 80, 3, 96


def experts(rows, columns):
    tensors = [nvfp4.quantize(torch.randn(rows, columns) / columns**0.5) for _ in range(E)]
    return nvfp4.Quantized(*(torch.stack(parts) for parts in zip(*tensors)))


def moe(token_format="16-bit"):
    layer = nvfp4.Moe(experts(I, H), experts(I, H), experts(H, I), token_format=token_format)
    weights, ids = torch.randn(5, E).softmax(-1).topk(K)
    return layer, (torch.randn(5, H).bfloat16(), ids.int(), weights)


def linear(token_format="16-bit"):
    layer = nvfp4.Linear(nvfp4.quantize(torch.randn(N, H)), token_format=token_format)
    return layer, (torch.randn(5, H).bfloat16(),)


def prepared(layer):
    return getattr(layer.weights, "_nvfp4_prepared", None)


both = pytest.mark.parametrize("make", [moe, linear])
formats = pytest.mark.parametrize("token_format", ["16-bit", "fp8", "nvfp4"])


@both
@formats
def test_later_calls_use_the_layer_of_the_first_call(make, token_format):
    layer, call = make(token_format)
    first = layer(*call)
    kept = prepared(layer)
    assert kept is not None
    assert torch.equal(layer(*call), first) and prepared(layer) is kept


@both
@formats
def test_written_weights_are_prepared_again(make, token_format):
    (layer, call), (other, _) = make(token_format), make(token_format)
    before, want = layer(*call), other(*call)
    assert not torch.equal(before, want)
    layer.weights.copy_(other.weights)
    assert torch.equal(layer(*call), want)


@both
def test_replaced_data_is_prepared_again(make):
    (layer, call), (other, _) = make(), make()
    layer(*call)
    layer.weights.data = other.weights.clone()
    assert torch.equal(layer(*call), other(*call))


@both
def test_weights_of_inference_mode_work(make):
    with torch.inference_mode():
        layer, call = make()
        want = layer(*call)
    assert torch.equal(layer(*call), want)


@both
def test_copies_and_pickles_prepare_their_own_layer(make):
    layer, call = make()
    want = layer(*call)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in [copy.deepcopy(layer), torch.load(file, weights_only=False), copy.deepcopy(layer).to("cpu")]:
        assert prepared(other) is None
        assert torch.equal(other(*call), want)
    assert not any("prepared" in name for name in layer.state_dict())


@both
def test_compiled_calls_use_the_kept_layer(make):
    layer, call = make()
    want = layer(*call)
    kept = prepared(layer)
    graph = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(graph(*call), want) and prepared(layer) is kept


@both
@formats
def test_layer_goes_with_its_weights(make, token_format):
    layer, call = make(token_format)
    layer(*call)
    kept = weakref.ref(prepared(layer))
    del layer
    assert kept() is None
