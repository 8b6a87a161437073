#!/usr/bin/env python3
"""Checks `nvfp4 quantize` against an independent implementation in numpy that shares no code with it. Needs numpy from PyPI.

    check_quantize.py PATH/TO/nvfp4 [SEED]

Makes small models of every layout in a temporary folder and quantizes them. Every tensor of the result must have the expected
name, type, shape and bytes, and the configurations must be the ones that servers accept. This script finds a code by its
distance to every value of a format; the command computes codes from bits.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
from tensors import E2M1 as CODES
from tensors import E4M3, F32, read, write
from tensors import bf16 as bf16_bits

E2M1 = CODES[:8].astype(np.float64)
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


# Formats.


def nearest(numbers, values):
    """Returns the index of the nearest value. A tie goes to the even index."""
    distance = np.abs(numbers.astype(np.float64)[..., None] - values)
    best = distance.argmin(axis=-1)
    other = np.minimum(best + 1, len(values) - 1)
    tie = (np.take_along_axis(distance, other[..., None], -1)[..., 0] == distance.min(axis=-1)) & (best % 2 == 1)
    return np.where(tie, other, best).astype(np.uint8)


def scale_of(amax):
    """Returns ModelOpt's global scale."""
    return max(F32(amax) / F32(6 * 448), np.finfo(F32).tiny) if amax else F32(1)


