#!/usr/bin/env python3
"""Runs the plugin in the real SGLang on a machine without a GPU: registration, configuration, selection, loading, packing, computing.

    on_the_cpu.py            all cases
    on_the_cpu.py CASE...    some cases

Needs an environment with SGLang, `nvfp4` and `nvfp4_sglang`; `engine.py` makes one. SGLang's own layers are created and loaded, and their
calls are compared with the reference. Each case runs in a process of its own, a fork of one that has imported SGLang.
"""

import functools
import logging
import os
import pathlib
import sys
import tempfile
import traceback
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "python" / "nvfp4" / "tests"))

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, HEAD = 64, 48, 4, 2, 16
EXCLUDED = ["lm_head", "model.layers.0.mlp.gate"]


def modelopt(algorithm="W4A16_NVFP4", excluded=()):
    modules = EXCLUDED + list(excluded)
    return "modelopt_fp4", {"quant_method": "modelopt", "quant_algo": algorithm, "group_size": 16, "ignore": modules, "exclude_modules": modules}


def mixed():
    names = ["model.layers.0.mlp.experts"]
    layers = {name: {"quant_algo": "W4A16_NVFP4", "group_size": 16} for name in names}
    return "modelopt_mixed", {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "exclude_modules": EXCLUDED}


def compressed_tensors(inputs, excluded=()):
    numbers = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    group = {"targets": ["Linear"], "format": "nvfp4-pack-quantized", "weights": numbers | {"dynamic": False}}
    group |= {"input_activations": numbers | {"dynamic": "local"} if inputs else None, "output_activations": None}
    description = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "quantization_status": "compressed"}
    description |= {"kv_cache_scheme": None, "config_groups": {"group_0": group}, "ignore": EXCLUDED + list(excluded)}
    return "compressed-tensors", description


ATTENTION = "model.layers.0.self_attn.qkv_proj"
PARTS = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
OF_EXPERTS, OF_LINEAR = "Nvfp4Experts", {"NVFP4": "Nvfp4Linear", "W4A16_NVFP4": "Nvfp4A16Linear"}
OF_TENSORS, SCHEME, PLAIN = "Nvfp4ExpertsScheme", "Nvfp4Scheme", "UnquantizedLinearMethod"


class Case(NamedTuple):
    """A layer of experts and a fused linear layer, and what must become of them."""

    quantization: tuple = modelopt()
    experts: str = OF_EXPERTS
    """Expected class of the experts' method or scheme; empty if they are left to SGLang, which has no kernel on a CPU."""
    linear: str = "Nvfp4A16Linear"
    """The same for the projections of attention."""
    layer: dict = {}
    """Arguments of SGLang's layer of experts."""
    server: dict = {}
    """SGLang's arguments."""
    environment: dict = {}
    change: object = None
    """A function that changes SGLang before the plugin is registered."""
    says: str = ""
    """Part of a message of the plugin."""
    error: str = ""
    """Part of the error with which creating a layer ends."""


def newer():
    import sglang

    sglang.__version__ = "0.9.0"


def changed():
    """A version whose schemes take one more argument."""
    from sglang.srt.layers.quantization.compressed_tensors.schemes import compressed_tensors_w4a16_nvfp4 as module

    newer()
    old = module.CompressedTensorsW4A16Fp4.apply_weights
    module.CompressedTensorsW4A16Fp4.apply_weights = lambda self, layer, x, bias, more: old(self, layer, x, bias)


def vanished():
    """A version without a module that the plugin imports."""
    newer()
    sys.modules["sglang.srt.layers.moe.token_dispatcher.standard"] = None


def unforeseen():
    """A version that differs where nothing looks beforehand."""
    from nvfp4_sglang import configs

    newer()

    def fail(*arguments):
        raise AttributeError("no such attribute")

    configs.methods.check = fail


def unproven():
    """A GPU whose kernels have no verdict yet."""
    import nvfp4

    def refuse(*arguments, **named):
        raise nvfp4.Error("moe_sm100 has not proved itself on this card: `nvfp4 selftest` lets it, once")

    nvfp4.Moe = refuse


