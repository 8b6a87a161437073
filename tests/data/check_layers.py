#!/usr/bin/env python3
"""Checks the layers that `nvfp4 run` loads against numpy, on random models. Needs numpy from PyPI.

    check_layers.py PATH/TO/nvfp4 [SEED] [MODELS]

Each model has one MoE layer of a random family, with random sizes, a random form (NVFP4 by ModelOpt or compressed-tensors; experts
apart, or in one tensor as [E, N, K/2] or [E, K/2, N]; global scales for all, per expert or per part), random types of the router's
tensors, and attention beside the block. `run --op moe --activations` must give numpy's output, and its `--json` must list every
tensor of the layer as used or left. Then one tensor that the layer needs is removed, and the command must refuse the layer.
Some models have factors of the tokens that all experts share (AWQ). Beside each model, `run --op linear` must give numpy's output of one
weight, with or without a bias, and with factors of the tokens or a Hadamard transform (compressed-tensors).
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
from tensors import F32, load, numbers, nvfp4, save, stored

# Largest error of a token's output, as a part of its size: two intermediate results and the output are rounded.
LIMITS = {"bf16": 0.02, "f16": 0.003}
FUSED_LAYOUTS = ("fused", "transposed")


class Family:
    """Names, configuration and rules of a family of models."""

    def __init__(self, kind, stack, block, router, names, scoring, layouts=("apart",), shared=None, gate=False,
                 corrections=None, keys=(), **config):  # fmt: skip
        self.kind, self.layer, self.names, self.layouts, self.scoring = kind, f"{stack}.0", names, layouts, scoring
        self.block = f"{self.layer}.{block}"
        self.router, self.gate = f"{self.block}.{router}", gate
        # Names below the layer, and keys that the family has instead of the usual ones.
        self.shared, self.corrections, self.keys, self.config = shared, corrections, dict(keys), config


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
ALL = ("apart", *FUSED_LAYOUTS)
AT_GATE = "mlp.gate.e_score_correction_bias"
FAMILIES = [
    Family("qwen3_moe", "model.layers", "mlp", "gate", PROJECTIONS, "softmax", ALL),
    Family("mixtral", "model.layers", "block_sparse_moe", "gate", ("w1", "w3", "w2"), "renormalized"),
    Family("olmoe", "model.layers", "mlp", "gate", PROJECTIONS, "softmax"),
    Family("deepseek_v3", "model.layers", "mlp", "gate", PROJECTIONS, "groups", shared="mlp.shared_experts", corrections=AT_GATE),
    Family("glm4_moe", "model.layers", "mlp", "gate", PROJECTIONS, "groups", ALL, "mlp.shared_experts", corrections=AT_GATE),
    Family("minimax_m2", "model.layers", "block_sparse_moe", "gate", ("w1", "w3", "w2"), "groups",
           corrections="block_sparse_moe.e_score_correction_bias"),
    Family("qwen3_5_moe", "model.language_model.layers", "mlp", "gate", PROJECTIONS, "renormalized", ALL, "mlp.shared_expert", True),
    Family("granitemoe", "model.layers", "block_sparse_moe", "router.layer", ("w1", "w3", "w2"), "of the chosen"),
    Family("nemotron_h", "backbone.layers", "mixer", "gate", (None, "up_proj", "down_proj"), "groups", shared="mixer.shared_experts",
           corrections="mixer.gate.e_score_correction_bias", mlp_hidden_act="relu2"),
    Family("llama4", "model.layers", "feed_forward", "router", PROJECTIONS, "llama4", ALL, "feed_forward.shared_expert"),
    Family("hunyuan_v1_moe", "model.layers", "mlp", "gate.wg", PROJECTIONS, "renormalized", shared="mlp.shared_mlp",
           keys={"num_experts_per_tok": "moe_topk"}),
    Family("lfm2_moe", "model.layers", "feed_forward", "gate", ("w1", "w3", "w2"), "groups", corrections="feed_forward.expert_bias"),
    Family("bailing_moe", "model.layers", "mlp", "gate", PROJECTIONS, "groups", shared="mlp.shared_experts",
           corrections="mlp.gate.expert_bias", score_function="sigmoid"),
    Family("step3p5", "model.layers", "moe", "gate", PROJECTIONS, "groups", shared="share_expert", corrections="moe.router_bias",
           keys={"num_experts_per_tok": "moe_top_k", "norm_topk_prob": "norm_expert_weight",
                 "routed_scaling_factor": "moe_router_scaling_factor"}, moe_router_activation="sigmoid"),
]  # fmt: skip


def matrix(rng, n, k, factor=None):
    """Returns codes, block scales, global scale and numbers of a matrix whose products have the size of the tokens."""
    codes, scales, values = nvfp4(rng, n, k)
    factor = F32(rng.uniform(0.5, 2) / (400 * np.sqrt(k))) if factor is None else factor
    return codes, scales, factor, numbers(values, scales, factor).astype(np.float64)


def add_apart(tensors, module, form, codes, scales, factor):
    if form == "modelopt":
        tensors |= {f"{module}.weight": ("U8", codes), f"{module}.weight_scale_2": ("F32", factor)}
    else:
        divisor = np.array([1 / factor], F32)
        tensors |= {f"{module}.weight_packed": ("U8", codes), f"{module}.weight_global_scale": ("F32", divisor)}
    tensors[f"{module}.weight_scale"] = ("F8_E4M3", scales)


def add_fused(rng, tensors, module, experts, layout):
    """Adds the parts of all experts as one tensor; the experts' global scales are as they are."""
    joined = [[np.concatenate([part[i] for part in parts]) for parts in experts] for i in (0, 1)]
    codes, scales = (np.stack(part) for part in joined)
    factors = np.array([[part[2] for part in parts] for parts in experts], F32)
    if factors.shape[1] == 1:
        factors = factors[:, 0]
    order = (0, 2, 1) if layout == "transposed" else (0, 1, 2)
    tensors[module] = ("U8", codes.transpose(order))
    tensors[f"{module}_weight_scale"] = ("F8_E4M3", scales.transpose(order))
    tensors[f"{module}_weight_scale_2"] = ("F32", factors)


