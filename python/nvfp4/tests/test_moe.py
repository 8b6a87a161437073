"""`moe` and `Moe`."""

import functools

import numpy as np
import pytest
import reference
import torch

import nvfp4

E, I, H, K = 6, 48, 80, 3


def stack(tensors):
    return nvfp4.Quantized(*(torch.stack(parts) for parts in zip(*tensors)))


def experts(rows, columns, count=E):
    """Returns matrices with numbers of different magnitudes, so that all global scales differ."""
    return stack([nvfp4.quantize(torch.randn(rows, columns) * (1 + i) / columns**0.5) for i in range(count)])


def projections(intermediate=I, count=E):
    return experts(intermediate, H, count), experts(intermediate, H, count), experts(H, intermediate, count)


def to(tensor, device):
    return nvfp4.Quantized(*(part.to(device) for part in tensor))


def tokens(count, device, dtype=torch.bfloat16, top_k=K, named=E):
    hidden = torch.randn(count, H).to(dtype)
    ids = torch.stack([torch.randperm(named)[:top_k] for _ in range(count)]).int() if count else torch.empty(0, top_k).int()
    weights = torch.rand(count, top_k)
    return hidden.to(device), ids.to(device), weights.to(device)


def check(got, call, matrices, **options):
    want, bound = reference.moe(*call, *matrices, **options)
    error = np.abs(got.double().cpu().numpy() - want)
    assert (error <= bound).all(), f"{(error / bound).max(initial=0)} of the bound"
    # The bound is tight enough to refuse another layer.
    assert len(want) == 0 or (bound < 0.2 * np.abs(want).max()).mean() > 0.9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [0, 1, 7, 33])
def test_layer_matches_the_reference(dtype, count, device):
    matrices = projections()
    layer = nvfp4.Moe(*(to(matrix, device) for matrix in matrices), dtype=dtype)
    call = tokens(count, device, dtype)
    check(layer(*call), call, matrices)


def test_fp8_tokens_cost_only_accuracy(device):
    matrices = [to(matrix, device) for matrix in projections()]
    layer, fp8 = (nvfp4.Moe(*matrices, token_format=token_format) for token_format in ("16-bit", "fp8"))
    call = tokens(33, device)
    want, got = layer(*call).double(), fp8(*call).double()
    error = (torch.linalg.vector_norm(got - want) / torch.linalg.vector_norm(want)).item()
    # Tokens, weights and the intermediate are rounded to four significant bits.
    assert 0.01 < error < 0.1
    alone = [part[7:8].contiguous() for part in call]
    assert torch.equal(fp8(*alone).double(), got[7:8])
    options = {"token_format": "fp8"}
    assert torch.equal(nvfp4.moe(*call, fp8.weights, E, I, **options).double(), got)
    with pytest.raises(ValueError, match="^token_format: unknown token format `fp4`; expected one of: 16-bit, fp8"):
        nvfp4.Moe(*matrices, token_format="fp4")


def test_nvfp4_tokens_use_expert_input_scales_or_their_own():
    matrices, shared = projections(), projections(32, 1)
    call = tokens(33, "cpu")
    of = lambda **options: nvfp4.Moe(*matrices, shared=shared, **options)(*call).double()
    want, own = of(), of(token_format="nvfp4")
    scales = torch.full((E + 1,), call[0].abs().max().item() / 2688), torch.full((E + 1,), 400 / 2688)
    given = of(token_format="nvfp4", input_scales=scales)
    for got in (own, given):
        error = (torch.linalg.vector_norm(got - want) / torch.linalg.vector_norm(want)).item()
        # Tokens and the intermediate are rounded to two significant bits.
        assert 0.03 < error < 0.3
    assert not torch.equal(own, given)
    # Each expert has its own scale: tokens without this expert keep their bits.
    for scales_of in scales:
        scales_of[2] *= 3
        other = of(token_format="nvfp4", input_scales=scales)
        changed = (other != given).any(dim=1)
        assert torch.equal(changed, (call[1] == 2).any(dim=1))
        scales_of[2] /= 3
    layer = nvfp4.Moe(*matrices, token_format="nvfp4", input_scales=[of_one[:E] for of_one in scales])
    options = {"token_format": "nvfp4", "input_scales": True}
    assert torch.equal(nvfp4.moe(*call, layer.weights, E, I, **options), layer(*call))
    with pytest.raises(ValueError, match="^input_scales: 7 and 6 scales; expected 7 each: one per expert"):
        of(token_format="nvfp4", input_scales=(scales[0], scales[1][:E]))
    with pytest.raises(ValueError, match="^input_scales: expert 6: down: input scale -1e0 must be from"):
        scales[1][E] = -1
        of(token_format="nvfp4", input_scales=scales)