MARLIN = {"moe_runner_backend": "marlin", "fp4_gemm_runner_backend": "marlin"}
REQUIRE = {"NVFP4_SGLANG_REQUIRE": "1"}
FP8 = {"NVFP4_SGLANG_OPTIONS": '{"experts": "fp8", "linear": "fp8"}'}
GPT_OSS = {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}
CASES = {
    "modelopt W4A4": Case(modelopt("NVFP4"), linear="Nvfp4Linear", says="computed by nvfp4, 16-bit tokens: experts"),
    "modelopt W4A16": Case(),
    "modelopt mixed": Case(mixed(), linear=PLAIN),
    "compressed-tensors W4A4": Case(compressed_tensors(True), OF_TENSORS, SCHEME),
    "compressed-tensors W4A16": Case(compressed_tensors(False), OF_TENSORS, SCHEME),
    "excluded attention": Case(modelopt(excluded=PARTS), linear=PLAIN),
    # What the user configures.
    "marlin by the user's choice": Case(experts="", linear="", server=MARLIN, says="model.layers.0.mlp.experts: --moe-runner-backend marlin"),
    "nothing may be left": Case(server=MARLIN, environment=REQUIRE, error="NVFP4_SGLANG_REQUIRE=1 makes this an error"),
    "all served where that is required": Case(environment=REQUIRE),
    "intermediate size that ranks cannot share": Case(
        layer={"intermediate_size": 40}, error="mlp.experts: tensor parallelism leaves an intermediate size of 40 per rank"
    ),
    # What the library has.
    "routed scaling factor": Case(layer={"routed_scaling_factor": 2.5}),
    "routed scaling factor, compressed-tensors": Case(compressed_tensors(True), OF_TENSORS, SCHEME, layer={"routed_scaling_factor": 2.5}),
    "clamped SwiGLU": Case(layer={"swiglu_limit": 0.5}),
    "gelu": Case(layer={"activation": "gelu"}),
    "gelu, tanh": Case(layer={"activation": "gelu_tanh"}),
    "SwiGLU-step": Case(layer={"gemm1_clamp_limit": 0.5}),
    "SiTU": Case(layer={"activation": "situ"}),
    "SiTU, both numbers": Case(layer={"activation": "situ", "gemm1_alpha": 0.5, "gemm1_clamp_limit": 0.25}),
    "gpt-oss": Case(layer=GPT_OSS),
    "gpt-oss, halves": Case(layer=GPT_OSS | {"gate_up_interleaved": False}),
    "ReLU² without a gate": Case(layer={"activation": "relu2", "is_gated": False}),
    "ReLU² without a gate, compressed-tensors": Case(
        compressed_tensors(False), OF_TENSORS, SCHEME, layer={"activation": "relu2", "is_gated": False}
    ),
    "weights on the input": Case(layer={"apply_router_weight_on_input": True, "top_k": 1}),
    "activation that only SGLang has": Case(experts="", layer={"activation": "silu", "is_gated": False}, says="the activation silu with"),
    "two limits": Case(experts="", layer={"gemm1_clamp_limit": 7.0, "swiglu_limit": 7.0}, says="is not one of nvfp4's"),
    "biases": Case(experts="", layer={"with_bias": True}, says="SGLang has no parameters for biases"),
    # Token formats.
    "fp8 tokens": Case(environment=FP8, says="computed by nvfp4, fp8 tokens: linear layers"),
    "fp8 tokens from 4 tokens on": Case(
        environment={"NVFP4_SGLANG_OPTIONS": '{"experts": "fp8", "linear": "fp8", "from_tokens": 4}'}, says="fp8 tokens from 4 tokens on, else 16-bit"
    ),
    "nvfp4 tokens": Case(
        modelopt("NVFP4"), linear="Nvfp4Linear", environment={"NVFP4_SGLANG_OPTIONS": '{"experts": "nvfp4", "linear": "nvfp4"}'}
    ),
    "unknown option": Case(environment={"NVFP4_SGLANG_OPTIONS": '{"expert": "fp8"}'}, error="unknown key 'expert'"),
    # Other GPUs and other versions.
    "GPU without a verdict": Case(experts="", change=unproven, says="has not proved itself on this card"),
    "newer version": Case(change=newer, says="was not tested with SGLang 0.9.0"),
    "newer version with other seams": Case(experts="", linear="", change=changed, says="SGLang's own kernels serve all NVFP4 layers"),
    "newer version with other seams, required": Case(environment=REQUIRE, change=changed, error="nvfp4_sglang is not used"),
    "newer version without a module": Case(experts="", linear="", change=vanished, says="SGLang's own kernels serve all NVFP4 layers"),
    "newer version that differs unforeseen": Case(
        experts="", linear="", change=unforeseen, says="model.layers.0.mlp.experts and all later NVFP4 layers"
    ),
}


