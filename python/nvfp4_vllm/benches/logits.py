#!/usr/bin/env python3
"""Compares logits with the logits of a bf16 model of the dequantized weights, for this library's kernels and Marlin's.

    logits.py write FOLDER                       writes the models: a few layers of Qwen3-30B-A3B's shape, random weights
    logits.py run FOLDER MODEL CONTENDER         writes logits of a prompt of 1280 tokens to FOLDER
    logits.py invariant FOLDER MODEL             VLLM_BATCH_INVARIANT=1: compares a prompt alone and among fifteen others
    logits.py compare FOLDER                     prints the differences

MODEL is `shared` (projections that engines merge share a global scale) or `separate` (each projection has its own). CONTENDER is `nvfp4`,
`marlin` or `bf16`. Each run is a separate process, and several can run at once.
"""

import json
import os
import pathlib
import sys

from model import EXPERTS, HEAD, HEADS, HIDDEN, INTERMEDIATE, KV_HEADS, engine, keep_logits, kept_logits, loaded, write_config

LAYERS, VOCABULARY, TOKENS = 3, 16384, 1280
PARTNERS = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}


def matrices():
    """Yields name, rows, columns and magnitude of each quantized matrix; magnitudes of merged projections differ by several times."""
    for layer in range(LAYERS):
        block = f"model.layers.{layer}"
        for name, rows, size in (("q", HEADS * HEAD, 1.0), ("k", KV_HEADS * HEAD, 3.0), ("v", KV_HEADS * HEAD, 0.3)):
            yield f"{block}.self_attn.{name}_proj", rows, HIDDEN, size
        yield f"{block}.self_attn.o_proj", HIDDEN, HEADS * HEAD, 1.0
        for expert in range(EXPERTS):
            for name, rows, columns, size in (
                ("gate", INTERMEDIATE, HIDDEN, 1.0), ("up", INTERMEDIATE, HIDDEN, 2.7), ("down", HIDDEN, INTERMEDIATE, 1.0),
            ):  # fmt: skip
                yield f"{block}.mlp.experts.{expert}.{name}_proj", rows, columns, size


def write(folder):
    """Writes the models: quantized with shared and with separate global scales, and both dequantized in bf16."""
    import nvfp4
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    random = lambda *shape: torch.randn(shape, device="cuda") * 0.02
    others = {"model.embed_tokens.weight": random(VOCABULARY, HIDDEN) * 50, "lm_head.weight": random(VOCABULARY, HIDDEN)}
    others["model.norm.weight"] = torch.ones(HIDDEN)
    for layer in range(LAYERS):
        block = f"model.layers.{layer}"
        others[f"{block}.mlp.gate.weight"] = random(EXPERTS, HIDDEN)
        for name, size in (("input_layernorm", HIDDEN), ("post_attention_layernorm", HIDDEN), ("self_attn.q_norm", HEAD), ("self_attn.k_norm", HEAD)):
            others[f"{block}.{name}.weight"] = torch.ones(size)
    others = {name: tensor.bfloat16().cpu() for name, tensor in others.items()}
    numbers, largest = {}, {}
    for name, rows, columns, size in matrices():
        numbers[name] = (random(rows, columns) * size).bfloat16()
        prefix, projection = name.rsplit(".", 1)
        key = f"{prefix}.{PARTNERS.get(projection, projection)}"
        amax = numbers[name].abs().amax().float()
        largest[key] = torch.maximum(largest.get(key, amax), amax)
    for kind in ("shared", "separate"):
        quantized, plain = dict(others), dict(others)
        for name, tensor in numbers.items():
            prefix, projection = name.rsplit(".", 1)
            of_partners = largest[f"{prefix}.{PARTNERS.get(projection, projection)}"] / (6 * 448)
            packed = nvfp4.quantize(tensor, of_partners if kind == "shared" else None)
            for part, value in zip(("weight", "weight_scale", "weight_scale_2"), packed):
                quantized[f"{name}.{part}"] = value.cpu()
            plain[f"{name}.weight"] = nvfp4.dequantize(packed, torch.bfloat16).cpu()
        for model, tensors in ((kind, quantized), (f"{kind}-bf16", plain)):
            (folder / model).mkdir(parents=True)
            write_config(folder / model, LAYERS, VOCABULARY, model == kind)
            save_file(tensors, folder / model / "model.safetensors")


def prompt(count, seed=1):
    import random

    chosen = random.Random(seed)
    return {"prompt_token_ids": [chosen.randrange(10, VOCABULARY) for _ in range(count)]}