def quantized(numbers, factor):
    """Returns packed values and block scales."""
    n, k = numbers.shape
    blocks = numbers.astype(F32).reshape(n, k // 16, 16)
    wanted = np.abs(blocks).max(axis=2) / (F32(6) * factor)
    scales = np.where(wanted == 0, 0x38, np.maximum(nearest(np.minimum(wanted, F32(448)), E4M3), 1)).astype(np.uint8)
    unit = E4M3[scales].astype(F32) * factor
    scaled = blocks / unit[..., None] + F32(0)
    codes = nearest(np.minimum(np.abs(scaled), F32(6)), E2M1) | (np.signbit(scaled).astype(np.uint8) << 3)
    codes = codes.reshape(n, k)
    return codes[:, 0::2] | codes[:, 1::2] << 4, scales


def fp8(codes):
    magnitude = np.append(E4M3, np.nan)[codes & 0x7F].astype(F32)
    return np.where(codes & 0x80, -magnitude, magnitude).astype(F32)


def blocks_of(scales, shape, block):
    """Expands block scales to one scale per element."""
    return scales.repeat(block[0], axis=0)[: shape[0]].repeat(block[1], axis=1)[:, : shape[1]].astype(F32)


def mxfp4(codes, exponents):
    """Dequantizes rows of packed values with one exponent per 32 values."""
    values = np.concatenate([E2M1, -E2M1]).astype(F32)
    numbers = np.stack([values[codes & 15], values[codes >> 4]], axis=-1).reshape(*codes.shape[:-1], -1)
    return (numbers * (2.0 ** (exponents.astype(np.float64) - 127)).repeat(32, axis=-1)).astype(F32)


def largest_exponent(codes, exponents):
    """Returns the largest exponent of the MXFP4 blocks that are not all zeros."""
    used = (codes.reshape(*exponents.shape, 16) & 0x77).any(axis=-1)
    return int(exponents[used].max()) - 127 if used.any() else 8


def cast(codes, exponents, exponent):
    """Returns packed values and block scales with the global scale 2^exponent: MXFP4's own codes, where a scale is E4M3."""
    powers = exponents.astype(int) - 127 - exponent
    exact = ((powers >= -9) & (powers <= 8)) | ~(codes.reshape(*exponents.shape, 16) & 0x77).any(axis=-1)
    values, scales = quantized(mxfp4(codes, exponents), F32(2.0**exponent))
    kept = nearest(2.0 ** np.clip(powers, -9, 8), E4M3)
    scales = np.where(exact.repeat(2, axis=1), kept.repeat(2, axis=1), scales).astype(np.uint8)
    return np.where(exact.repeat(16, axis=1), codes, values), scales


# Files. A tensor is a tuple of type, shape and bytes. A weight is an array of the numbers that it represents.


def tensor(dtype, array):
    array = np.ascontiguousarray(array)
    return dtype, list(array.shape), array.tobytes()


class Model:
    """A model to quantize, and the expected result."""

    def __init__(self, random, config):
        self.random = random
        self.config = config
        self.tensors = {}
        self.weights = {}  # weights to quantize: module -> numbers
        self.mxfp4s = {}  # weights that are MXFP4: module -> packed values and exponents
        self.widened = {}  # weights to convert to bf16: module -> numbers
        self.expected = {}  # tensors that are copied, or cut out of other tensors
        self.ignored = ["lm_head"]
        self.together = []  # lists of modules that share a global scale

    def floats(self, *shape):
        signs = self.random.choice(F32([-1, 1]), size=shape)
        return (np.ldexp(1 + self.random.random_sample(shape), self.random.randint(-9, -2, size=shape)) * signs).astype(F32)

    def stored(self, dtype, numbers):
        """Returns a tensor of floats, and the numbers that it holds."""
        if dtype == "BF16":
            bits = bf16_bits(numbers)
            return tensor(dtype, bits), (bits.astype(np.uint32) << 16).view(F32)
        numbers = numbers.astype(np.float16 if dtype == "F16" else F32)
        return tensor(dtype, numbers), numbers.astype(F32)

    def linear(self, module, n, k, dtype="BF16", chosen=True, listed=True):
        self.tensors[f"{module}.weight"], numbers = self.stored(dtype, self.floats(n, k))
        if chosen:
            self.weights[module] = numbers
        else:
            self.keep(f"{module}.weight")
            if listed:
                self.ignored.append(module)

    def keep(self, name, value=None):
        if value is not None:
            self.tensors[name] = value
        self.expected[name] = self.tensors[name]

    def vector(self, name, n):
        self.keep(name, self.stored("BF16", self.floats(n))[0])

    def fp8(self, module, n, k, form, chosen=True):
        codes = self.random.randint(0, 0x7F, size=(n, k)).astype(np.uint8) | self.random.choice([0, 0x80], (n, k)).astype(np.uint8)
        self.tensors[f"{module}.weight"] = tensor("F8_E4M3", codes)
        grid, block, suffix = {
            "blocks": ((-(-n // 128), -(-k // 128)), (128, 128), "weight_scale_inv"),
            "rows": ((n, 1), (1, k), "weight_scale"),
            "one": ((1, 1), (n, k), "weight_scale"),
            "powers": ((-(-n // 128), -(-k // 128)), (128, 128), "scale"),
        }[form]
        if form == "powers":
            exponents = self.random.randint(110, 125, size=grid).astype(np.uint8)
            self.tensors[f"{module}.{suffix}"] = tensor("F8_E8M0", exponents)
            scales = (2.0 ** (exponents.astype(np.float64) - 127)).astype(F32)
        else:
            scales = np.abs(self.floats(*grid))
            self.tensors[f"{module}.{suffix}"] = tensor("F32", scales if form != "one" else scales.reshape([]))
        numbers = fp8(codes) * blocks_of(scales, (n, k), block)
        self.take(module, numbers, chosen)

    def take(self, module, numbers, chosen):
        (self.weights if chosen else self.widened)[module] = numbers
        if not chosen:
            self.ignored.append(module)

    def mxfp4_codes(self, *shape, exponents=(112, 124)):
        codes = self.random.randint(0, 256, size=(*shape[:-1], shape[-1] // 2)).astype(np.uint8)
        exponents = self.random.randint(*exponents, size=(*shape[:-1], shape[-1] // 32)).astype(np.uint8)
        return codes, exponents

    def experts(self, block, hidden, inner, count, layout, interleaved=False, biases=False, dtype="BF16", chosen=True):
        """Adds a layer's experts in two fused tensors."""
        for name, n, k in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
            base = f"{block}.experts.{name}"
            if layout == "mxfp4":
                codes, exponents = self.mxfp4_codes(count, n, k)
                self.tensors[f"{base}_blocks"] = tensor("U8", codes.reshape(count, n, k // 32, 16))
                self.tensors[f"{base}_scales"] = tensor("U8", exponents)
                matrices = mxfp4(codes, exponents)
            elif layout == "fp8":
                codes = self.random.randint(0, 0x7F, size=(count, k, n)).astype(np.uint8)
                scales = np.abs(self.floats(count, -(-k // 128), -(-n // 128)))
                self.tensors[base] = tensor("F8_E4M3", codes)
                self.tensors[f"{base}_scale_inv"] = tensor("F32", scales)
                stored = [fp8(c) * blocks_of(s, (k, n), (128, 128)) for c, s in zip(codes, scales)]
                matrices = np.stack(stored).transpose(0, 2, 1)
            else:
                shape = (count, k, n) if layout == "transposed" else (count, n, k)
                self.tensors[base], numbers = self.stored(dtype, self.floats(*shape))
                matrices = numbers.transpose(0, 2, 1) if layout == "transposed" else numbers
            bias = None
            if biases:
                bias = self.random.randint(0, 1 << 16, size=(count, n)).astype(np.uint16)
                self.tensors[f"{base}_bias"] = tensor("BF16", bias)
            if not chosen:
                for part in ("", "_bias"):
                    if base + part in self.tensors:
                        self.keep(base + part)
                continue
            for expert in range(count):
                parts = {name: slice(None)}
                if name == "gate_up_proj":
                    halves = (slice(0, inner), slice(inner, None))
                    parts = dict(zip(PROJECTIONS, (slice(0, None, 2), slice(1, None, 2)) if interleaved else halves))
                for projection, rows in parts.items():
                    module = f"{block}.experts.{expert}.{projection}"
                    self.weights[module] = np.ascontiguousarray(matrices[expert][rows])
                    if layout == "mxfp4":
                        self.mxfp4s[module] = codes[expert][rows], exponents[expert][rows]
                    if bias is not None:
                        self.expected[f"{module}.bias"] = tensor("BF16", bias[expert][rows])
                if len(parts) == 2:
                    self.together.append([f"{block}.experts.{expert}.{p}" for p in parts])
        if not chosen:
            self.ignored.append(f"{block}.experts")

    def mlp(self, block, hidden, inner, **how):
        for name, n, k in zip(PROJECTIONS, (inner, inner, hidden), (hidden, hidden, inner)):
            self.linear(f"{block}.{name}", n, k, **how)
        if how.get("chosen", True):
            self.together.append([f"{block}.gate_proj", f"{block}.up_proj"])

    # The result.

    def result(self, form, separate, inputs):
        result = dict(self.expected)
        for module, numbers in self.widened.items():
            result[f"{module}.weight"] = tensor("BF16", bf16_bits(numbers))
        group_of = {} if separate else {module: group for group in self.together for module in group}
        for module, numbers in self.weights.items():
            members = group_of.get(module, [module])
            stored = scale_of(max(np.abs(self.weights[m]).max() for m in members))
            exponent = None
            if all(m in self.mxfp4s for m in members):
                exponent = max(largest_exponent(*self.mxfp4s[m]) for m in members) - 8
                stored = F32(2.0**exponent)
            input_scale = scale_of(max(inputs[m] for m in members)) if inputs else None
            if form == "modelopt":
                values, factor, shape = ".weight", stored, []
                names = (".weight_scale_2", ".input_scale")
            else:
                stored = F32(1) / stored
                input_scale = input_scale and F32(1) / input_scale
                values, factor, shape = ".weight_packed", F32(1) / stored, [1]
                names = (".weight_global_scale", ".input_global_scale")
            packed, scales = quantized(numbers, factor) if exponent is None else cast(*self.mxfp4s[module], exponent)
            result[module + values] = tensor("U8", packed)
            result[f"{module}.weight_scale"] = tensor("F8_E4M3", scales)
            for name, number in zip(names, (stored, input_scale)):
                if number is not None:
                    result[module + name] = ("F32", shape, F32(number).tobytes())
        return result

    def quantization(self, form, inputs, ignored):
        producer = {"name": "nvfp4", "version": ignored["version"]}
        if form == "modelopt":
            arguments = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
            return {
                "quant_method": "modelopt",
                "quant_algo": "NVFP4" if inputs else "W4A16_NVFP4",
                "group_size": 16,
                "producer": producer,
                "config_groups": {
                    "group_0": {"targets": ["Linear"], "weights": arguments, "input_activations": arguments if inputs else None}
                },
                "ignore": ignored["names"],
            }
        arguments = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
        return {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "quantization_status": "compressed",
            "kv_cache_scheme": None,
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "format": "nvfp4-pack-quantized",
                    "weights": {**arguments, "dynamic": False},
                    "input_activations": {**arguments, "dynamic": "local"} if inputs else None,
                    "output_activations": None,
                }
            },
            "ignore": ignored["names"],
        }


# Models.


def dense(random):
    """Attention and MLP in three types. Projections that engines merge share global scales."""
    model = Model(random, {"model_type": "llama", "hidden_size": 64})
    model.linear("model.embed_tokens", 32, 64, chosen=False, listed=False)
    model.linear("lm_head", 32, 64, chosen=False)
    for layer, dtype in enumerate(["BF16", "F16", "F32"]):
        p = f"model.layers.{layer}"
        model.mlp(f"{p}.mlp", 64, 48, dtype=dtype)
        for name, n in (("q_proj", 64), ("k_proj", 16), ("v_proj", 16)):
            model.linear(f"{p}.self_attn.{name}", n, 64, dtype=dtype)
        model.together.append([f"{p}.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj")])
        model.linear(f"{p}.self_attn.o_proj", 64, 64, dtype=dtype)
        model.vector(f"{p}.input_layernorm.weight", 64)
    return model, ["--include", r"\.weight$"]


def llama4(random):
    config = {"model_type": "llama4", "text_config": {"model_type": "llama4_text", "hidden_size": 32}}
    model = Model(random, config)
    p = "language_model.model.layers.0"
    model.experts(f"{p}.feed_forward", 32, 48, 3, "transposed")
    model.mlp(f"{p}.feed_forward.shared_expert", 32, 48)
    model.linear(f"{p}.feed_forward.router", 8, 32, chosen=False)
    model.linear(f"{p}.self_attn.o_proj", 32, 32, chosen=False)
    model.linear("vision_model.model.layers.0.mlp.fc1", 16, 16, chosen=False)
    model.linear("vision_model.model.layers.1.mlp.gate_proj", 16, 16, chosen=False)
    return model, []


def gpt_oss(random):
    model = Model(random, {"model_type": "gpt_oss", "hidden_size": 64, "torch_dtype": "bfloat16"})
    p = "model.layers.3"
    model.experts(f"{p}.mlp", 64, 96, 2, "transposed", interleaved=True, biases=True)
    model.linear(f"{p}.mlp.router", 8, 64, chosen=False)
    model.vector(f"{p}.mlp.router.bias", 8)
    return model, []


def gpt_oss_mxfp4(random):
    description = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    model = Model(random, {"model_type": "gpt_oss", "hidden_size": 64, "quantization_config": description})
    p = "model.layers.3"
    model.experts(f"{p}.mlp", 64, 96, 2, "mxfp4", interleaved=True, biases=True)
    model.vector(f"{p}.self_attn.sinks", 8)
    return model, []


def qwen3_vl(random):
    model = Model(random, {"model_type": "qwen3_vl_moe", "text_config": {"hidden_size": 32}})
    p = "model.language_model.layers"
    model.experts(f"{p}.0.mlp", 32, 16, 2, "transposed")
    model.experts(f"{p}.10.mlp", 32, 16, 2, "transposed", dtype="F32")
    model.experts(f"{p}.9.mlp", 32, 16, 2, "fp8")
    model.linear(f"{p}.0.mlp.gate", 8, 32, chosen=False)
    model.linear("model.visual.blocks.0.mlp.up_proj", 16, 16, chosen=False)
    return model, []


def transformers5(random):
    """Experts in two tensors, each matrix in the layout of a linear layer. No configuration."""
    model = Model(random, None)
    model.experts("model.layers.0.mlp", 32, 64, 2, "straight")
    model.experts("model.layers.1.mlp", 64, 32, 2, "straight", chosen=False)
    return model, ["--exclude", "model.layers.1.*"]


def deepseek(random):
    description = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 2, "num_nextn_predict_layers": 1, "quantization_config": description}
    model = Model(random, config)
    hidden, inner = 272, 144
    for layer in range(3):
        p, own = f"model.layers.{layer}", layer < 2
        for name, n, k in zip(PROJECTIONS, (inner, inner, hidden), (hidden, hidden, inner)):
            for expert in range(2):
                model.fp8(f"{p}.mlp.experts.{expert}.{name}", n, k, "blocks", chosen=own)
            model.fp8(f"{p}.mlp.shared_experts.{name}", n, k, "blocks", chosen=own)
        if own:
            for block in ("experts.0", "experts.1", "shared_experts"):
                model.together.append([f"{p}.mlp.{block}.gate_proj", f"{p}.mlp.{block}.up_proj"])
        model.fp8(f"{p}.self_attn.q_a_proj", 64, hidden, "blocks", chosen=False)
        model.fp8(f"{p}.self_attn.kv_a_proj_with_mqa", 72, hidden, "blocks", chosen=False)
        model.linear(f"{p}.mlp.gate", 8, hidden, chosen=False)
        model.keep(f"{p}.mlp.gate.e_score_correction_bias", tensor("F32", model.floats(8)))
    model.linear("model.layers.2.eh_proj", 16, 32, chosen=False)
    return model, []


def other_fp8(random):
    """FP8 with a scale per row, a scale per tensor, and power-of-two scales. q_a and kv_a share a global scale."""
    model = Model(random, {"model_type": "x"})
    p = "model.layers.0"
    model.fp8(f"{p}.mlp.down_proj", 48, 32, "rows")
    model.fp8(f"{p}.self_attn.o_proj", 48, 32, "one")
    model.tensors[f"{p}.self_attn.o_proj.input_scale"] = tensor("F32", F32(0.5))
    model.fp8(f"{p}.self_attn.q_a_proj", 144, 160, "powers")
    model.fp8(f"{p}.self_attn.kv_a_proj_with_mqa", 16, 160, "rows")
    model.together.append([f"{p}.self_attn.{name}" for name in ("q_a_proj", "kv_a_proj_with_mqa")])
    return model, ["--include", "proj"]


def mxfp4_apart(random):
    """MXFP4 under the names of DeepSeek-V4, Quark and compressed-tensors."""
    model = Model(random, None)
    names = (("weight", "scale", "I8", "F8_E8M0"), ("weight", "weight_scale", "U8", "U8"), ("weight_packed", "weight_scale", "U8", "U8"))
    for layer, (values, scales, dtype, scale_dtype) in enumerate(names):
        for name in ("w1", "w2", "w3"):
            module = f"layers.{layer}.ffn.experts.0.{name}"
            # Exponents of the last model span more than a global scale covers.
            codes, exponents = model.mxfp4_codes(32, 64, exponents=(112, 124) if layer < 2 else (100, 124))
            model.tensors[f"{module}.{values}"] = tensor(dtype, codes)
            model.tensors[f"{module}.{scales}"] = tensor(scale_dtype, exponents)
            model.weights[module] = mxfp4(codes, exponents)
            model.mxfp4s[module] = codes, exponents
        model.together.append([f"layers.{layer}.ffn.experts.0.{name}" for name in ("w1", "w3")])
    return model, []


def fused_partners(random):
    """Excluding one of q, k and v, or one expert, also excludes the others."""
    model = Model(random, {"model_type": "qwen3_moe"})
    p = "model.layers.1"
    for name in ("q_proj", "k_proj", "v_proj"):
        model.linear(f"{p}.self_attn.{name}", 16, 32, chosen=False)
    for expert in range(2):
        model.mlp(f"{p}.mlp.experts.{expert}", 32, 16, chosen=False)
    model.ignored.sort(key=natural)
    model.mlp(f"{p}.mlp.shared_expert", 32, 16)
    # The name of this router is part of the name of a quantized module.
    model.mlp("model.layers.2.mlp", 32, 16)
    model.linear("model.layers.2.mlp.gate", 8, 32, chosen=False)
    model.hidden = "model.layers.2.mlp.gate"
    arguments = ["--include", "proj", "--exclude", f"{p}.self_attn.k_proj", "--exclude", "re:.*experts[.]1[.]up_proj"]
    return model, arguments


def granite(random):
    """Stacked linear layers, and a shared linear layer that stays one matrix."""
    model = Model(random, {"model_type": "granitemoeshared", "hidden_size": 32})
    p = "model.layers.0"
    model.tensors[f"{p}.block_sparse_moe.input_linear.weight"], up = model.stored("BF16", model.floats(2, 96, 32))
    model.tensors[f"{p}.block_sparse_moe.output_linear.weight"], down = model.stored("BF16", model.floats(2, 32, 48))
    for expert in range(2):
        block = f"{p}.block_sparse_moe.experts.{expert}"
        model.weights |= {f"{block}.w1": up[expert][:48], f"{block}.w3": up[expert][48:], f"{block}.w2": down[expert]}
        model.together.append([f"{block}.w1", f"{block}.w3"])
    model.linear(f"{p}.shared_mlp.input_linear", 64, 32)
    model.linear(f"{p}.block_sparse_moe.router.layer", 8, 32, chosen=False)
    return model, []


def step3(random):
    """One tensor per projection for all experts. Only the configuration shows which dimension is the input."""
    model = Model(random, {"model_type": "step3", "text_config": {"hidden_size": 64}})
    p = "model.layers.0.moe"
    for name, n, k in zip(PROJECTIONS, (48, 48, 64), (64, 64, 48)):
        model.tensors[f"{p}.{name}.weight"], numbers = model.stored("BF16", model.floats(2, n, k))
        for expert in range(2):
            model.weights[f"{p}.experts.{expert}.{name}"] = numbers[expert]
    model.together += [[f"{p}.experts.{e}.{name}" for name in PROJECTIONS[:2]] for e in range(2)]
    return model, []


def natural(name):
    parts, digits = [], ""
    for letter in name + "\0":
        if letter.isdigit():
            digits += letter
            continue
        if digits:
            parts.append((0, int(digits), ""))
            digits = ""
        parts.append((1, 0, letter))
    return parts


MODELS = [
    dense, llama4, gpt_oss, gpt_oss_mxfp4, qwen3_vl, transformers5, deepseek, other_fp8, mxfp4_apart, fused_partners,
    granite, step3,
]  # fmt: skip


def check(command, model, arguments, folder, form, separate, calibrated, shards):
    source, target = folder / "in", folder / "out"
    source.mkdir()
    items = list(model.tensors.items())
    model.random.shuffle(items)
    for shard in range(shards):
        write(source / f"model-{shard + 1:05}-of-{shards:05}.safetensors", dict(items[shard::shards]))
    if shards > 1:
        weight_map = {name: f"model-{at % shards + 1:05}-of-{shards:05}.safetensors" for at, (name, _) in enumerate(items)}
        (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    if model.config is not None:
        (source / "config.json").write_text(json.dumps(model.config))
    small = {"tokenizer.json": b"{}\n", "generation_config.json": b"[1]", "chat_template.jinja": b"x", "LICENSE": b"y"}
    for name, data in small.items():
        (source / name).write_bytes(data)
    (source / "pytorch_model.bin").write_bytes(b"z")
    inputs = {}
    line = [command, "quantize", source, target, "--format", form, *arguments, *(["--separate-scales"] if separate else [])]
    if calibrated:
        inputs = {module: F32(model.random.random_sample() * 9 + 1) for module in model.weights}
        if calibrated == "json":
            (folder / "amax.json").write_text(json.dumps({module: float(amax) for module, amax in inputs.items()}))
        else:
            tokens = {}
            for module, amax in inputs.items():
                k = model.weights[module].shape[1]
                numbers = (model.random.random_sample((3, k)) * 0.5).astype(F32)
                numbers[1, k // 2] = -amax
                tokens[module] = tensor("F32", numbers)
            write(folder / "amax.safetensors", tokens)
        line += ["--calibrate", folder / f"amax.{calibrated}"]
    done = subprocess.run([*line, "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)

    got = {}
    for path in target.glob("*.safetensors"):
        got.update(read(path))
    expected = model.result(form, separate, inputs)
    assert got.keys() == expected.keys(), (sorted(got.keys() - expected.keys()), sorted(expected.keys() - got.keys()))
    for name in expected:
        assert got[name][:2] == expected[name][:2], (name, got[name][:2], expected[name][:2])
        assert got[name][2] == expected[name][2], f"bytes of {name}"
    assert {entry["module"] for entry in report["quantised"]} == model.weights.keys()
    assert {entry["module"] for entry in report["dequantised"]} == model.widened.keys()
    if shards > 1:
        index = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
        assert index.keys() == expected.keys()

    for name, data in small.items():
        assert (target / name).read_bytes() == data, name
    assert not (target / "pytorch_model.bin").exists()
    config = json.loads((target / "config.json").read_text())
    description = config.pop("quantization_config")
    names = sorted(set(model.ignored), key=natural)
    if form == "modelopt" and hasattr(model, "hidden"):
        names[names.index(model.hidden)] = model.hidden[:-1] + f"[{model.hidden[-1]}]"
    if form != "modelopt":
        names = sorted(names + [f"re:{n}\\..*".replace(".", "\\.").replace("\\\\.\\.", "\\..") for n in names if n.endswith(".experts")], key=natural)
    version = subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout.split()[1]
    assert description == model.quantization(form, inputs, {"names": names, "version": version}), description
    assert list(description) == list(model.quantization(form, inputs, {"names": names, "version": version}))
    before = {key: value for key, value in (model.config or {}).items() if key != "quantization_config"}
    assert config == before
    other = target / "hf_quant_config.json"
    assert other.exists() == (form == "modelopt")
    if other.exists():
        algorithm = "NVFP4" if inputs else "W4A16_NVFP4"
        quantization = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": names}
        producer = {"name": "nvfp4", "version": version}
        assert json.loads(other.read_text()) == {"producer": producer, "quantization": quantization}
    return len(expected)


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    command = pathlib.Path(sys.argv[1]).resolve()
    seed = int(sys.argv[2]) if len(sys.argv) == 3 else 1
    count = tensors = 0
    for make in MODELS:
        for form in ("modelopt", "compressed-tensors"):
            for separate, calibrated, shards in ((False, None, 1), (False, "json", 3), (True, "safetensors", 2)):
                if separate and make is fused_partners:
                    continue
                random = np.random.RandomState(seed + count)
                model, arguments = make(random)
                with tempfile.TemporaryDirectory() as folder:
                    tensors += check(command, model, arguments, pathlib.Path(folder), form, separate, calibrated, shards)
                count += 1
    print(f"{count} models, {tensors} tensors: all bytes are as expected")


if __name__ == "__main__":
    main()