class Messages(logging.Handler):
    """The plugin's messages."""

    def __init__(self):
        super().__init__()
        self.messages = []
        logger = logging.getLogger("sglang.nvfp4")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record):
        self.messages.append(record.getMessage())


def run(case):
    """Creates the layers, and checks the classes, the messages and the numbers."""
    os.environ.update(case.environment)
    import torch
    from sglang.srt.layers import quantization
    from sglang.srt.layers.linear import QKVParallelLinear
    from sglang.srt.plugins import load_plugins

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    said = Messages()
    if case.change is not None:
        case.change()
    try:
        load_plugins()  # finds the plugin by its entry point
    except SystemExit as ended:
        assert case.error and case.error in str(ended), ended
        return
    start(case.server)
    name, description = case.quantization
    config = quantization.get_quantization_config(name).from_config(description)
    # SGLang gives models' rules for fused layers to the configuration.
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def linear():
        return QKVParallelLinear(HIDDEN, HEAD, 4, 2, bias=False, quant_config=config, prefix=ATTENTION, parallel_group="replicated")

    try:
        experts = created(functools.partial(make_experts, config, case.layer), case.experts, case)
        attention = created(linear, case.linear, case)
    except ValueError as error:
        assert case.error and case.error in str(error), error
        return
    assert not case.error, "no error"
    assert any(case.says in message for message in said.messages), said.messages
    if experts is not None:
        compute(experts, case, name)
    if attention is not None and case.linear != PLAIN:
        compute_linear(attention, name)