FORMULAS = {
    "silu": reference.silu,
    "silu-limit=1.5": reference.silu_limit,
    "gelu-tanh": reference.gelu_tanh,
    "gelu": reference.gelu,
    "gpt-oss": reference.gpt_oss,
    "swigluoai=1.25,0.5,0.25": functools.partial(reference.swigluoai, alpha=1.25, limit=0.5, offset=0.25),
    "swiglu-step=0.5": functools.partial(reference.swiglu_step, limit=0.5),
    "situ=0.5": functools.partial(reference.situ, beta=0.5),
    "situ=4,0.25": functools.partial(reference.situ, beta=4, linear=0.25),
    "relu2": reference.relu2,
    "relu2-gated": reference.gated_relu2,
}


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", FORMULAS)
def test_activations_and_biases_match_the_reference(activation, biased, device):
    gate, up, down = projections()
    gate = None if activation == "relu2" else gate
    biases = (torch.randn(E, I).bfloat16(), torch.randn(E, I), torch.randn(E, H)) if biased else None
    biases = (None, *biases[1:]) if biased and gate is None else biases
    of_device = [None if matrix is None else to(matrix, device) for matrix in (gate, up, down)]
    layer = nvfp4.Moe(*of_device, activation=activation, biases=biases)
    call = tokens(9, device)
    want, bound = reference.moe(*call, gate, up, down, activation=FORMULAS[activation], biases=biases)
    assert (np.abs(layer(*call).double().cpu().numpy() - want) <= bound).all()


def test_tokens_of_another_width_are_refused(device):
    layer = nvfp4.Moe(*(to(matrix, device) for matrix in projections()))
    hidden, ids, weights = tokens(5, device)
    for other in (hidden[:, : H - 16].contiguous(), hidden.repeat(1, 2)):
        with pytest.raises(ValueError, match=f"^hidden_states: .*{H}.*{other.shape[1]}"):
            layer(other, ids, weights)


def test_wrong_gate_activation_or_bias_is_named(device):
    gate, up, down = (to(matrix, device) for matrix in projections())
    for arguments, says in [
        ({"gate": None, "activation": "silu"}, "^gate: missing"),
        ({"gate": gate, "activation": "relu"}, "^activation: "),
        ({"gate": gate, "biases": (None, torch.zeros(E, I + 1), torch.zeros(E, H))}, "^up's biases: "),
    ]:
        with pytest.raises(ValueError, match=says):
            nvfp4.Moe(up=up, down=down, **arguments)


def test_experts_on_other_devices_contribute_nothing(device):
    matrices = projections()
    mapping = torch.tensor([3, -1, 0, 5, -1, 1, 2, -1, 4], dtype=torch.int32)
    layer = nvfp4.Moe(*(to(matrix, device) for matrix in matrices), expert_map=mapping.to(device))
    hidden, ids, weights = tokens(9, device, named=len(mapping))
    ids[0, 0] = -1
    here = torch.where(ids >= 0, mapping.to(device)[ids.clamp(min=0)], -1)
    check(layer(hidden, ids, weights), (hidden, here, weights), matrices)


def test_shared_expert_and_its_weights_match_the_reference(device):
    matrices, shared = projections(), projections(32, 1)
    layer = nvfp4.Moe(*(to(m, device) for m in matrices), shared=[to(m, device) for m in shared])
    call = tokens(9, device)
    check(layer(*call), call, matrices, shared=shared)
    gates = torch.rand(9)
    check(layer(*call, shared_weights=gates.to(device)), call, matrices, shared=shared, shared_weights=gates)