def start(folder, model, contender, **options):
    name = f"{model}-bf16" if contender == "bf16" else model
    return engine(
        folder / name, contender, enforce_eager=True, max_model_len=2048, max_num_batched_tokens=4096, kv_cache_memory_bytes=1 << 30,
        gpu_memory_utilization=0.1, enable_prefix_caching=False, **options,
    )  # fmt: skip


def run(folder, model, contender):
    import torch
    from vllm import SamplingParams

    llm = start(folder, model, contender)
    llm.apply_model(keep_logits)
    parameters = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1, detokenize=False)
    llm.generate([prompt(TOKENS)], parameters, use_tqdm=False)
    logits = llm.apply_model(kept_logits)[0]
    assert len(logits) >= 1000, logits.shape
    torch.save(logits, folder / f"{model}-{contender}.pt")
    print(f"{model} {contender}: logits of {len(logits)} tokens, standard deviation {logits.std():.3f}", flush=True)


def invariant(folder, model):
    os.environ["VLLM_BATCH_INVARIANT"] = "1"
    import torch
    from vllm import SamplingParams

    llm = start(folder, model, "nvfp4")
    parameters = SamplingParams(max_tokens=24, temperature=0, logprobs=4, ignore_eos=True, detokenize=False)

    def tokens(output):
        return [(token, [(key, value.logprob) for key, value in of.items()]) for token, of in zip(output.outputs[0].token_ids, output.outputs[0].logprobs)]

    # Each module's output for the prompt's tokens in the prefill, alone and among the others. The scheduler may order prompts differently,
    # so the embedding, which runs first, finds the prompt's place in the batch.
    rows, place, wanted = [], 0, prompt(100)["prompt_token_ids"]

    def keep(name):
        def hook(module, arguments, output):
            nonlocal place
            first = output[0] if isinstance(output, tuple) else output
            if name.endswith("embed_tokens") and len(first) == whole:
                tokens = arguments[0].tolist()
                place = next(start for start in range(whole - 99) if tokens[start : start + 100] == wanted)
            if torch.is_tensor(first) and first.dim() >= 2 and len(first) in (100, whole):
                rows[-1].setdefault(name, first[place : place + 100].clone() if len(first) == whole else first.clone())

        return hook

    others = [prompt(40 + 13 * index, index + 2) for index in range(15)]
    whole = sum(len(other["prompt_token_ids"]) for other in others) + 100
    hooks = [module.register_forward_hook(keep(name)) for name, module in loaded(llm).named_modules()]
    rows.append({})
    alone = tokens(llm.generate([prompt(100)], parameters, use_tqdm=False)[0])
    rows.append({})
    among = tokens(llm.generate([*others[:7], prompt(100), *others[7:]], parameters, use_tqdm=False)[7])
    for hook in hooks:
        hook.remove()
    same = alone == among
    differ = [name for name, value in rows[0].items() if name in rows[1] and not torch.equal(value, rows[1][name])]
    compared = sum(name in rows[1] for name in rows[0])
    found = {"same": same, "tokens": len(alone), "compared": compared, "differ": differ[:12]}
    (folder / "invariant.json").write_text(json.dumps(found) + "\n")
    print(f"batch invariant: {len(alone)} tokens and their log-probabilities are {'the same' if same else 'NOT the same'}", flush=True)
    print(f"of {compared} parts of the model {len(differ)} differ, first {differ[:12]}", flush=True)


def compare(folder):
    import torch

    rows = {}
    for model in ("shared", "separate"):
        want = torch.load(folder / f"{model}-bf16.pt").double()
        for contender in ("nvfp4", "marlin"):
            got = torch.load(folder / f"{model}-{contender}.pt").double()
            # The relative difference, the divergence, and the share of tokens with the same likeliest token.
            relative = ((got - want).norm() / want.norm()).item()
            logs = [logits.log_softmax(-1) for logits in (want, got)]
            divergence = (logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean().item()
            agree = (got.argmax(-1) == want.argmax(-1)).double().mean().item()
            rows[f"{model} {contender}"] = {
                "tokens": len(want), "relative": relative, "kl": divergence, "same_first": agree, "largest": (got - want).abs().max().item()
            }  # fmt: skip
            print(f"{model:8} {contender:6}: relative {relative:.6f}, KL {divergence:.3e}, same first token {agree:.4f}", flush=True)
    if (folder / "invariant.json").exists():
        rows["batch invariant"] = json.loads((folder / "invariant.json").read_text())
    (folder / "logits.json").write_text(json.dumps(rows, indent=1) + "\n")


def main():
    command, folder, *rest = sys.argv[1:]
    {"write": write, "run": run, "invariant": invariant, "compare": compare}[command](pathlib.Path(folder), *rest)


if __name__ == "__main__":
    main()