def start(options):
    """Does what SGLang does before it creates a model: publishes the configuration, and starts the groups of ranks."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.moe import utils
    from sglang.srt.layers.quantization import fp4_utils
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    publish(ServerArgs(model_path="dummy", **options), role="test", ranks=SpawnRanks(world_rank=0))
    parallel_state.init_distributed_environment(
        world_size=1, rank=0, local_rank=0, backend="gloo", distributed_init_method=f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}"
    )
    parallel_state.initialize_model_parallel(backend="gloo")
    utils.initialize_moe_config()
    fp4_utils.initialize_fp4_gemm_config()


def created(make, expected, case):
    """Creates a layer. Returns `None` if it is left to SGLang, whose kernels refuse a CPU."""
    try:
        layer = make()
    except Exception as error:
        if expected or case.error:
            raise
        assert not type(error).__module__.startswith("nvfp4"), error
        return None
    method = getattr(layer, "scheme", None) or layer.quant_method
    ours = type(method).__module__.startswith("nvfp4_sglang.")
    assert bool(expected) == ours or expected == PLAIN and not ours, type(method)
    assert not expected or type(method).__qualname__ == expected, type(method)
    return layer if expected else None


def make_experts(config, arguments):
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE

    usual = {"num_experts": EXPERTS, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "layer_id": 0, "top_k": TOP_K}
    return FusedMoE(**usual | {"quant_config": config, "prefix": "model.layers.0.mlp.experts"} | arguments)


def quantized(rows, columns, size, of_tensors):
    """Returns a random matrix, and its tensors in a checkpoint."""
    import nvfp4
    import torch

    matrix = nvfp4.quantize(torch.randn(rows, columns, dtype=torch.float32) * size)
    one = torch.tensor(1.0 / 448, dtype=torch.float32)
    if not of_tensors:
        return matrix, {"weight": matrix.values, "weight_scale": matrix.scales, "weight_scale_2": matrix.global_scale, "input_scale": one}
    divisor = 1 / matrix.global_scale
    matrix = matrix._replace(global_scale=1.0 / divisor)
    parts = {"weight_packed": matrix.values, "weight_scale": matrix.scales, "weight_global_scale": divisor.reshape(1)}
    return matrix, parts | {"input_global_scale": one.reshape(1)}


def compute(layer, case, name):
    """Loads and packs a layer of experts, and compares the output of SGLang's layer with the reference."""
    import nvfp4
    import numpy as np
    import reference
    import torch
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    parameters, found = dict(layer.named_parameters()), {}
    is_gated = layer.moe_runner_config.is_gated
    shards = {"gate": "w1", "up": "w3", "down": "w2"} if is_gated else {"up": "w1", "down": "w2"}
    for projection, shard in shards.items():
        for expert in range(EXPERTS):
            rows, columns = (HIDDEN, INTERMEDIATE) if projection == "down" else (INTERMEDIATE, HIDDEN)
            size = (1 + expert) * (2 if projection == "up" else 1) / 8
            matrix, parts = quantized(rows, columns, size, name == "compressed-tensors")
            found.setdefault(projection, []).append(matrix)
            for part, tensor in parts.items():
                full = f"{'w2' if shard == 'w2' else 'w13'}_{part}"
                if full in parameters:
                    parameters[full].weight_loader(parameters[full], tensor, f"experts.{full}", shard_id=shard, expert_id=expert)
                else:
                    assert part.startswith("input"), full
    is_gpt_oss = "gemm1_alpha" in case.layer and "activation" not in case.layer
    if is_gpt_oss and case.layer.get("gate_up_interleaved", True):
        interleave(layer)
    layer.quant_method.process_weights_after_loading(layer)
    assert {key for key, _ in layer.named_parameters()} == {"w13_weight", "w2_weight"}
    matrices = [nvfp4.Quantized(*(torch.stack(parts) for parts in zip(*found[role]))) if role in found else None for role in ("gate", "up", "down")]
    on_input, top_k = layer.moe_runner_config.apply_router_weight_on_input, layer.top_k
    # SGLang puts this factor into the weights for ModelOpt's layers, and leaves it to the runner for the others.
    factor = 1.0 if layer.should_fuse_routed_scaling_factor_in_topk else case.layer.get("routed_scaling_factor", 1.0)
    assert layer.should_fuse_routed_scaling_factor_in_topk == (name != "compressed-tensors")
    tokens_of = layer.scheme.tokens if layer.scheme is not None else layer.quant_method.tokens
    for count in (5, 3):
        tokens = torch.randn(count, HIDDEN).bfloat16()
        ids = torch.stack([torch.randperm(EXPERTS)[:top_k] for _ in range(count)]).int()
        ids[0, 0] = -1  # an expert of another rank
        weights = torch.rand(count, top_k, dtype=torch.float32).bfloat16().float()
        got = layer(tokens, StandardTopKOutput(weights, ids, torch.zeros(count, EXPERTS)))
        word, activation = activation_of(case)
        used = tokens_of.name if count >= tokens_of.from_tokens else "16-bit"
        if used == "16-bit":
            scaled = weights if on_input else weights * factor
            want, bound = reference.moe(tokens, ids, scaled, *matrices, activation=activation, weights_on_input=on_input)
            assert (np.abs(got.double().numpy() - want) <= bound).all()
        else:
            # The library's own tests compare these formats with their references.
            scales = tuple(torch.full((EXPERTS,), 1.0 / 448, dtype=torch.float32) for _ in range(2)) if used == "nvfp4" else None
            direct = nvfp4.Moe(*matrices, activation=word, token_format=used, input_scales=scales)
            assert torch.equal(got, direct(tokens, ids, weights))


def interleave(layer):
    """Puts rows of gate and up in turn, as gpt-oss's checkpoints have them."""
    import torch

    order = torch.arange(2 * INTERMEDIATE).reshape(2, INTERMEDIATE).T.reshape(-1)
    for key, parameter in layer.named_parameters():
        if key.startswith("w13_weight") and parameter.dim() == 3:
            data = parameter.data.view(torch.uint8)
            data.copy_(data[:, order].clone())


