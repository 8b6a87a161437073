"""Writes a small random model in bf16, so that the book's commands on `model/` run in a test."""

import array
import json
import pathlib
import random
import struct

HIDDEN, INTERMEDIATE, EXPERTS, LAYERS, VOCABULARY = 64, 32, 4, 4, 128
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "moe_intermediate_size": INTERMEDIATE,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}


def shapes() -> dict[str, tuple[int, ...]]:
    """Returns the shape of each tensor."""
    found = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "lm_head.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        found |= {f"{prefix}.{norm}_layernorm.weight": (HIDDEN,) for norm in ("input", "post_attention")}
        found |= {f"{prefix}.self_attn.{name}_proj.weight": (rows, HIDDEN) for name, rows in (("q", 64), ("k", 32), ("v", 32), ("o", 64))}
        found |= {f"{prefix}.self_attn.{name}_norm.weight": (16,) for name in ("q", "k")}
        found[f"{prefix}.mlp.gate.weight"] = (EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            for name, shape in (("gate", (INTERMEDIATE, HIDDEN)), ("up", (INTERMEDIATE, HIDDEN)), ("down", (HIDDEN, INTERMEDIATE))):
                found[f"{prefix}.mlp.experts.{expert}.{name}_proj.weight"] = shape
    return found


def bf16(numbers: list[float]) -> bytes:
    """Returns numbers as bf16, cut."""
    words = array.array("H", array.array("f", numbers).tobytes())
    return words[1::2].tobytes()


def write_tensors(path: pathlib.Path, of: dict[str, tuple[int, ...]], seed: int = 0) -> None:
    """Writes a safetensors file of random numbers in bf16."""
    generator, header, parts, at = random.Random(seed), {}, [], 0
    for name, shape in of.items():
        count = 1
        for size in shape:
            count *= size
        data = bf16([1.0] * count if "norm" in name else [generator.gauss(0, 0.1) for _ in range(count)])
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + len(data)]}
        parts.append(data)
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))


def write_model(folder: pathlib.Path) -> None:
    """Writes a model's folder."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")
    write_tensors(folder / "model.safetensors", shapes())
