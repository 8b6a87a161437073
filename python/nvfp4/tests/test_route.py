"""`route`, against PyTorch's own operations in f64."""

import pytest
import torch

import nvfp4

E, K = 32, 4


def logits(dtype=torch.float32, count=9):
    # A token's logits all differ, so the selection is unique.
    return torch.stack([torch.randperm(E) for _ in range(count)]).sub(E // 2).div(8).to(dtype)


def reference(logits, scoring, bias=None, groups=1, top_groups=1, renormalize=True, scale=1.0):
    x = logits.detach().cpu().double()
    if scoring == "topk-softmax":
        chosen, ids = x.topk(K)
        return chosen.softmax(-1), ids
    if scoring == "sigmoid-top1":
        chosen, ids = x.topk(1)
        return chosen.sigmoid(), ids
    probabilities = x.softmax(-1) if scoring == "softmax" else x.sigmoid()
    scores = probabilities + (0 if bias is None else bias.cpu().double())
    if groups > 1:
        of_groups = scores.view(len(x), groups, -1).topk(2).values.sum(-1)
        taken = torch.zeros_like(of_groups).scatter(1, of_groups.topk(top_groups).indices, 1.0).bool()
        scores = scores.masked_fill(~taken.repeat_interleave(E // groups, 1), float("-inf"))
    ids = scores.topk(K).indices
    weights = probabilities.gather(1, ids)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * scale, ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "options",
    [
        {"scoring": "softmax"},
        {"scoring": "softmax", "renormalize": False},
        {"scoring": "topk-softmax"},
        {"scoring": "sigmoid"},
        {"scoring": "sigmoid", "bias": True, "groups": 4, "top_groups": 2, "scale": 2.5},
        {"scoring": "sigmoid-top1"},
    ],
    ids=str,
)
def test_experts_and_weights_match_pytorch(dtype, options, device):
    options = dict(options)
    if options.pop("bias", False):
        options["bias"] = torch.randn(E).div(100).to(device)
    x = logits(dtype).to(device)
    weights, ids = nvfp4.route(x, 1 if options["scoring"] == "sigmoid-top1" else K, **options)
    want, expected = reference(x, **options)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32
    assert torch.equal(ids.cpu().long(), expected)
    torch.testing.assert_close(weights.cpu().double(), want, rtol=1e-6, atol=0)


def test_first_of_equal_experts_wins_and_zero_tokens_work(device):
    weights, ids = nvfp4.route(torch.zeros(3, E, device=device), K)
    assert ids.tolist() == [[0, 1, 2, 3]] * 3 and (weights == 0.25).all()
    assert nvfp4.route(torch.zeros(0, E, device=device), K)[1].shape == (0, K)


def test_compiled_operator_and_its_fake_agree_with_eager(device, compiled):
    x = logits().to(device)
    torch.library.opcheck(torch.ops.nvfp4.route.default, (x, K), {"scoring": "softmax"})
    graph = compiled(lambda x: nvfp4.route(x * 2, K)[0] + 1)
    assert torch.equal(graph(x), nvfp4.route(x * 2, K)[0] + 1)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"logits": logits().double()}, "^logits: unsupported type torch.float64"),
        ({"logits": logits()[0]}, "^logits: expected 2 dimensions"),
        ({"top_k": E + 1}, "top_k"),
        ({"scoring": "relu"}, "^scoring: .*softmax"),
        ({"bias": torch.zeros(E)}, "^bias: only sigmoid"),
        ({"scoring": "sigmoid", "bias": torch.zeros(E - 1)}, "^bias: "),
        ({"scoring": "sigmoid", "groups": 5}, "groups"),
    ],
)
def test_wrong_argument_is_named(change, says):
    with pytest.raises((ValueError, TypeError), match=says):
        nvfp4.route(**({"logits": logits(), "top_k": K} | change))