@pytest.mark.parametrize("activation", ["silu", "relu2"])
@pytest.mark.parametrize("token_format", ["16-bit", "fp8", "nvfp4"])
def test_experts_move_by_their_parts(token_format, activation, device):
    if (token_format, device) == ("nvfp4", "cuda"):
        pytest.skip("NVFP4 tokens need a Blackwell GPU")
    shared = projections(32, 1)

    def weights():
        matrices, biases = list(projections()), [torch.randn(E, rows) for rows in (I, I, H)]
        if activation == "relu2":
            matrices[0] = biases[0] = None
        return matrices, biases, [torch.rand(E + 1) * 0.01 + 0.01 for _ in range(2)] if token_format == "nvfp4" else None

    def layer(matrices, biases, scales):
        of_shared = [None if matrices[0] is None and index == 0 else to(matrix, device) for index, matrix in enumerate(shared)]
        of_device = [matrix and to(matrix, device) for matrix in matrices]
        options = {"activation": activation, "token_format": token_format, "input_scales": scales, "biases": biases, "shared": of_shared}
        return nvfp4.Moe(*of_device, **options)

    def pick(sources, places):
        """Returns the weights of experts at places, each a number of a source and of an expert there."""
        at = lambda of: None if of[0] is None else torch.stack([of[source][expert] for source, expert in places])
        matrices = [matrix and nvfp4.Quantized(*map(at, zip(*(source[0][index] for source in sources)))) for index, matrix in enumerate(sources[0][0])]
        biases = [at([source[1][index] for source in sources]) for index in range(3)]
        scales = sources[0][2] and [torch.cat((at([source[2][index] for source in sources]), sources[0][2][index][E:])) for index in range(2)]
        return matrices, biases, scales

    sources = weights(), weights()
    places = [(0, 4), (1, 3), (0, 0), (1, 5), (0, 1), (0, 4)]
    moved, other = (layer(*source) for source in sources)
    parts = moved.expert_parts(), other.expert_parts()
    assert all(part.shape[0] == E and part.is_contiguous() for part in parts[0])
    call = tokens(9, device)
    before = moved(*call)
    for to_part, *from_parts in zip(parts[0], *(map(torch.clone, of) for of in parts)):
        for place, (source, expert) in enumerate(places):
            to_part[place] = from_parts[source][expert]
    got = moved(*call)
    assert torch.equal(got, layer(*pick(sources, places))(*call)) and not torch.equal(got, before)


def test_weights_on_the_input_match_the_reference(device):
    matrices = projections()
    layer = nvfp4.Moe(*(to(matrix, device) for matrix in matrices))
    call = tokens(9, device, top_k=1)
    check(layer(*call, weights_on_input=True), call, matrices, weights_on_input=True)


def test_views_are_packed_without_a_copy(device):
    gate, up, down = (to(matrix, device) for matrix in projections())
    both = nvfp4.Quantized(*(torch.cat(parts, dim=1).contiguous() for parts in zip(gate[:2], up[:2])), None)
    halves = [
        nvfp4.Quantized(both.values[:, part], both.scales[:, part], scale)
        for part, scale in ((slice(0, I), gate.global_scale), (slice(I, None), up.global_scale))
    ]
    call = tokens(5, device)
    assert torch.equal(nvfp4.Moe(*halves, down)(*call), nvfp4.Moe(gate, up, down)(*call))


def test_row_gaps_given_output_and_given_workspace_work(device):
    layer = nvfp4.Moe(*(to(matrix, device) for matrix in projections()))
    hidden, ids, weights = tokens(5, device)
    want = layer(hidden, ids, weights)
    wide = torch.full((5, H + 16), float("nan"), dtype=torch.bfloat16, device=device)
    wide[:, :H] = hidden
    out = torch.full((5, H + 32), 7.0, dtype=torch.bfloat16, device=device)
    workspace = torch.empty(layer.workspace_bytes(5, K), dtype=torch.uint8, device=device)
    got = layer(wide[:, :H], ids, weights, out=out[:, :H], workspace=workspace)
    assert got.data_ptr() == out.data_ptr()
    assert torch.equal(out[:, :H], want) and (out[:, H:] == 7).all()


def test_token_result_does_not_depend_on_the_batch(device):
    layer = nvfp4.Moe(*(to(matrix, device) for matrix in projections()))
    hidden, ids, weights = tokens(200, device)
    want = layer(hidden, ids, weights)
    for part in (slice(0, 1), slice(17, 40), slice(100, 200)):
        assert torch.equal(layer(hidden[part], ids[part], weights[part]), want[part])


