#!/usr/bin/env python3
"""Checks the layers that `nvfp4 run` loads against numpy, on random models. Needs numpy from PyPI.

    check_layers.py PATH/TO/nvfp4 [SEED] [MODELS]

Each model has one MoE layer of a random family, with random sizes, a random form (NVFP4 by ModelOpt or compressed-tensors; experts
apart, or in one tensor as [E, N, K/2] or [E, K/2, N]; global scales for all, per expert or per part), random types of the router's
tensors, and attention beside the block. `run --op moe --activations` must give numpy's output, and its `--json` must list every
tensor of the layer as used or left. Then one tensor that the layer needs is removed, and the command must refuse the layer.
Some families have norms and projections around their experts, with a branch beside them (Nemotron 3, Kimi-K3, Gemma 4).
Half of the shared experts and dense branches are in another precision: each projection is bf16, f16, f32, FP8 (one scale, one per row,
or blocks, in f32, f16, bf16 or E8M0) or NVFP4, with or without a bias. `--json` must list their forms. Step has limits of its own for the
shared expert. Two recipes of published models are checked too: Qwen3.5 with a shared expert in bf16, and DeepSeek-V4's own files.
Some models have factors of the tokens, the same or different ones for each expert, and of the intermediate (AWQ), or Hadamard
transforms of both (compressed-tensors). Beside each model, `run --op linear` must give numpy's output of one
weight, with or without a bias, and with factors of the tokens or a Hadamard transform (compressed-tensors).
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
from tensors import E4M3, F32, load, numbers, nvfp4, save, stored, values_of

# Largest error of a token's output, as a part of its size: two intermediate results and the output are rounded.
LIMITS = {"bf16": 0.02, "f16": 0.003}
FUSED_LAYOUTS = ("fused", "transposed")
# Forms of projections that the host computes, and sizes of FP8 blocks.
FLOATS = ("F32", "BF16", "F16")
FORMS = (*FLOATS, "FP8", "FP8 rows", "FP8 blocks", "NVFP4")
BLOCK = (32, 16)


class Family:
    """Names, configuration and rules of a family of models."""

    def __init__(self, kind, stack, block, router, names, scoring, layouts=("apart",), shared=None, gate=False,
                 corrections=None, keys=(), around=None, activation="silu", **config):  # fmt: skip
        self.kind, self.layer, self.names, self.layouts, self.scoring = kind, f"{stack}.0", names, layouts, scoring
        self.block = f"{self.layer}.{block}" if block else self.layer
        self.around, self.activation = around, activation
        # Granite's shared expert has gate and up in one matrix.
        self.shared_names = ("input_linear", None, "output_linear") if shared == "shared_mlp" else names
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
    Family("granitemoehybrid", "model.layers", "block_sparse_moe", "router.layer", ("w1", "w3", "w2"), "of the chosen",
           shared="shared_mlp"),
    Family("nemotron_h", "backbone.layers", "mixer", "gate", (None, "up_proj", "down_proj"), "groups", shared="mixer.shared_experts",
           corrections="mixer.gate.e_score_correction_bias", activation="relu2", mlp_hidden_act="relu2"),
    Family("llama4", "model.layers", "feed_forward", "router", PROJECTIONS, "llama4", ALL, "feed_forward.shared_expert"),
    Family("hunyuan_v1_moe", "model.layers", "mlp", "gate.wg", PROJECTIONS, "renormalized", shared="mlp.shared_mlp",
           keys={"num_experts_per_tok": "moe_topk"}),
    Family("lfm2_moe", "model.layers", "feed_forward", "gate", ("w1", "w3", "w2"), "groups", corrections="feed_forward.expert_bias"),
    Family("bailing_moe", "model.layers", "mlp", "gate", PROJECTIONS, "groups", shared="mlp.shared_experts",
           corrections="mlp.gate.expert_bias", score_function="sigmoid"),
    Family("step3p5", "model.layers", "moe", "gate", PROJECTIONS, "groups", shared="share_expert", corrections="moe.router_bias",
           keys={"num_experts_per_tok": "moe_top_k", "norm_topk_prob": "norm_expert_weight",
                 "routed_scaling_factor": "moe_router_scaling_factor"}, moe_router_activation="sigmoid"),
    Family("nemotron_h", "backbone.layers", "mixer", "gate", (None, "up_proj", "down_proj"), "groups", shared="mixer.shared_experts",
           corrections="mixer.gate.e_score_correction_bias", around="nemotron", activation="relu2", mlp_hidden_act="relu2"),
    Family("kimi_linear", "language_model.model.layers", "block_sparse_moe", "gate", ("w1", "w3", "w2"), "groups",
           shared="block_sparse_moe.shared_experts", corrections="block_sparse_moe.gate.e_score_correction_bias", around="kimi",
           activation="situ", hidden_act="situ", activation_situ_beta=0.5, activation_situ_linear_beta=0.75, latent_moe_use_norm=True,
           keys={"num_experts_per_tok": "num_experts_per_token", "norm_topk_prob": "moe_renormalize", "n_group": "num_expert_group"}),
    Family("gemma4_text", "model.language_model.layers", "", "router.proj", PROJECTIONS, "renormalized", ALL, "mlp", around="gemma",
           activation="gelu", keys={"num_experts_per_tok": "top_k_experts", "hidden_act": "hidden_activation"},
           hidden_act="gelu_pytorch_tanh"),
]  # fmt: skip
# Names of norm and projection before the experts, norm and projection behind them, norms before and behind the branch.
AROUND = {
    None: [None] * 6,
    "nemotron": [None, "fc1_latent_proj", None, "fc2_latent_proj", None, None],
    "kimi": [None, "routed_expert_down_proj", "routed_expert_norm", "routed_expert_up_proj", None, None],
    "gemma": ["pre_feedforward_layernorm_2", None, "post_feedforward_layernorm_2", None, "pre_feedforward_layernorm",
              "post_feedforward_layernorm_1"],
}  # fmt: skip


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


def add_in_form(rng, tensors, module, form, n, k):
    """Adds a matrix in floats or FP8, and returns its numbers."""
    if form in FLOATS:
        tensors[f"{module}.weight"], weights = stored(rng.standard_normal((n, k)) / np.sqrt(k), form)
        return weights
    codes, signs = rng.integers(0, 0x7F, (n, k), np.uint8), rng.integers(0, 2, (n, k), np.uint8)
    tensors[f"{module}.weight"] = ("F8_E4M3", codes | signs << 7)
    lines, columns = {"FP8": (n, k), "FP8 rows": (1, k), "FP8 blocks": BLOCK}[form]
    grid = -(-n // lines), -(-k // columns)
    if form == "FP8 blocks" and rng.integers(2):
        exponents = rng.integers(118, 122, grid, np.uint8)
        tensors[f"{module}.scale"], scales = ("F8_E8M0", exponents), 2.0 ** (exponents.astype(int) - 127)
    else:
        part = ["weight_scale", "weight_scale_inv"][rng.integers(2)] if form == "FP8 blocks" else "weight_scale"
        tensor, scales = stored(rng.uniform(0.5, 2, grid) / (200 * np.sqrt(k)), FLOATS[rng.integers(3)])
        shape = {"FP8": [(), (1,)], "FP8 rows": [(n,), (n, 1)]}.get(form, [grid])
        tensors[f"{module}.{part}"] = (tensor[0], tensor[1].reshape(shape[rng.integers(len(shape))]))
    if form == "FP8" and rng.integers(2):
        tensors[f"{module}.input_scale"] = ("F32", np.array(0.25, F32))
    scales = np.repeat(np.repeat(scales, lines, 0), columns, 1)[:n, :k]
    return E4M3[codes] * (1 - 2.0 * signs) * scales


def activated(activation, gate, up, limit=np.inf):
    if activation == "relu2" or gate is None:
        return np.maximum(up, 0) ** 2
    if activation == "gelu":
        return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    sigmoid = 1 / (1 + np.exp(-gate))
    if activation == "situ":
        return 0.5 * np.tanh(gate / 0.5) * sigmoid * 0.75 * np.tanh(up / 0.75)
    return np.minimum(gate * sigmoid, limit) * np.clip(up, -limit, limit)


def sylvester(size):
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


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
        self.width = 16 * int(rng.integers(1, 5)) if family.around in ("nemotron", "kimi") else self.hidden
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
        if family.around:
            self.config["rms_norm_eps"] = float(rng.uniform(0.01, 0.5))
        self.limits = np.inf, np.inf
        if family.kind == "step3p5":
            limits = [float(rng.choice([0, 0.25, 0.5])) for _ in range(2)]
            self.config |= {"swiglu_limits": limits[:1], "swiglu_limits_shared": limits[1:]}
            self.limits = tuple(limit or np.inf for limit in limits)
        self.forms, self.quantization = {}, None
        self.add_experts(rng, inner)
        self.add_around(rng)
        self.add_transforms(rng)
        self.add_router(rng)
        self.needed = list(self.tensors)
        self.tensors[f"{family.layer}.input_layernorm.weight"], _ = stored(np.ones(self.hidden), "BF16")
        self.tensors[f"{family.layer}.self_attn.q_proj.weight"], _ = stored(rng.standard_normal((16, self.hidden)), "BF16")

    def add_experts(self, rng, inner):
        family, hidden, routed = self.family, self.hidden, self.width
        sizes = [(inner, routed), (inner, routed), (routed, inner)]
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
        self.shared, self.on_host = None, False
        # A model of these families always has its shared expert.
        if family.shared:
            self.add_shared(rng, 16 * int(rng.integers(1, 5)))

    def add_shared(self, rng, width):
        """Adds a shared expert or a dense branch: gate, up and down, each with its bias."""
        family, hidden = self.family, self.hidden
        names = family.shared_names
        is_merged = names[1] is None
        sizes = [(2 * width if is_merged else width, hidden), (width, hidden), (hidden, width)]
        is_mixed = rng.random() < 0.5
        forms = [FORMS[rng.integers(len(FORMS))] if is_mixed else "NVFP4" for _ in names]
        self.on_host = any(name and form != "NVFP4" for name, form in zip(names, forms))
        if "FP8 blocks" in forms:
            self.quantization = {"quant_method": self.form, "weight_block_size": BLOCK}
        self.shared, self.shared_biases = [None] * 3, [0] * 3
        for role, (name, form, (n, k)) in enumerate(zip(names, forms, sizes)):
            module = f"{family.layer}.{family.shared}.{name}"
            if not name:
                continue
            if form == "NVFP4":
                part = matrix(rng, n, k)
                add_apart(self.tensors, module, self.form, *part[:3])
                self.shared[role] = part[3]
            else:
                self.shared[role] = add_in_form(rng, self.tensors, module, form, n, k)
            if self.on_host:
                self.forms[module] = form.split()[0]
                if rng.random() < 0.3:
                    self.tensors[f"{module}.bias"], self.shared_biases[role] = stored(rng.standard_normal(n), FLOATS[rng.integers(3)])
        if is_merged:
            bias = np.broadcast_to(self.shared_biases[0], 2 * width)
            self.shared[:2], self.shared_biases[:2] = np.split(self.shared[0], 2), np.split(bias, 2)

    def add_around(self, rng):
        """Adds the norms and projections of the family; each is a pair of its kind and its numbers, or nothing."""
        names, (hidden, width) = AROUND[self.family.around], (self.hidden, self.width)
        sizes = [hidden, (width, hidden), width, (hidden, width), hidden, hidden]
        self.around = []
        for name, size in zip(names, sizes):
            numbers = None
            if name:
                is_norm = not isinstance(size, tuple)
                numbers = rng.uniform(0.5, 1.5, size) if is_norm else rng.standard_normal(size) / np.sqrt(size[1])
                dtype = FLOATS[rng.integers(3)]
                self.tensors[f"{self.family.block}.{name}.weight"], numbers = stored(numbers, dtype)
                if not is_norm:
                    self.forms[f"{self.family.block}.{name}"] = dtype
            self.around.append(numbers)

    def norm(self, x, weights):
        return x if weights is None else x / np.sqrt((x**2).mean(-1, keepdims=True) + self.config["rms_norm_eps"]) * weights

    def through(self, x, norm, projection):
        x = self.norm(x, norm)
        return x if projection is None else x @ projection.T

    def add_transforms(self, rng):
        """Adds factors of tokens and intermediate (AWQ) or Hadamard transforms: a pair for each expert and the shared one, unless the
        host computes the shared one."""
        count = self.experts + (self.shared is not None and not self.on_host)
        self.changes = [(None, None)] * (self.experts + 1)
        if self.layout != "apart" or rng.random() < 0.6:
            return
        one, shared_by_all = rng.uniform(0.5, 2, 8192), rng.random() < 0.4
        dtype = ["F32", "BF16", "F16"][rng.integers(3)]
        names = lambda n: self.family.shared_names if n == self.experts else self.family.names
        projections = [(n, "down" if name == names(n)[2] else "up", self.module(n, name))
                       for n in range(count) for name in names(n) if name]  # fmt: skip
        for index, kind, module in projections:
            k = 16 * self.tensors[f"{module}.weight_scale"][1].shape[1]
            change = self.changes[index][kind == "down"]
            if self.form == "modelopt":
                if change is None:
                    factors = one[:k] if shared_by_all else rng.uniform(0.5, 2, k)
                    tensor, kept = stored(np.ones(k) if kind == "down" and shared_by_all else factors, dtype)
                    change = tensor, lambda x, kept=kept: x * kept
                self.tensors[f"{module}.pre_quant_scale"] = change[0]
            elif change is None:
                matrix = np.kron(np.eye(k // 16), sylvester(16) / 4)
                change = None, lambda x, matrix=matrix: x @ matrix
            pair = list(self.changes[index])
            pair[kind == "down"] = change
            self.changes[index] = tuple(pair)
        if self.form != "modelopt":
            apply = [{"targets": ["Linear"], "location": "input", "ignore": ["re:.*gate$", "re:.*router", "re:.*wg$", "re:.*_latent_proj$",
                      "re:.*routed_expert_(up|down)_proj$"]}]  # fmt: skip
            if self.on_host:
                apply[0]["ignore"].append(f"re:^{self.family.layer}.{self.family.shared}".replace(".", "\\."))
            groups = {"R": {"type": "hadamard", "head_dim": 16, "apply": apply}}
            quantization = {"quant_method": "compressed-tensors", "transform_config": {"config_groups": groups}}
            self.quantization = (self.quantization or {}) | quantization

    def module(self, index, name):
        family = self.family
        return f"{family.layer}.{family.shared}.{name}" if index == self.experts else f"{family.block}.experts.{index}.{name}"

    def expert(self, index, x):
        """Output of an expert for tokens; the shared one has the number of experts."""
        if index == self.experts and self.on_host:
            gate, up, down = (None if part is None else (part, bias) for part, bias in zip(self.shared, self.shared_biases))
            product = lambda rows, part: part and rows @ part[0].T + part[1]
            return product(activated(self.family.activation, product(x, gate), product(x, up), self.limits[1]), down)
        gate, up, down = self.shared if index == self.experts else (part and part[3] for part in self.weights[index])
        limit = self.limits[int(index == self.experts)]
        before, inside = (change and change[1] for change in self.changes[index])
        change = lambda rows, of: stored(of(rows), self.dtype)[1] if of else rows
        x = change(x, before)
        hidden = activated(self.family.activation, None if gate is None else x @ gate.T, x @ up.T, limit)
        return stored(change(stored(hidden, self.dtype)[1], inside) @ down.T, self.dtype)[1]

    def add_router(self, rng):
        family = self.family
        dtype = lambda: ["F32", "BF16", "F16"][rng.integers(3)]
        matrix = rng.standard_normal((self.experts, self.hidden)) / np.sqrt(self.hidden)
        self.tensors[f"{family.router}.weight"], self.router = stored(matrix, dtype())
        self.corrections = self.shared_gate = 0
        if family.corrections:
            name = f"{family.layer}.{family.corrections}"
            self.tensors[name], self.corrections = stored(rng.uniform(0, 0.2, self.experts), dtype())
        self.router_norm, self.expert_scale = None, 1
        if family.around == "gemma":
            scale, self.expert_scale = rng.uniform(0.5, 1.5, self.hidden) * np.sqrt(self.hidden), rng.uniform(0.5, 2, self.experts)
            self.tensors[f"{family.layer}.router.scale"], scale = stored(scale, dtype())
            self.router_norm = scale / np.sqrt(self.hidden)
            self.tensors[f"{family.layer}.router.per_expert_scale"], self.expert_scale = stored(self.expert_scale, dtype())
        if family.gate:
            gate = rng.standard_normal((1, self.hidden))
            self.tensors[f"{family.block}.shared_expert_gate.weight"], self.shared_gate = stored(gate, dtype())

    def output(self, x):
        """Returns the output for tokens, and the tokens whose experts are certain."""
        certain = np.ones(len(x), bool)
        before, behind, (first, last) = self.around[:2], self.around[2:4], self.around[4:]
        narrow = stored(self.through(x, *before), self.dtype)[1]
        routed = np.zeros(narrow.shape)
        for token, row in enumerate(x):
            logits = self.norm(row, self.router_norm) @ self.router.T
            chosen, weights, margin = routes(self.family, self.config, logits, self.corrections, self.top_k)
            certain[token] = margin > 1e-5
            for index, weight in zip(chosen, weights * np.broadcast_to(self.expert_scale, self.experts)[chosen]):
                is_first = self.family.scoring == "llama4"
                source = stored(narrow[token] * weight, self.dtype)[1] if is_first else narrow[token]
                routed[token] += (1 if is_first else weight) * self.expert(index, source)
        result = self.through(stored(routed, self.dtype)[1] if self.family.around else routed, *behind)
        if self.shared:
            gate = 1 / (1 + np.exp(-(x @ self.shared_gate.T))) if self.family.gate else 1
            tokens = self.norm(x, first)
            output = self.expert(self.experts, tokens if self.on_host else stored(tokens, self.dtype)[1])
            result = result + gate * self.norm(output, last)
        return result, certain

    def save(self, folder, without=None):
        save(folder / "model.safetensors", {name: tensor for name, tensor in self.tensors.items() if name != without})
        config = {self.family.keys.get(key, key): value for key, value in self.config.items()}
        if self.quantization:
            config["quantization_config"] = self.quantization
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
    forms = (report["around"] or {}).get("forms_on_host", {})
    assert forms == model.forms, (place, forms, model.forms)
    _, got = stored(*reversed(read(folder / "out.safetensors", model.dtype)))
    expected, certain = model.output(x)
    errors = np.linalg.norm(got - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert (errors[certain] < LIMITS[model.dtype.lower()]).all(), (place, errors, certain)
    # Corrections of the choice are optional in some families; factors of the tokens are in every model.
    optional = f"{model.family.layer}.{model.family.corrections}"
    endings = ("pre_quant_scale", ".bias", ".input_scale")
    needed = [name for name in model.needed if name != optional and not name.endswith(endings)]
    missing = needed[rng.integers(len(needed))]
    model.save(folder / "in", missing)
    (folder / "out.safetensors").unlink()
    done = run()
    assert done.returncode == 2 and not (folder / "out.safetensors").exists(), (place, missing, done)
    return int(certain.sum())


def hadamard(rng, tensors, module, k):
    """Adds a transform of the tokens. Returns its matrix `[k, k]` and the configuration."""
    block = k & -k if rng.integers(2) else 16
    matrix = sylvester(block)
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


def silu(x):
    return x / (1 + np.exp(-x))


def qwen3_5(rng, hidden=192, inner=96, experts=6):
    """ModelOpt's recipe without `shared_expert*`: all experts in one NVFP4 tensor, a shared expert in bf16 with its gate, a vision tower
    and draft layers. Returns tensors, configuration, the forms on the host, and the output for tokens."""
    block, tensors = "model.language_model.layers.0.mlp", {}
    routed = [[matrix(rng, *size) for size in ((inner, hidden), (inner, hidden), (hidden, inner))] for _ in range(experts)]
    add_fused(rng, tensors, f"{block}.experts.gate_up_proj", [parts[:2] for parts in routed], "fused")
    add_fused(rng, tensors, f"{block}.experts.down_proj", [parts[2:] for parts in routed], "fused")
    sizes = zip(PROJECTIONS, ((80, hidden), (80, hidden), (hidden, 80)))
    shared = [add_in_form(rng, tensors, f"{block}.shared_expert.{name}", "BF16", *size) for name, size in sizes]
    tensors[f"{block}.gate.weight"], router = stored(rng.standard_normal((experts, hidden)) / np.sqrt(hidden), "BF16")
    tensors[f"{block}.shared_expert_gate.weight"], gate = stored(rng.standard_normal((1, hidden)) / np.sqrt(hidden), "BF16")
    for name in ("model.visual.blocks.0.mlp.linear_fc1.weight", "mtp.layers.0.mlp.shared_expert.gate_proj.weight"):
        tensors[name], _ = stored(rng.standard_normal((16, 16)), "BF16")
    text = {"model_type": "qwen3_5_moe_text", "num_experts_per_tok": 2, "hidden_act": "silu", "shared_expert_intermediate_size": 80}
    ignore = ["*shared_expert*", "*mlp.gate", "model.visual*", "mtp*"]
    config = {"model_type": "qwen3_5_moe", "text_config": text,
              "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ignore}}  # fmt: skip
    mlp = lambda x, gate, up, down: silu(x @ gate.T) * (x @ up.T) @ down.T

    def output(x):
        logits = x @ router.T
        chosen = np.argsort(-logits, 1)[:, :2]
        weights = np.exp(np.take_along_axis(logits, chosen, 1))
        weights /= weights.sum(1, keepdims=True)
        parts = [sum(w * mlp(row, *(part[3] for part in routed[e])) for w, e in zip(*pair)) for row, *pair in zip(x, weights, chosen)]
        return np.stack(parts) + mlp(x, *shared) / (1 + np.exp(-x @ gate.T))

    return tensors, config, {f"{block}.shared_expert.{name}": "BF16" for name in PROJECTIONS}, output


def deepseek_v4(rng, hidden=384, inner=256, experts=6):
    """The published form: experts in MXFP4, the shared expert in FP8 with E8M0 scales of 128x128 blocks."""
    block, tensors = "layers.0.ffn", {}

    def mxfp4(module, n, k):
        codes, exponents = rng.integers(0, 256, (n, k // 2), np.uint8), rng.integers(117, 122, (n, k // 32), np.uint8)
        tensors[f"{module}.weight"], tensors[f"{module}.scale"] = ("I8", codes), ("F8_E8M0", exponents)
        return values_of(codes) * np.repeat(2.0 ** (exponents.astype(int) - 127), 32, 1)

    def fp8(module, n, k):
        codes, signs = rng.integers(0, 0x7F, (n, k), np.uint8), rng.integers(0, 2, (n, k), np.uint8)
        exponents = rng.integers(113, 117, (-(-n // 128), -(-k // 128)), np.uint8)
        tensors[f"{module}.weight"], tensors[f"{module}.scale"] = ("F8_E4M3", codes | signs << 7), ("F8_E8M0", exponents)
        scales = np.repeat(np.repeat(2.0 ** (exponents.astype(int) - 127), 128, 0), 128, 1)[:n, :k]
        return E4M3[codes] * (1 - 2.0 * signs) * scales

    sizes = {"w1": (inner, hidden), "w3": (inner, hidden), "w2": (hidden, inner)}
    routed = [[mxfp4(f"{block}.experts.{e}.{name}", *size) for name, size in sizes.items()] for e in range(experts)]
    shared = [fp8(f"{block}.shared_experts.{name}", *size) for name, size in sizes.items()]
    tensors[f"{block}.gate.weight"], router = stored(rng.standard_normal((experts, hidden)) / np.sqrt(hidden), "BF16")
    tensors[f"{block}.gate.bias"], bias = stored(rng.uniform(0, 0.1, experts), "F32")
    config = {"model_type": "deepseek_v4", "num_experts_per_tok": 2, "n_shared_experts": 1, "hidden_act": "silu", "swiglu_limit": 10.0,
              "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 1.5,
              "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}}  # fmt: skip
    mlp = lambda x, gate, up, down: silu(np.minimum(x @ gate.T, 10)) * np.clip(x @ up.T, -10, 10) @ down.T

    def output(x):
        scores = np.sqrt(np.log1p(np.exp(x @ router.T)))
        chosen = np.argsort(-(scores + bias), 1)[:, :2]
        weights = np.take_along_axis(scores, chosen, 1)
        weights *= 1.5 / weights.sum(1, keepdims=True)
        parts = [sum(w * mlp(row, *routed[e]) for w, e in zip(*pair)) for row, *pair in zip(x, weights, chosen)]
        return np.stack(parts) + mlp(x, *shared)

    return tensors, config, {f"{block}.shared_experts.{name}": "FP8" for name in sizes}, output


def check_recipe(command, rng, folder, recipe):
    """Compares a layer of a published recipe, and what `inspect` says about its shared expert."""
    tensors, config, forms, output = recipe(rng)
    (folder / "in").mkdir()
    save(folder / "in" / "model.safetensors", tensors)
    (folder / "in" / "config.json").write_text(json.dumps(config))
    width = next(tensor[1].shape[1] for name, tensor in tensors.items() if name.endswith(".gate.weight"))
    (dtype, bits), x = stored(rng.standard_normal((9, width)), "BF16")
    save(folder / "tokens.safetensors", {"hidden": (dtype, bits)})
    line = [command, "run", "--backend", "cpu", "--op", "moe", "--weights", "in", "--layer", "0", "--repeat", "1", "--json"]
    line += ["--activations", "tokens.safetensors", "--output", "out.safetensors"]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, (recipe.__name__, done.stderr)
    assert json.loads(done.stdout)["around"]["forms_on_host"] == forms, (recipe.__name__, done.stdout)
    _, got = stored(*reversed(read(folder / "out.safetensors", "BF16")))
    expected = output(x)
    errors = np.linalg.norm(got - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert (errors < LIMITS["bf16"]).all(), (recipe.__name__, errors)
    done = subprocess.run([command, "inspect", "in", "--json"], cwd=folder, capture_output=True, text=True)
    runs = {other["module"]: other["runs"] for other in json.loads(done.stdout)["others"]}
    assert all(runs[module] == ["moe"] for module in forms), (recipe.__name__, runs)


def read(path, dtype):
    output = load(path)["output"]
    return dtype, (output.astype(np.uint32) << 16).view(F32) if dtype == "BF16" else output


def main():
    command = str(pathlib.Path(sys.argv[1]).resolve())
    seed, count = (int(argument) for argument in (sys.argv[2:] + ["0", "60"][len(sys.argv) - 2 :])[:2])
    recipes = qwen3_5, deepseek_v4
    for recipe in recipes:
        with tempfile.TemporaryDirectory() as folder:
            check_recipe(command, np.random.default_rng(seed), pathlib.Path(folder), recipe)
    tokens = 0
    for index in range(count):
        rng = np.random.default_rng([seed, index])
        model = Model(rng)
        place = (seed, index, model.family.kind, model.layout, model.form, model.dtype)
        with tempfile.TemporaryDirectory() as folder:
            tokens += check(command, model, rng, pathlib.Path(folder), place)
            check_linear(command, rng, pathlib.Path(folder), place)
    what = f"{len(recipes)} recipes, {count} models and {count} linear layers"
    print(f"{what}, {tokens} tokens of models: all outputs are as expected")


if __name__ == "__main__":
    main()