def expert(x, gate, up, down, dtype):
    """Output of an expert for tokens, with intermediate results in the tokens' type."""
    product = x @ up.T
    hidden = np.maximum(product, 0) ** 2 if gate is None else (x @ gate.T) / (1 + np.exp(-(x @ gate.T))) * product
    return stored(stored(hidden, dtype)[1] @ down.T, dtype)[1]


def routes(family, config, logits, corrections, top_k):
    """Returns experts and weights of a token, and the distance of the closest decision."""
    sigmoid = 1 / (1 + np.exp(-logits))
    scores, margin = logits, np.inf
    if family.scoring == "groups":
        scores = sigmoid + corrections
        groups, kept = config["n_group"], config["topk_group"]
        of_groups = np.sort(scores.reshape(groups, -1), -1)[:, -2:].sum(-1)
        order = np.argsort(-of_groups, kind="stable")
        if kept < groups:
            margin = of_groups[order[kept - 1]] - of_groups[order[kept]]
        out = np.ones(groups, bool)
        out[order[:kept]] = False
        scores = np.where(np.repeat(out, len(scores) // groups), -np.inf, scores)
    order = np.argsort(-scores, kind="stable")
    if top_k < len(order):
        margin = min(margin, scores[order[top_k - 1]] - scores[order[top_k]])
    chosen = order[:top_k]
    if family.scoring == "llama4":
        return chosen, sigmoid[chosen], margin
    if family.scoring == "groups":
        weights = sigmoid[chosen]
        return chosen, weights / (weights.sum() if config["norm_topk_prob"] else 1) * config["routed_scaling_factor"], margin
    weights = np.exp(logits - logits.max())
    is_partial = family.scoring == "softmax" and not config["norm_topk_prob"]
    return chosen, weights[chosen] / (weights if is_partial else weights[chosen]).sum(), margin


class Model:
    """A random model: its tensors, its configuration and its output."""

    def __init__(self, rng):
        self.family = family = FAMILIES[rng.integers(len(FAMILIES))]
        self.layout = family.layouts[rng.integers(len(family.layouts))]
        self.form = "modelopt" if self.layout in FUSED_LAYOUTS else ["modelopt", "compressed-tensors"][rng.integers(2)]
        self.dtype = ["BF16", "F16"][rng.integers(2)]
        self.tensors, groups = {}, int(rng.integers(1, 4))
        self.hidden, inner = 16 * int(rng.integers(1, 7)), 16 * int(rng.integers(1, 6))
        self.experts, kept = 2 * groups * int(rng.integers(1, 4)), int(rng.integers(1, groups + 1))
        eligible = self.experts // groups * kept if family.scoring == "groups" else self.experts
        self.top_k = 1 if family.scoring == "llama4" else int(rng.integers(1, min(4, eligible) + 1))
        self.config = {"model_type": family.kind, "num_experts_per_tok": self.top_k, "hidden_act": "silu", **family.config}
        if "mlp_hidden_act" in family.config:
            del self.config["hidden_act"]
        if family.scoring == "groups":
            self.config |= {"n_group": groups, "topk_group": kept, "routed_scaling_factor": float(rng.uniform(0.5, 3))}
        if family.scoring in ("groups", "softmax"):
            self.config["norm_topk_prob"] = bool(rng.integers(2)) or family.kind == "minimax_m2"
        self.add_experts(rng, inner)
        self.add_factors(rng)
        self.add_router(rng)
        self.needed = list(self.tensors)
        self.tensors[f"{family.layer}.input_layernorm.weight"], _ = stored(np.ones(self.hidden), "BF16")
        self.tensors[f"{family.layer}.self_attn.q_proj.weight"], _ = stored(rng.standard_normal((16, self.hidden)), "BF16")

    def add_experts(self, rng, inner):
        family, hidden = self.family, self.hidden
        sizes = [(inner, hidden), (inner, hidden), (hidden, inner)]
        one = lambda sizes: [matrix(rng, *size) if name else None for name, size in zip(family.names, sizes)]
        self.weights = [one(sizes) for _ in range(self.experts)]
        block = f"{family.block}.experts"
        if self.layout == "apart":
            for index, parts in enumerate(self.weights):
                for name, part in zip(family.names, parts):
                    if part:
                        add_apart(self.tensors, f"{block}.{index}.{name}", self.form, *part[:3])
        else:
            add_fused(rng, self.tensors, f"{block}.gate_up_proj", [parts[:2] for parts in self.weights], self.layout)
            add_fused(rng, self.tensors, f"{block}.down_proj", [parts[2:] for parts in self.weights], self.layout)
        self.shared = None
        # A model of these families always has its shared expert.
        if family.shared:
            width = 16 * int(rng.integers(1, 5))
            self.shared = one([(width, hidden), (width, hidden), (hidden, width)])
            for name, part in zip(family.names, self.shared):
                if part:
                    add_apart(self.tensors, f"{family.layer}.{family.shared}.{name}", self.form, *part[:3])

    def add_factors(self, rng):
        """Adds factors of the tokens that all experts share (AWQ), and factors of 1 between the products."""
        self.factors = 1
        if self.form != "modelopt" or self.layout != "apart" or rng.random() < 0.7:
            return
        dtype, factors = ["F32", "BF16", "F16"][rng.integers(3)], rng.uniform(0.5, 2, self.hidden)
        for name in [name for name in self.tensors if name.endswith(".weight_scale_2")]:
            module = name.removesuffix(".weight_scale_2")
            is_down = module.endswith(f".{self.family.names[2]}")
            k = 2 * self.tensors[f"{module}.weight"][1].shape[1]
            self.tensors[f"{module}.pre_quant_scale"], kept = stored(np.ones(k) if is_down else factors, dtype)
            self.factors = self.factors if is_down else kept

    def add_router(self, rng):
        family = self.family
        dtype = lambda: ["F32", "BF16", "F16"][rng.integers(3)]
        matrix = rng.standard_normal((self.experts, self.hidden)) / np.sqrt(self.hidden)
        self.tensors[f"{family.router}.weight"], self.router = stored(matrix, dtype())
        self.corrections = self.shared_gate = 0
        if family.corrections:
            name = f"{family.layer}.{family.corrections}"
            self.tensors[name], self.corrections = stored(rng.uniform(0, 0.2, self.experts), dtype())
        if family.gate:
            gate = rng.standard_normal((1, self.hidden))
            self.tensors[f"{family.block}.shared_expert_gate.weight"], self.shared_gate = stored(gate, dtype())

    def output(self, x):
        """Returns the output for tokens, and the tokens whose experts are certain."""
        result, certain = np.zeros(x.shape), np.ones(len(x), bool)
        numbers_of = lambda parts: [part and part[3] for part in parts]
        for token, row in enumerate(x):
            chosen, weights, margin = routes(self.family, self.config, row @ self.router.T, self.corrections, self.top_k)
            certain[token] = margin > 1e-5
            for index, weight in zip(chosen, weights):
                is_first = self.family.scoring == "llama4"
                scaled = stored(row * self.factors, self.dtype)[1]
                source = stored(scaled * weight, self.dtype)[1] if is_first else scaled
                result[token] += (1 if is_first else weight) * expert(source, *numbers_of(self.weights[index]), self.dtype)
        if self.shared:
            gate = 1 / (1 + np.exp(-(x @ self.shared_gate.T))) if self.family.gate else 1
            result += gate * expert(stored(x * self.factors, self.dtype)[1], *numbers_of(self.shared), self.dtype)
        return result, certain

    def save(self, folder, without=None):
        save(folder / "model.safetensors", {name: tensor for name, tensor in self.tensors.items() if name != without})
        config = {self.family.keys.get(key, key): value for key, value in self.config.items()}
        (folder / "config.json").write_text(json.dumps(config))


def starred(name):
    """Returns a name with `*` for the number of the expert, as `--json` has it."""
    words = name.split(".")
    return ".".join("*" if before == "experts" and word.isdigit() else word for before, word in zip([""] + words, words))


def check(command, model, rng, folder, place):
    """Compares the output of a model's layer, then removes a tensor."""
    (folder / "in").mkdir()
    model.save(folder / "in")
    (dtype, bits), x = stored(rng.standard_normal((int(rng.integers(1, 12)), model.hidden)), model.dtype)
    save(folder / "tokens.safetensors", {"hidden": (dtype, bits)})
    line = [command, "run", "--backend", "cpu", "--op", "moe", "--weights", "in", "--layer", "0", "--repeat", "1", "--json"]
    line += ["--activations", "tokens.safetensors", "--output", "out.safetensors"]
    run = lambda: subprocess.run(line, cwd=folder, capture_output=True, text=True)
    done = run()
    assert done.returncode == 0, (place, done.stderr, done.stdout)
    report = json.loads(done.stdout)
    listed = set(report["tensors"]["used"]) | set(report["tensors"]["left"])
    assert listed == {starred(name) for name in model.tensors}, (place, listed)
    assert set(report["tensors"]["used"]) == {starred(name) for name in model.needed}, (place, report["tensors"])
    _, got = stored(*reversed(read(folder / "out.safetensors", model.dtype)))
    expected, certain = model.output(x)
    errors = np.linalg.norm(got - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert (errors[certain] < LIMITS[model.dtype.lower()]).all(), (place, errors, certain)
    # Corrections of the choice are optional in some families; factors of the tokens are in every model.
    optional = f"{model.family.layer}.{model.family.corrections}"
    needed = [name for name in model.needed if name != optional and not name.endswith("pre_quant_scale")]
    missing = needed[rng.integers(len(needed))]
    model.save(folder / "in", missing)
    (folder / "out.safetensors").unlink()
    done = run()
    assert done.returncode == 2 and not (folder / "out.safetensors").exists(), (place, missing, done)
    return int(certain.sum())


def hadamard(rng, tensors, module, k):
    """Adds a transform of the tokens. Returns its matrix `[k, k]` and the configuration."""
    block = k & -k if rng.integers(2) else 16
    matrix = np.ones((1, 1))
    while len(matrix) < block:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    kind, inverse = ["hadamard", "random-hadamard"][rng.integers(2)], bool(rng.integers(2))
    if kind == "random-hadamard":
        matrix = rng.choice([-1, 1], block)[:, None] * matrix
    if kind == "random-hadamard" or rng.integers(2):
        tensors[f"{module}.R_input.weight"], _ = stored(matrix, ["F32", "BF16", "F16"][rng.integers(3)])
    apply = [{"targets": ["Linear"], "location": "weight_input", "inverse": True},
             {"targets": ["re:.*o_proj$"], "location": "input", "inverse": inverse, "ignore": ["lm_head"]}]  # fmt: skip
    groups = {"R": {"type": kind, "head_dim": block if block < k or rng.integers(2) else None, "apply": apply}}
    matrix = matrix.T if inverse else matrix
    config = {"quant_method": "compressed-tensors", "transform_config": {"config_groups": groups}}
    return np.kron(np.eye(k // block), matrix / np.sqrt(block)), config


def check_linear(command, rng, folder, place):
    """Compares one weight of attention: with a bias, and with factors of the tokens (NVFP4_AWQ)."""
    n, k, form = 16 * int(rng.integers(1, 7)), 16 * int(rng.integers(1, 7)), ["modelopt", "compressed-tensors"][rng.integers(2)]
    dtype, of_parts = ["BF16", "F16"][rng.integers(2)], ["F32", "BF16", "F16"]
    module, tensors = "model.layers.0.self_attn.o_proj", {}
    codes, scales, factor, weight = matrix(rng, n, k)
    add_apart(tensors, module, form, codes, scales, factor)
    bias, factors = 0, 1
    if rng.integers(2):
        tensors[f"{module}.bias"], bias = stored(rng.standard_normal(n), of_parts[rng.integers(3)])
    transform = np.eye(k)
    if form == "modelopt" and rng.integers(2):
        tensors[f"{module}.pre_quant_scale"], factors = stored(rng.uniform(0.5, 2, k), of_parts[rng.integers(3)])
    (folder / "linear").mkdir()
    if form != "modelopt" and rng.integers(2):
        transform, config = hadamard(rng, tensors, module, k)
        (folder / "linear" / "config.json").write_text(json.dumps({"quantization_config": config}))
    save(folder / "linear" / "model.safetensors", tensors)
    (_, bits), x = stored(rng.standard_normal((int(rng.integers(1, 12)), k)), dtype)
    save(folder / "tokens.safetensors", {"hidden": (dtype, bits)})
    line = [command, "run", "--backend", "cpu", "--op", "linear", "--weights", "linear", "--tensor", module]
    line += ["--repeat", "1", "--activations", "tokens.safetensors", "--output", "out.safetensors"]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, (place, done.stderr, done.stdout)
    _, got = stored(*reversed(read(folder / "out.safetensors", dtype)))
    expected = stored(x * factors @ transform, dtype)[1] @ weight.T + bias
    error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
    assert error < LIMITS[dtype.lower()], (place, form, list(tensors), error)


def read(path, dtype):
    output = load(path)["output"]
    return dtype, (output.astype(np.uint32) << 16).view(F32) if dtype == "BF16" else output


def main():
    command = str(pathlib.Path(sys.argv[1]).resolve())
    seed, count = (int(argument) for argument in (sys.argv[2:] + ["0", "60"][len(sys.argv) - 2 :])[:2])
    tokens = 0
    for index in range(count):
        rng = np.random.default_rng([seed, index])
        model = Model(rng)
        place = (seed, index, model.family.kind, model.layout, model.form, model.dtype)
        with tempfile.TemporaryDirectory() as folder:
            tokens += check(command, model, rng, pathlib.Path(folder), place)
            check_linear(command, rng, pathlib.Path(folder), place)
    print(f"{count} models and {count} linear layers, {tokens} tokens of models: all outputs are as expected")


if __name__ == "__main__":
    main()