def test_compiled_operator_and_its_fake_agree_with_eager(device, compiled):
    layer = nvfp4.Moe(*(to(matrix, device) for matrix in projections()))
    call = tokens(5, device)
    out = torch.empty_like(call[0])
    torch.library.opcheck(torch.ops.nvfp4.moe.default, (out, *call, layer.weights, E, I))
    workspace = torch.empty(layer.workspace_bytes(5, K), dtype=torch.uint8, device=device)
    # The contents of a workspace are undefined, so a compiled call may differ in them, and the other `test_utils` would compare them.
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.nvfp4.moe.default, (out, *call, layer.weights, E, I), {"workspace": workspace}, test_utils=tests)

    def model(hidden, ids, weights):
        return layer(hidden * 2, ids, weights).relu() + hidden

    graph = compiled(model)
    for count in (5, 8, 13):
        call = tokens(count, device)
        assert torch.equal(graph(*call), model(*call))


def test_layer_has_no_parameters_and_no_state(device):
    layer = nvfp4.Moe(*(to(matrix, device) for matrix in projections()))
    hidden, ids, weights = tokens(3, device)
    assert not list(layer.parameters()) and not layer.state_dict()
    with torch.inference_mode():
        assert layer(hidden, ids, weights).shape == hidden.shape


def wrong_calls():
    """Yields the name of an argument and a change that makes a valid call's argument wrong."""
    yield "hidden_states", lambda call: call | {"hidden_states": call["hidden_states"].float()}
    yield "hidden_states", lambda call: call | {"hidden_states": call["hidden_states"][None]}
    yield "hidden_states", lambda call: call | {"hidden_states": call["hidden_states"].t().contiguous().t()}
    yield "hidden_states", lambda call: call | {"hidden_states": call["hidden_states"][:, :72]}
    yield "weights", lambda call: call | {"hidden_states": call["hidden_states"][:, :64]}
    yield "topk_ids", lambda call: call | {"topk_ids": call["topk_ids"].long()}
    yield "topk_ids", lambda call: call | {"topk_ids": call["topk_ids"][:4]}
    yield "topk_ids", lambda call: call | {"topk_ids": call["topk_ids"][:, :0]}
    yield "topk_weights", lambda call: call | {"topk_weights": call["topk_weights"].bfloat16()}
    yield "topk_weights", lambda call: call | {"topk_weights": call["topk_weights"][:, :2]}
    yield "topk_weights", lambda call: call | {"topk_weights": call["topk_weights"].t().contiguous().t()}
    yield "weights", lambda call: call | {"weights": call["weights"][:-1]}
    yield "weights", lambda call: call | {"weights": call["weights"].view(torch.int8)}
    yield "weights", lambda call: call | {"experts": E + 1}
    yield "weights", lambda call: call | {"intermediate": I + 16}
    yield "intermediate", lambda call: call | {"intermediate": 24}
    yield "expert_map", lambda call: call | {"expert_map": torch.zeros(3, device=call["weights"].device)}
    yield "shared_weights", lambda call: call | {"shared_weights": torch.ones(5, device=call["weights"].device)}
    yield "out", lambda call: call | {"out": call["hidden_states"].half()}
    yield "out", lambda call: call | {"out": call["hidden_states"].repeat(1, 2)}
    yield "workspace", lambda call: call | {"workspace": torch.zeros(512, device=call["weights"].device)}
    yield "weights_on_input", lambda call: call | {"weights_on_input": True}


@pytest.mark.parametrize(("name", "change"), list(wrong_calls()))
def test_wrong_argument_is_named_in_a_value_error(name, change, device):
    layer = nvfp4.Moe(*(to(matrix, device) for matrix in projections()))
    hidden, ids, weights = tokens(5, device)
    call = {"hidden_states": hidden, "topk_ids": ids, "topk_weights": weights, "weights": layer.weights}
    call |= {"experts": E, "intermediate": I}
    with pytest.raises(ValueError, match=f"^({name})"):
        nvfp4.moe(**change(call))
    assert nvfp4.moe(**call).shape == hidden.shape


