"""`route`, against PyTorch's own operations in f64."""

import pytest
import torch

import nvfp4

E, K = 32, 4


def logits(dtype=torch.float32, count=9):
    # A token's logits all differ, so the selection is unique.
    return torch.stack([torch.randperm(E) for _ in range(count)]).sub(E // 2).div(8).to(dtype)


def reference(logits, scoring, bias=None, groups=1, top_groups=1, renormalize=True, scale=1.0, expert_scale=None):
    x = logits.detach().cpu().double()
    if scoring == "topk-softmax":
        chosen, ids = x.topk(K)
        return chosen.softmax(-1), ids
    if scoring == "sigmoid-top1":
        chosen, ids = x.topk(1)
        return chosen.sigmoid(), ids
    of = {"softmax": lambda x: x.softmax(-1), "sigmoid": torch.sigmoid, "sqrt-softplus": lambda x: torch.nn.functional.softplus(x).sqrt()}
    probabilities = of[scoring](x)
    scores = probabilities + (0 if bias is None else bias.cpu().double())
    if groups > 1:
        of_groups = scores.view(len(x), groups, -1).topk(1 if bias is None else 2).values.sum(-1)
        taken = torch.zeros_like(of_groups).scatter(1, of_groups.topk(top_groups).indices, 1.0).bool()
        scores = scores.masked_fill(~taken.repeat_interleave(E // groups, 1), float("-inf"))
    ids = scores.topk(K).indices
    weights = probabilities.gather(1, ids)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * scale * (1 if expert_scale is None else expert_scale.cpu().double()[ids]), ids


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
        {"scoring": "sqrt-softplus", "bias": True, "scale": 2.5},
        {"scoring": "sqrt-softplus", "renormalize": False},
        {"scoring": "softmax", "bias": True, "scale": 6.0, "renormalize": False},
        {"scoring": "softmax", "groups": 8, "top_groups": 3, "renormalize": False},
        {"scoring": "softmax", "expert_scale": True},
    ],
    ids=str,
)
def test_experts_and_weights_match_pytorch(dtype, options, device):
    options = dict(options)
    if options.pop("bias", False):
        options["bias"] = torch.randn(E).div(100).to(device)
    if options.pop("expert_scale", False):
        options["expert_scale"] = torch.rand(E).add(0.5).to(device)
    x = logits(dtype).to(device)
    weights, ids = nvfp4.route(x, 1 if options["scoring"] == "sigmoid-top1" else K, **options)
    want, expected = reference(x, **options)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32
    assert torch.equal(ids.cpu().long(), expected)
    torch.testing.assert_close(weights.cpu().double(), want, rtol=1e-6, atol=0)


def test_token_ids_choose_experts_of_a_table(device):
    table = torch.stack([torch.randperm(E)[:K] for _ in range(20)]).int().to(device)
    token_ids = torch.tensor([3, 19, 0, 20, -1, 7, 7, 1, 2], dtype=torch.int32, device=device)
    x = logits().to(device)
    weights, ids = nvfp4.route(x, K, scoring="sqrt-softplus", scale=1.5, table=table, token_ids=token_ids)
    inside = (token_ids >= 0) & (token_ids < 20)
    assert torch.equal(ids[inside], table[token_ids[inside].long()]) and (ids[~inside] == -1).all()
    scores = torch.nn.functional.softplus(x.double()).sqrt().gather(1, ids.clamp(min=0).long())
    want = 1.5 * scores / scores.sum(-1, keepdim=True)
    torch.testing.assert_close(weights[inside].double(), want[inside], rtol=1e-6, atol=0)
    assert (weights[~inside] == 0).all()


def test_null_experts_have_no_id(device):
    x = logits().to(device)
    weights, ids = nvfp4.route(x, K, null_experts=10)
    all_weights, all_ids = nvfp4.route(x, K)
    assert torch.equal(ids, torch.where(all_ids < E - 10, all_ids, -1)) and torch.equal(weights, all_weights)


def test_up_to_1024_experts_are_routed(device):
    x = torch.randn(7, 896, device=device)
    weights, ids = nvfp4.route(x, 16, scoring="sigmoid", scale=2.5)
    want, expected = x.double().sigmoid().topk(16)
    assert torch.equal(ids.long(), expected)
    torch.testing.assert_close(weights.double(), 2.5 * want / want.sum(-1, keepdim=True), rtol=1e-6, atol=0)


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
        ({"scoring": "topk-softmax", "bias": torch.zeros(E)}, "^scoring: topk-softmax has no other"),
        ({"token_ids": torch.zeros(9, dtype=torch.int32)}, "^token_ids: pass both a table"),
        ({"table": torch.full((5, K), E, dtype=torch.int32), "token_ids": torch.zeros(9, dtype=torch.int32)}, "table gives expert"),
        ({"null_experts": E}, "null_experts"),
        ({"scoring": "sigmoid", "bias": torch.zeros(E - 1)}, "^bias: "),
        ({"scoring": "sigmoid", "groups": 5}, "groups"),
    ],
)
def test_wrong_argument_is_named(change, says):
    with pytest.raises((ValueError, TypeError), match=says):
        nvfp4.route(**({"logits": logits(), "top_k": K} | change))