def activation_of(case):
    """Returns the library's word and the reference of the layer's activation."""
    import reference

    name, limit = case.layer.get("activation", "silu"), case.layer.get("swiglu_limit")
    alpha, step = case.layer.get("gemm1_alpha"), case.layer.get("gemm1_clamp_limit")
    if name == "situ":
        return None, functools.partial(reference.situ, beta=4.0 if alpha is None else alpha, linear=step)
    if alpha is not None:
        return "gpt-oss=1.702,7.0", reference.gpt_oss
    if step is not None:
        return f"swiglu-step={step}", functools.partial(reference.swiglu_step, limit=step)
    if limit is not None:
        return f"silu-limit={limit}", functools.partial(reference.silu_limit, limit=limit)
    known = {"silu": reference.silu, "gelu": reference.gelu, "gelu_tanh": reference.gelu_tanh, "relu2": reference.relu2}
    return name.replace("_", "-"), known[name]


def compute_linear(layer, name):
    """Loads and packs q, k and v, which are one layer, and compares the output of SGLang's layer with the reference."""
    import nvfp4
    import numpy as np
    import reference
    import torch

    parameters, matrices = dict(layer.named_parameters()), []
    for shard, heads, size in (("q", 4, 1.0), ("k", 2, 4.0), ("v", 2, 0.1)):
        matrix, parts = quantized(heads * HEAD, HIDDEN, size, name == "compressed-tensors")
        matrices.append(matrix)
        for part, tensor in parts.items():
            if part in parameters:
                parameters[part].weight_loader(parameters[part], tensor, shard)
            else:
                assert part.startswith("input"), part
    layer.quant_method.process_weights_after_loading(layer)
    method = getattr(layer, "scheme", None) or layer.quant_method
    assert {key for key, _ in layer.named_parameters()} == {"weight", "weight_of_many"} if method.tokens.is_split else {"weight"}
    for count in (5, 3):
        tokens = torch.randn(count, HIDDEN).bfloat16()
        got, _ = layer(tokens)
        used = method.tokens.name if count >= method.tokens.from_tokens else "16-bit"
        if used == "16-bit":
            matrix = np.concatenate([reference.numbers(matrix) for matrix in matrices])
            want = tokens.double().numpy() @ matrix.T
            bound = 2.0**-8 * np.abs(want) + 2.0**-20 * (np.abs(tokens.double().numpy()) @ np.abs(matrix.T))
            assert (np.abs(got.double().numpy() - want) <= bound).all()
        else:
            parts = [torch.cat([matrix[part] for matrix in matrices]) for part in (0, 1)]
            fused = nvfp4.Quantized(*parts, torch.stack([matrix.global_scale for matrix in matrices]))
            rows, scale = [len(matrix.values) for matrix in matrices], 1.0 / 448 if used == "nvfp4" else None
            assert torch.equal(got, nvfp4.Linear(fused, rows=rows, token_format=used, input_scale=scale)(tokens))


def forked(name, port):
    """Runs a case in a fork of this process. Returns whether it passed."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        with tempfile.TemporaryFile("w+") as log:
            saved = os.dup(1)
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            os.environ["MASTER_PORT"] = str(port)
            try:
                run(CASES[name])
                line, code = "passed", 0
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                log.seek(0)
                line, code = f"FAILED\n{log.read()[-5000:]}", 1
            os.write(saved, f"{name}: {line}\n".encode())
        os._exit(code)
    return os.waitpid(child, 0)[1] == 0


def main():
    """Runs the cases. Returns the exit status."""
    os.environ.update(HF_HUB_OFFLINE="1")
    import torch

    torch.set_num_threads(1)  # threads do not survive a fork
    import sglang
    import sglang.srt.layers.moe.fused_moe_triton

    wanted = sys.argv[1:] or list(CASES)
    passed = [forked(name, 29632 + index) for index, name in enumerate(wanted)]
    print(f"SGLang {sglang.__version__}, PyTorch {torch.__version__}: {sum(passed)} of {len(passed)} cases passed")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