def test_wrong_scale_is_named_with_its_place(device):
    gate, up, down = projections()
    up.scales.view(torch.uint8)[1, 3, 2] = 0x80
    with pytest.raises(ValueError, match="expert 1: up: .*row 3, block 2"):
        nvfp4.Moe(*(to(matrix, device) for matrix in (gate, up, down)))
    gate, up, down = projections()
    down.global_scale[4] = float("nan")
    with pytest.raises(ValueError, match="expert 4: down"):
        nvfp4.Moe(*(to(matrix, device) for matrix in (gate, up, down)))


def test_mismatched_tensors_are_named(device):
    gate, up, down = (to(matrix, device) for matrix in projections())
    for matrices, name in [
        ((gate, nvfp4.Quantized(up.values[:, :32], *up[1:]), down), "up.values"),
        ((gate, up, nvfp4.Quantized(down.values, down.scales[:2], down.global_scale)), "down.scales"),
        ((nvfp4.Quantized(gate.values.int(), *gate[1:]), up, down), "gate.values"),
        ((gate, up, nvfp4.Quantized(*down[:2], down.global_scale[:2])), "down.values"),
    ]:
        with pytest.raises(ValueError, match=f"^{name}"):
            nvfp4.Moe(*matrices)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
class TestOnAGpu:
    """Tests that need a GPU."""

    def test_weights_of_another_device_are_refused(self):
        matrices = projections()
        layer = nvfp4.Moe(*matrices).cuda()
        with pytest.raises(ValueError, match="^weights"):
            layer(*tokens(5, "cuda"))
        layer = nvfp4.Moe(*(to(matrix, "cuda") for matrix in matrices))
        with pytest.raises(ValueError, match="^(topk_ids|weights)"):
            layer(*tokens(5, "cpu"))

    def test_misaligned_tensors_are_named(self):
        layer = nvfp4.Moe(*(to(matrix, "cuda") for matrix in projections()))
        hidden, ids, weights = tokens(5, "cuda")
        odd = torch.empty(5, H + 3, dtype=torch.bfloat16, device="cuda")[:, :H]
        with pytest.raises(ValueError, match="^hidden_states.*contiguous"):
            layer(odd, ids, weights)
        with pytest.raises(ValueError, match="^out.*contiguous"):
            layer(hidden, ids, weights, out=odd)
        workspace = torch.empty(layer.workspace_bytes(5, K) + 1, dtype=torch.uint8, device="cuda")[1:]
        with pytest.raises(ValueError, match="^workspace"):
            layer(hidden, ids, weights, workspace=workspace)

    def test_calls_allocate_only_from_pytorch(self):
        matrices = [to(matrix, "cuda") for matrix in projections()]
        layer = nvfp4.Moe(*matrices)
        call = tokens(64, "cuda")
        layer(*call)
        torch.cuda.synchronize()
        free, _ = torch.cuda.mem_get_info()
        for _ in range(20):
            layer(*call)
        torch.cuda.synchronize()
        assert torch.cuda.mem_get_info()[0] == free

    def test_captured_graph_is_correct_for_later_routing(self):
        layer = nvfp4.Moe(*(to(matrix, "cuda") for matrix in projections()))
        hidden, ids, weights = tokens(33, "cuda")
        layer(hidden, ids, weights)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(hidden, ids, weights)
        for _ in range(3):
            for mine, new in zip((hidden, ids, weights), tokens(33, "cuda")):
                mine.copy_(new)
            graph.replay()
            assert torch.equal(out, layer(hidden, ids, weights))

    def test_current_stream_is_used(self):
        layer = nvfp4.Moe(*(to(matrix, "cuda") for matrix in projections()))
        call = tokens(33, "cuda")
        want = layer(*call)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000)
            late = call[0].clone()
            late.copy_(call[0] * 0)
            late.copy_(call[0])
            got = layer(late, *call[1:])
        stream.synchronize()
        assert torch.equal(got, want)

    def test_compiled_model_runs_as_a_graph(self):
        layer = nvfp4.Moe(*(to(matrix, "cuda") for matrix in projections()))
        compiled = torch.compile(lambda *call: layer(*call) * 2, fullgraph=True, mode="reduce-overhead")
        with torch.inference_mode():
            for _ in range(4):
                call = tokens(16, "cuda")
                assert torch.equal(compiled(*call), layer(*call) * 2)
