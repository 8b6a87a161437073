#!/usr/bin/env python3
"""Runs the plugin in the real vLLM on a machine without a GPU: registration, configuration, selection, loading, packing, computing.

    on_the_cpu.py            all cases
    on_the_cpu.py CASE...    some cases

Needs an environment with vLLM, `nvfp4` and `nvfp4_vllm`; `engines.py` makes one for each version. The test makes vLLM see a GPU, but
weights are packed for the CPU, and the layers compute on the CPU. Each case runs in a process of its own, a fork of one that has imported
vLLM.
"""

import functools
import inspect
import json
import logging
import os
import pathlib
import sys
import tempfile
import traceback
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "tests" / "engines"), str(ROOT / "python" / "nvfp4" / "tests")]

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 64, 48, 4, 2
HEAD, HEADS, KV_HEADS = 16, 4, 2

MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False, "decoder_sparse_step": 1,
    "head_dim": HEAD, "hidden_act": "silu", "hidden_size": HIDDEN, "intermediate_size": 64, "max_position_embeddings": 128,
    "mlp_only_layers": [], "moe_intermediate_size": INTERMEDIATE, "norm_topk_prob": True, "num_attention_heads": HEADS,
    "num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "num_hidden_layers": 2, "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 128,
}  # fmt: skip
WITH_SHARED_EXPERT = {
    "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "shared_expert_intermediate_size": 32, "qkv_bias": False,
}  # fmt: skip

OTHERS = ["lm_head"] + [f"model.layers.{layer}.mlp.{name}" for layer in range(2) for name in ("gate", "shared_expert_gate")]
ATTENTION = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(2) for name in "qkvo"]


def modelopt(algorithm="W4A16_NVFP4", ignored=()):
    numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    inputs = None if algorithm.startswith("W4A16") else numbers
    group = {"targets": ["Linear"], "weights": numbers, "input_activations": inputs}
    description = {"quant_method": "modelopt", "quant_algo": algorithm, "group_size": 16, "config_groups": {"group_0": group}}
    return description | {"producer": {"name": "nvfp4", "version": "0.1.0"}, "ignore": OTHERS + list(ignored)}


def mixed():
    names = [f"model.layers.{layer}.mlp.experts" for layer in range(2)] + ATTENTION[:4]
    layers = {name: {"quant_algo": "W4A16_NVFP4", "group_size": 16} for name in names}
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "ignore": OTHERS}


def compressed_tensors(inputs, ignored=()):
    numbers = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    group = {"targets": ["Linear"], "format": "nvfp4-pack-quantized", "weights": numbers | {"dynamic": False}}
    group |= {"input_activations": numbers | {"dynamic": "local"} if inputs else None, "output_activations": None}
    description = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "quantization_status": "compressed"}
    return description | {"kv_cache_scheme": None, "config_groups": {"group_0": group}, "ignore": OTHERS + list(ignored)}


# Classes that compute layers. A set has vLLM's names in its versions.
OURS, OF_TENSORS, LINEAR, SCHEME = "ModelOptNvfp4MoE", "CompressedTensorsNvfp4MoE", "Nvfp4Linear", "Nvfp4Scheme"
PLAIN, PLAIN_EXPERTS = {"UnquantizedLinearMethod"}, {"UnquantizedFusedMoEMethod"}
VLLMS, VLLMS_LINEAR = {"ModelOptNvFp4FusedMoE"}, {"ModelOptNvFp4W4A16LinearMethod", "ModelOptLinearMethod"}


class Case(NamedTuple):
    """A model of two layers, and what must become of it."""

    quantization: dict = modelopt()
    experts: list = [OURS] * 2
    """Expected class of each layer's experts."""
    linear: list = [LINEAR] * 2
    """Expected class of each layer's attention projections."""
    model: dict = {}
    """Changes of the model's configuration."""
    engine: dict = {}
    """Options of the engine."""
    layer: dict = {}
    """Arguments of vLLM's layer of experts: properties that this family of models does not have."""
    environment: dict = {}
    card: tuple = (9, 0)
    """Compute capability that vLLM sees."""
    change: object = None
    """A function that changes vLLM or the engine's configuration before the model is created."""
    says: str = ""
    """Part of a message of the plugin."""
    error: str = ""
    """Part of the error with which the model ends."""
    serves: object = None
    """A function that checks a packed layer further; it gets the layer and a function that computes and compares."""
    asleep: bool = False
    """With `reload`: whether vLLM sleeps in between and discards the weights (level 2)."""
    reload: bool = False
    """Whether other weights are loaded in the checkpoint's form after the first ones were packed."""


class Unserved(Exception):
    """This version of vLLM does not have what the case needs."""


REDUNDANT = 2
"""Experts that load balancing keeps twice."""


def eplb(config):
    config.parallel_config.enable_eplb = True
    config.parallel_config.eplb_config.num_redundant_experts = REDUNDANT


def lora(config):
    from vllm.config.lora import LoRAConfig

    config.lora_config = LoRAConfig(max_lora_rank=8, max_loras=1, lora_dtype="bfloat16")


class Ranks:
    """A group of two ranks. This process is the first one. The other one has as many tokens, and the same experts."""

    world_size = 2

    def __init__(self, *stage):
        """Older versions say whether they ask for the group of a stage of elastic expert parallelism."""

    def dispatch(self, *tensors, is_sequence_parallel=False, extra_tensors=None):
        assert not extra_tensors, "tokens are sent with scales"
        return tuple(torch_cat(tensor) for tensor in tensors[:3])

    def allocate_combine_input(self, *arguments, **named):
        return None

    def combine(self, hidden_states, is_sequence_parallel=False):
        own, others = hidden_states.chunk(2)
        assert (own == others.flip(0)).all(), "the other rank's tokens have other results"
        return own

    def combine_into_output(self, hidden_states, output, is_sequence_parallel=False):
        output.copy_(self.combine(hidden_states))


def torch_cat(tensor):
    """Returns the tokens of this rank, and the other rank's: the same in reverse."""
    import torch

    return torch.cat((tensor, tensor.flip(0)))


def all_to_all(config, backend="allgather_reducescatter"):
    """Expert parallelism with data parallelism: vLLM's own classes send tokens to a group of ranks, which is pretended."""
    from vllm.model_executor.layers.fused_moe import all2all_utils
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
    from vllm.model_executor.layers.fused_moe.prepare_finalize import naive_dp_ep

    FusedMoEParallelConfig.use_all2all_kernels = True
    config.parallel_config.all2all_backend = backend
    naive_dp_ep.get_ep_group = Ranks
    for name in ("get_ep_all2all_manager", "_get_ep_all2all_manager"):  # the second one until 0.27
        if hasattr(all2all_utils, name):
            setattr(all2all_utils, name, Ranks)


def other_all_to_all(config):
    all_to_all(config, "deepep_high_throughput")


def newer(config):
    import vllm

    vllm.__version__ = "0.99.0"


def changed(config):
    """A version whose experts take one more argument."""
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk

    newer(config)
    old = mk.FusedMoEExpertsModular.workspace_shapes

    def workspace_shapes(self, M, N, K, topk, global_num_experts, local_num_experts, expert_tokens_meta, activation, more):
        return old(self, M, N, K, topk, global_num_experts, local_num_experts, expert_tokens_meta, activation)

    mk.FusedMoEExpertsModular.workspace_shapes = workspace_shapes


HIDDEN_MODULE = "vllm.model_executor.layers.fused_moe.all2all_utils"


def vanished(config):
    """A version without a module that the plugin imports."""
    newer(config)
    sys.modules[HIDDEN_MODULE] = None


def unforeseen(config):
    """A version that differs where nothing looks beforehand."""
    from nvfp4_vllm import configs

    newer(config)

    def fail(*arguments):
        raise AttributeError("no such attribute")

    configs.methods.check = fail


def unproven(config):
    """A GPU whose kernels have no verdict yet."""
    import nvfp4

    def refuse(*arguments, **named):
        raise nvfp4.Error("moe_sm100 has not proved itself on this card: `nvfp4 selftest` lets it, once")

    nvfp4.Moe = refuse


def transformed(config):
    """A method of linear layers that adds something to vLLM's."""
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors as module

    module.CompressedTensorsLinearMethod = type("Transformed", (module.CompressedTensorsLinearMethod,), {})


def per_quant(config):
    if not hasattr(config.kernel_config, "linear_backend_per_quant"):
        raise Unserved("linear_backend_per_quant")
    config.kernel_config.linear_backend_per_quant = {"nvfp4_w4a16": "marlin"}


def other_per_quant(config):
    per_quant(config)
    config.kernel_config.linear_backend_per_quant = {"nvfp4_w4a4": "marlin"}


MARLIN = {"moe_backend": "marlin", "linear_backend": "marlin"}
REQUIRE = {"NVFP4_VLLM_REQUIRE": "1"}
EMULATED = (8, 0), (8, 6), (8, 9), (10, 0), (10, 3), (12, 0), (12, 1)
"""Compute capabilities whose kernels no GPU has run."""
BIASED = {"has_bias": True}
FP8 = '{"experts": "fp8", "linear": "fp8"}'
CASES = {
    "modelopt W4A4": Case(modelopt("NVFP4"), says="computed by nvfp4, 16-bit tokens: experts"),
    "modelopt W4A16": Case(),
    "modelopt mixed": Case(mixed(), linear=[LINEAR, PLAIN]),
    "compressed-tensors W4A4": Case(compressed_tensors(True), [OF_TENSORS] * 2, [SCHEME] * 2),
    "compressed-tensors W4A16": Case(compressed_tensors(False, ATTENTION[:4]), [OF_TENSORS] * 2, [PLAIN, SCHEME]),
    "excluded layer": Case(modelopt(ignored=ATTENTION + ["model.layers.0.mlp.experts"]), [PLAIN_EXPERTS, OURS], [PLAIN] * 2),
    # What the user configures.
    "batch invariant": Case(environment={"VLLM_BATCH_INVARIANT": "1"}),
    "batch invariant, compressed-tensors": Case(
        compressed_tensors(False), [OF_TENSORS] * 2, [SCHEME] * 2, environment={"VLLM_BATCH_INVARIANT": "1"}
    ),
    "marlin by the user's choice": Case(
        experts=[VLLMS] * 2, linear=[VLLMS_LINEAR] * 2, engine=MARLIN, says="kernels: model.layers.1.mlp.experts: --moe-backend marlin"
    ),
    "linear backend of the format": Case(linear=[VLLMS_LINEAR] * 2, change=per_quant, says="linear backend marlin is configured for nvfp4_w4a16"),
    "linear backend of another format": Case(change=other_per_quant),
    "expert load balancing": Case(change=eplb, serves=lambda *given: moved_experts(*given)),
    "expert load balancing, biases, fp8 tokens from 4 tokens on": Case(
        layer={"has_bias": True}, environment={"NVFP4_VLLM_OPTIONS": '{"experts": "fp8", "from_tokens": 4}'}, change=eplb, serves=lambda *given: moved_experts(*given)
    ),
    "expert load balancing, reloaded": Case(change=eplb, serves=lambda *given: moved_experts(*given), reload=True),
    "all-to-all": Case(change=all_to_all, serves=lambda *given: sent_tokens(*given)),
    "all-to-all with expert load balancing": Case(change=lambda config: (eplb(config), all_to_all(config)), serves=lambda *given: moved_experts(*given)),
    "all-to-all by other kernels": Case(
        # vLLM's own kernels need a package that is not installed here.
        change=other_all_to_all, environment=REQUIRE, error="model.layers.0.mlp.experts: --all2all-backend deepep_high_throughput"
    ),
    "LoRA": Case(experts=[VLLMS] * 2, change=lora, says="kernels: model.layers.0.mlp.experts: --enable-lora"),
    "LoRA where all must be served": Case(change=lora, environment={"NVFP4_VLLM_REQUIRE": "1"}, error="--enable-lora: adapters of experts"),
    "linear layers that vLLM transforms": Case(
        compressed_tensors(True), [OF_TENSORS] * 2, [{"CompressedTensorsW4A4Fp4"}] * 2, engine={"linear_backend": "marlin"},
        change=transformed, says="model.layers.0.self_attn.qkv_proj: vLLM transforms its numbers",
    ),
    "nothing may be left": Case(engine=MARLIN, environment=REQUIRE, error="NVFP4_VLLM_REQUIRE=1 makes this an error"),
    "all served where that is required": Case(environment=REQUIRE),
    "intermediate size that ranks cannot share": Case(
        model={"moe_intermediate_size": 56}, error="mlp.experts: the intermediate size 56 leaves 56 for each of 1 ranks, which is not a multiple of 16"
    ),
    "projection size that ranks cannot share": Case(
        # q, k and v have 32, 8 and 8 rows.
        model={"head_dim": 8, "num_key_value_heads": 1}, error="self_attn.qkv_proj: tensor parallelism leaves 8 rows"
    ),
    # What the library has.
    "clamped SwiGLU": Case(layer={"swiglu_limit": 0.5}),
    "gelu": Case(layer={"activation": "gelu"}),
    "gelu, tanh": Case(layer={"activation": "gelu_tanh"}),
    "ReLU² with a gate": Case(layer={"activation": "relu2"}),
    "SiTU": Case(layer={"activation": "situ", "activation_situ_beta": 0.5}),
    "SiTU, linear beta, biases": Case(layer=BIASED | {"activation": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 0.25}),
    "SiTU without its number": Case(experts=[VLLMS] * 2, layer={"activation": "situ"}, says="the activation situ with"),
    "SwiGLU-step": Case(layer={"activation": "swiglustep"}),
    "SwiGLU-step, compressed-tensors": Case(compressed_tensors(True), [OF_TENSORS] * 2, [SCHEME] * 2, layer={"activation": "swiglustep"}),
    "SwiGLU-step with another limit than vLLM's": Case(
        experts=[VLLMS] * 2, layer={"activation": "swiglustep", "swiglu_limit": 0.5}, says="the activation swiglustep with limit 0.5"
    ),
    "clamped SwiGLU with any numbers": Case(
        layer={"activation": "swigluoai_uninterleave", "swiglu_limit": 0.5, "swiglu_alpha": 1.25, "swiglu_beta": 0.25}
    ),
    "more than 512 experts": Case(model={"num_experts": 520}),
    "more experts than nvfp4 has": Case(
        experts=[VLLMS] * 2, model={"num_experts": 1040}, says="kernels: model.layers.0.mlp.experts: its sizes: "
    ),
    "biases": Case(layer=BIASED),
    "gpt-oss": Case(layer=BIASED | {"activation": "swigluoai"}),
    "gpt-oss, halves": Case(
        layer=BIASED | {"activation": "swigluoai_uninterleave", "swiglu_limit": 7.0, "swiglu_alpha": 1.702, "swiglu_beta": 1.0}
    ),
    "ReLU² without a gate": Case(layer={"activation": "relu2_no_mul"}),
    "ReLU² without a gate, biases, compressed-tensors": Case(
        compressed_tensors(True), [OF_TENSORS] * 2, [SCHEME] * 2, layer=BIASED | {"activation": "relu2_no_mul"}
    ),
    "weights on the input": Case(model={"num_experts_per_tok": 1}, layer={"apply_router_weight_on_input": True}),
    "shared expert": Case(model=WITH_SHARED_EXPERT),
    "activation that only vLLM has": Case(
        experts=[VLLMS] * 2, layer={"activation": "silu_no_mul"}, says="kernels: model.layers.0.mlp.experts: kernel does not support"
    ),
    # Other weights in the checkpoint's form, layer by layer.
    "reloaded": Case(reload=True),
    "reloaded, compressed-tensors, fp8 tokens from 4 tokens on": Case(
        compressed_tensors(True), [OF_TENSORS] * 2, [SCHEME] * 2, environment={"NVFP4_VLLM_OPTIONS": FP8[:-1] + ', "from_tokens": 4}'}, reload=True
    ),
    "asleep at level 2": Case(reload=True, asleep=True),
    "asleep at level 2 with expert load balancing": Case(reload=True, asleep=True, change=eplb, serves=lambda *given: moved_experts(*given)),
    # Token formats.
    "fp8 tokens": Case(environment={"NVFP4_VLLM_OPTIONS": FP8}, says="computed by nvfp4, fp8 tokens: linear layers"),
    "fp8 tokens of experts by --additional-config": Case(engine={"additional_config": {"nvfp4": {"experts": "fp8"}}}),
    "fp8 tokens from 4 tokens on": Case(
        compressed_tensors(False), [OF_TENSORS] * 2, [SCHEME] * 2, environment={"NVFP4_VLLM_OPTIONS": FP8[:-1] + ', "from_tokens": 4}'},
        says="fp8 tokens from 4 tokens on, else 16-bit",
    ),
    "fp8 tokens from 4 tokens on, batch invariant": Case(
        environment={"NVFP4_VLLM_OPTIONS": FP8[:-1] + ', "from_tokens": 4}', "VLLM_BATCH_INVARIANT": "1"}, error="depend on the batch"
    ),
    "nvfp4 tokens": Case(modelopt("NVFP4"), environment={"NVFP4_VLLM_OPTIONS": '{"experts": "nvfp4", "linear": "nvfp4"}'}),
    "unknown token format": Case(environment={"NVFP4_VLLM_OPTIONS": '{"experts": "fp6"}'}, error="experts: unknown token format 'fp6'"),
    "unknown option": Case(engine={"additional_config": {"nvfp4": {"expert": "fp8"}}}, error="unknown key 'expert'"),
    # Other GPUs and other versions.
    **{
        f"compute capability {major}.{minor}": Case(card=(major, minor), says="emulated only: nvfp4's kernels for experts")
        for major, minor in EMULATED
    },
    "GPU without a verdict": Case(
        experts=[VLLMS] * 2, engine={"moe_backend": "auto"}, change=unproven, says="has not proved itself on this card"
    ),
    "newer version": Case(change=newer, says="was not tested with vLLM 0.99.0"),
    "newer version with other seams": Case(
        experts=[VLLMS] * 2, linear=[VLLMS_LINEAR] * 2, engine=MARLIN, change=changed, says="vLLM's own kernels serve all NVFP4 layers"
    ),
    "newer version without a module": Case(
        experts=[VLLMS] * 2, linear=[VLLMS_LINEAR] * 2, engine=MARLIN, change=vanished, says="vLLM's own kernels serve all NVFP4 layers"
    ),
    "newer version that differs unforeseen": Case(
        experts=[VLLMS] * 2, linear=[VLLMS_LINEAR] * 2, engine=MARLIN, change=unforeseen, says="model.layers.0.mlp.experts and all later NVFP4 layers"
    ),
    "newer version with other seams, required": Case(environment=REQUIRE, change=changed, error="nvfp4_vllm is not used"),
}  # fmt: skip


# One case.


def run(case):
    """Creates the model, and checks the classes, the messages and the numbers."""
    os.environ.update(case.environment)
    import torch

    torch.manual_seed(0)
    pretend_card(case.card)
    said = Messages()
    give_layer(case.layer)
    with tempfile.TemporaryDirectory() as folder:
        try:
            model = create(case, pathlib.Path(folder))
        except ValueError as error:
            assert case.error and case.error in str(error), error
            return
    assert not case.error, "no error"
    assert any(case.says in message for message in said.messages), said.messages
    names = lambda kind: [module for module in model.modules() if type(module).__name__ == kind]
    # Our experts have the same `__name__` as vLLM's. A compressed-tensors layer has a scheme instead of a method of its own.
    class_of = lambda layer: type(getattr(layer, "scheme", layer.quant_method)).__qualname__
    layers, fused = experts_of(model), names("QKVParallelLinear")
    for found, expected in ((layers, case.experts), (fused, case.linear)):
        found = [class_of(layer) for layer in found]
        assert len(found) == len(expected) and all(name in each if isinstance(each, set) else name == each for name, each in zip(found, expected)), found
    for layer in fused:
        kernel = getattr(getattr(layer, "scheme", layer.quant_method), "kernel", None)
        assert type(kernel).__name__ != "OpenKernel", "vLLM has chosen no kernel"
    for layer in names("MergedColumnParallelLinear"):
        assert class_of(layer) == LINEAR
    is_ours = lambda expected: [isinstance(each, str) for each in expected]
    served = is_ours(case.experts), is_ours(case.linear)
    if case.reload:
        matrices, of_attention = load_twice(model, [*layers, *fused], served, case)
    else:
        matrices, of_attention = load(model, *served, case)
    for layer, of_layer in zip(layers, matrices):
        if of_layer is not None:
            compute(layer, of_layer, case)
    for layer, of_layer in zip(fused, of_attention):
        if of_layer is not None:
            compute_linear(layer, of_layer, case)


def load_twice(model, layers, served, case):
    """Loads and packs weights, then other weights as vLLM's reloading does. CUDA graphs read the packed tensors' addresses, which must stay."""
    import types

    import torch
    from vllm.model_executor.model_loader.reload import layerwise

    layerwise.record_metadata_for_reloading(model)
    load(model, *served, case)
    for layer in layers:
        layer.quant_method.process_weights_after_loading(layer)
    packed = lambda: [(parameter.data_ptr(), parameter.clone()) for layer in layers for parameter in layer.parameters(recurse=False)]
    before = packed()
    if case.asleep:
        # vLLM's allocator gives the memory back, keeps its addresses, and restores buffers alone.
        for parameter in model.parameters():
            parameter.data.view(-1).view(torch.uint8).fill_(0xFF)
    layerwise.initialize_layerwise_reload(model)
    found = load(model, *served, case)
    layerwise.finalize_layerwise_reload(model, types.SimpleNamespace(dtype=torch.bfloat16))
    for (address, old), (now, new) in zip(before, packed(), strict=True):
        assert address == now and (old.numel() == 0 or not torch.equal(old, new))
    return found


class Messages(logging.Handler):
    """The plugin's messages."""

    def __init__(self):
        super().__init__()
        self.messages = []
        logging.getLogger("vllm.nvfp4").addHandler(self)

    def emit(self, record):
        self.messages.append(record.getMessage())


def pretend_card(capability):
    import vllm.platforms
    from vllm.platforms.interface import DeviceCapability

    card = type(vllm.platforms._current_platform)
    card.get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(*capability))
    card.has_device_capability = classmethod(
        lambda cls, wanted, device_id=0: tuple(wanted if isinstance(wanted, tuple) else divmod(wanted, 10)) <= capability
    )


def give_layer(arguments):
    """Makes the model's layers of experts with more arguments."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.models import qwen3_moe

    name = next(name for name in ("FusedMoEFactory", "FusedMoE") if hasattr(qwen3_moe, name))
    make = getattr(qwen3_moe, name)
    arguments, known = dict(arguments), inspect.signature(make).parameters
    activations = [activation.value for activation in MoEActivation]
    if arguments.get("activation", "silu") not in activations:
        raise Unserved(f"activation {arguments['activation']}")
    if arguments.get("activation", "").endswith("_no_mul") and "ckpt_names" in known:
        arguments["ckpt_names"] = ("up_proj", "down_proj", None)
    setattr(qwen3_moe, name, lambda *others, **named: make(*others, **named | arguments))


def experts_of(model):
    """Returns the layers of experts. Some families of models have a class of their own for them."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    return [module for module in model.modules() if isinstance(module, RoutedExperts)]


def create(case, folder):
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.plugins import load_general_plugins

    (folder / "config.json").write_text(json.dumps(MODEL | case.model | {"quantization_config": case.quantization}))
    before = case.change in (changed, newer, vanished)
    if before:
        case.change(None)
    load_general_plugins()
    if sys.modules.get(HIDDEN_MODULE, True) is None:
        del sys.modules[HIDDEN_MODULE]  # vLLM itself has it
    arguments = EngineArgs(model=str(folder), skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, **case.engine)
    config = arguments.create_engine_config()
    if case.change is not None and not before:
        case.change(config)
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, backend="gloo")
        initialize_model_parallel(1, 1)
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("cpu"):
            return initialize_model(config)


def load(model, served, attention, case):
    """Loads random weights under a checkpoint's names. Returns gate, up and down, and the biases, of each layer of experts that `nvfp4`
    serves, and q, k and v of each layer whose attention `nvfp4` serves. Merged projections have different scales."""
    import nvfp4
    import torch

    of_tensors = case.quantization["quant_method"] == "compressed-tensors"
    tensors, layers, fused = [], [], []

    def random(prefix, rows, columns, size):
        matrix = nvfp4.quantize(torch.randn(rows, columns, dtype=torch.float32) * size)
        one = torch.tensor(1.0 / 448, dtype=torch.float32)
        if of_tensors:
            divisor = 1 / matrix.global_scale
            matrix = matrix._replace(global_scale=1.0 / divisor)
            parts = {"weight_packed": matrix.values, "weight_scale": matrix.scales, "weight_global_scale": divisor.reshape(1)}
            parts |= {"input_global_scale": one.reshape(1)}
        else:
            parts = {"weight": matrix.values, "weight_scale": matrix.scales, "weight_scale_2": matrix.global_scale}
            parts |= {"input_scale": one}
        tensors.extend((f"{prefix}.{part}", tensor) for part, tensor in parts.items())
        return matrix

    has_gate = not case.layer.get("activation", "").endswith("_no_mul")
    for layer, (experts_served, attention_served) in enumerate(zip(served, attention)):
        block = f"model.layers.{layer}"
        projections = {"gate": [], "up": [], "down": []} if has_gate else {"up": [], "down": []}
        biases = {name: [] for name in projections}
        for expert in range(experts_in(case) if experts_served else 0):
            for name, found in projections.items():
                rows, columns = (HIDDEN, INTERMEDIATE) if name == "down" else (INTERMEDIATE, HIDDEN)
                size = (1 + expert % EXPERTS) * (2 if name == "up" else 1) / 8
                found.append(random(f"{block}.mlp.experts.{expert}.{in_checkpoint(model, name, has_gate)}_proj", rows, columns, size))
                biases[name].append(torch.randn(rows, dtype=torch.float32).bfloat16())
        stacked = [nvfp4.Quantized(*(torch.stack(parts) for parts in zip(*found))) for found in projections.values() if found]
        of_layer = [torch.stack(found) for found in biases.values() if found]
        layers.append((stacked if has_gate else [None, *stacked], of_layer if has_gate else [None, *of_layer]) if stacked else None)
        shapes = (("q", HEADS, 1.0), ("k", KV_HEADS, 4.0), ("v", KV_HEADS, 0.1)) if attention_served else ()
        fused.append([random(f"{block}.self_attn.{name}_proj", heads * HEAD, HIDDEN, size) for name, heads, size in shapes] or None)
    # Linear layers of this format without input scales have no parameter for them.
    is_w4a16 = of_tensors and case.quantization["config_groups"]["group_0"]["input_activations"] is None
    tensors = [(name, tensor) for name, tensor in tensors if not (is_w4a16 and "self_attn" in name and name.endswith("input_global_scale"))]
    assert not tensors or model.load_weights(iter(tensors)), "no weight was loaded"
    for layer in experts_of(model):
        if is_balanced(layer) and hasattr(layer, "w2_weight") and not torch.equal(layer.w2_weight[:REDUNDANT], layer.w2_weight[-REDUNDANT:]):
            raise Unserved("copies of an expert on one rank: it loads the first one alone")
    return layers, fused


def in_checkpoint(model, name, has_gate):
    """Without a gate, vLLM loads up as its first projection: until 0.25 under the name of a gate."""
    layer = experts_of(model)[0]
    return name if has_gate or name == "down" else getattr(layer, "ckpt_gate_proj_name", "gate_proj").removesuffix("_proj")


def compute(layer, loaded, case):
    """Packs a loaded layer, and compares the output of vLLM's kernel with the reference."""
    import nvfp4
    import torch
    from vllm.v1.worker.workspace import init_workspace_manager

    method, (matrices, biases) = layer.quant_method, loaded
    if not case.layer.get("has_bias"):
        biases = None
    else:
        set_biases(layer, biases, case)
    if not case.reload:
        method.process_weights_after_loading(layer)
    names = {name for name, _ in layer.named_parameters(recurse=False)}
    if is_balanced(layer):
        assert names and all(name.startswith("nvfp4_part_") for name in names), names
    else:
        assert names == {"w13_weight", "w2_weight"}, names
    assert method.supports_eplb and not method.is_monolithic and not method.supports_pre_processed_weights
    init_workspace_manager(torch.device("cpu"))

    def compare(placement):
        """Compares results. `placement` has the checkpoint's number of each of the layer's experts."""
        placed = [matrix and nvfp4.Quantized(*(part[placement] for part in matrix)) for matrix in matrices]
        compare_placed(layer, placed, biases and [bias if bias is None else bias[placement] for bias in biases], case)

    compare(placement_at_start(layer, case))
    if case.serves is not None:
        case.serves(layer, compare)


def experts_in(case):
    """Returns the number of experts of a layer in the checkpoint."""
    return case.model.get("num_experts", EXPERTS)


def is_balanced(layer):
    return layer.moe_config.moe_parallel_config.enable_eplb


def placement_at_start(layer, case):
    """Returns the checkpoint's number of each of a layer's experts, as vLLM places them at first."""
    return [number % experts_in(case) for number in range(experts_in(case) + (REDUNDANT if is_balanced(layer) else 0))]


def compare_placed(layer, matrices, biases, case):
    """Compares results of vLLM's kernel with the reference for the same experts in the same places."""
    import nvfp4
    import numpy as np
    import reference
    import torch

    method, experts = layer.quant_method, len(matrices[-1].values)
    on_input = case.layer.get("apply_router_weight_on_input", False)
    for count in (5, 3):
        top_k = 1 if on_input else TOP_K
        tokens = torch.randn(count, HIDDEN, dtype=torch.float32).bfloat16()
        ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(count)]).int()
        # vLLM rounds weights on the input to the token type first.
        weights = torch.rand(count, top_k, dtype=torch.float32).bfloat16().float()
        got = method.apply(layer, tokens, weights, ids, None, None)
        word, activation = activation_of(case)
        multiplied = count * (Ranks.world_size if layer.moe_config.moe_parallel_config.use_all2all_kernels else 1)
        name = method.tokens.name if multiplied >= method.tokens.from_tokens else "16-bit"
        if name == "16-bit":
            want, bound = reference.moe(tokens, ids, weights, *matrices, biases=biases, activation=activation, weights_on_input=on_input)
            assert (np.abs(got.double().numpy() - want) <= bound).all()
        else:
            # The library's own tests compare these formats with their references.
            scales = None
            if name == "nvfp4":
                scales = tuple(torch.full((experts,), 1.0 / 448, dtype=torch.float32) for _ in range(2))
            direct = nvfp4.Moe(*matrices, activation=word, biases=biases, token_format=name, input_scales=scales)
            assert torch.equal(got, direct(tokens, ids, weights))


def moved_experts(layer, compare):
    """Moves experts as vLLM's load balancer does, twice."""
    import torch
    from vllm.distributed.eplb.eplb_communicator import TorchDistNcclEplbCommunicator
    from vllm.distributed.eplb.rebalance_execute import rearrange_expert_weights_inplace

    group = torch.distributed.group.WORLD
    weights = list(layer.get_expert_weights())
    addresses = [weight.data_ptr() for weight in weights]
    buffers = [torch.empty_like(weight) for weight in weights]
    old = [0, 1, 2, 3, 0, 1]
    for new in ([3, 1, 0, 2, 2, 0], [2, 2, 3, 0, 1, 3]):
        places = (torch.tensor([places]) for places in (old, new))
        rearrange_expert_weights_inplace(*places, [weights], buffers, group, TorchDistNcclEplbCommunicator(ep_group=group))
        compare(new)
        old = new
    assert addresses == [weight.data_ptr() for weight in layer.get_expert_weights()], "CUDA graphs read other memory"


def sent_tokens(layer, compare):
    """Checks that vLLM's own class sends the tokens."""
    prepare = layer.quant_method.moe_kernel.prepare_finalize
    assert type(prepare).__name__ == "MoEPrepareAndFinalizeNaiveDPEPModular", type(prepare)


def activation_of(case):
    """Returns the library's word and the reference of the layer's activation."""
    import reference

    name = case.layer.get("activation", "silu")
    limit, alpha, beta = (case.layer.get(f"swiglu_{number}") for number in ("limit", "alpha", "beta"))
    if name == "silu" and limit is not None:
        return f"silu-limit={limit}", functools.partial(reference.silu_limit, limit=limit)
    if name == "swigluoai_uninterleave":
        return f"swigluoai={alpha},{limit},{beta}", functools.partial(reference.swigluoai, alpha=alpha, limit=limit, offset=beta)
    if name == "situ":
        numbers = {"beta": case.layer["activation_situ_beta"], "linear": case.layer.get("activation_situ_linear_beta")}
        return None, functools.partial(reference.situ, **numbers)
    return {
        "silu": ("silu", reference.silu),
        "gelu": ("gelu", reference.gelu),
        "gelu_tanh": ("gelu-tanh", reference.gelu_tanh),
        "relu2": ("relu2-gated", reference.gated_relu2),
        "relu2_no_mul": ("relu2", reference.relu2),
        "swiglustep": ("swiglu-step=7", reference.swiglu_step),
        "swigluoai": ("gpt-oss", reference.gpt_oss),
    }[name]


def set_biases(layer, biases, case):
    """Sets the biases as gpt-oss's model does, and, for gpt-oss, puts rows of gate and up in turn, as its checkpoints have them."""
    import torch

    gate, up, down = (bias if bias is None else bias[placement_at_start(layer, case)] for bias in biases)
    layer.w13_bias.data.copy_(up if gate is None else torch.cat((gate, up), dim=1))
    layer.w2_bias.data.copy_(down)
    if case.layer.get("activation") == "swigluoai":
        order = torch.arange(2 * INTERMEDIATE).reshape(2, INTERMEDIATE).T.reshape(-1)
        for name in ("w13_bias", "w13_weight", "w13_weight_scale"):
            data = getattr(layer, name).data
            data.view(torch.uint8).copy_(data.view(torch.uint8).reshape(EXPERTS, 2 * INTERMEDIATE, -1)[:, order].reshape(data.view(torch.uint8).shape))


def compute_linear(layer, matrices, case):
    """Packs q, k and v, which are one layer, and compares the output of vLLM's layer with the reference."""
    import nvfp4
    import numpy as np
    import reference
    import torch

    bias = getattr(layer, "bias", None)
    if bias is not None:
        bias.data.normal_()
    if not case.reload:
        layer.quant_method.process_weights_after_loading(layer)
    method = getattr(layer, "scheme", layer.quant_method)
    expected = {"weight", "weight_of_many"} if method.tokens.is_split else {"weight"}
    expected |= set() if bias is None else {"bias"}
    assert {name for name, _ in layer.named_parameters(recurse=False)} == expected
    if case.change is lora:
        adapted(layer)
    for count in (5, 3):
        tokens = torch.randn(count, HIDDEN, dtype=torch.float32).bfloat16()
        got, _ = layer(tokens)
        name = method.tokens.name if count >= method.tokens.from_tokens else "16-bit"
        if name == "16-bit":
            matrix = np.concatenate([reference.numbers(matrix) for matrix in matrices])
            want = tokens.double().numpy() @ matrix.T + (0.0 if bias is None else bias.detach().double().numpy())
            bound = 2.0**-8 * np.abs(want) + 2.0**-20 * (np.abs(tokens.double().numpy()) @ np.abs(matrix.T))
            assert (np.abs(got.double().numpy() - want) <= bound).all()
        else:
            parts = [torch.cat([matrix[part] for matrix in matrices]) for part in (0, 1)]
            fused = nvfp4.Quantized(*parts, torch.stack([matrix.global_scale for matrix in matrices]))
            rows, scale = [len(matrix.values) for matrix in matrices], 1.0 / 448 if name == "nvfp4" else None
            assert torch.equal(got, nvfp4.Linear(fused, bias, rows=rows, token_format=name, input_scale=scale)(tokens))


def adapted(layer):
    """Checks that vLLM's layer with LoRA adds the adapters of q, k and v to our layer's output. The adapters' products are PyTorch's."""
    import torch
    from vllm.config.lora import LoRAConfig
    from vllm.lora.layers import MergedQKVParallelLinearWithLoRA

    class Products:
        def add_shrink(self, sums, x, stacked_a, scale):
            for part, a in zip(sums, stacked_a, strict=True):
                part += (x @ a[0, 0].T) * scale
            return sums

        def add_expand(self, output, sums, stacked_b, slices, offset_start, add_input):
            assert add_input and offset_start == 0
            for part, of_part, b in zip(output.split(slices, dim=-1), sums, stacked_b, strict=True):
                part += of_part.to(output.dtype) @ b[0, 0].T
            return output

        def add_lora_linear(self, output, x, stacked_a, stacked_b, scale, slices, **named):
            columns = output.split(slices, dim=-1)
            for part, a, b in zip(columns, stacked_a, stacked_b, strict=True):
                part += (x @ a[0, 0].T @ b[0, 0].T) * scale
            return output

    rank, heads = 8, (HEADS, KV_HEADS, KV_HEADS)
    with_adapters = MergedQKVParallelLinearWithLoRA(layer)
    with_adapters.create_lora_weights(1, LoRAConfig(max_lora_rank=rank, max_loras=1, lora_dtype=torch.bfloat16))
    with_adapters.set_mapping(Products())
    of_a = [torch.randn(rank, HIDDEN) for _ in heads]
    of_b = [torch.randn(count * HEAD, rank) for count in heads]
    with_adapters.set_lora(0, of_a, of_b)
    tokens = torch.randn(5, HIDDEN, dtype=torch.float32).bfloat16()
    got, base = with_adapters(tokens)[0], layer(tokens)[0]
    added = torch.cat([tokens @ a.bfloat16().T @ b.bfloat16().T for a, b in zip(of_a, of_b)], dim=-1)
    assert torch.equal(got, base + added) and not torch.equal(got, base)


# All cases.


def forked(name):
    """Runs a case in a fork of this process. Returns whether it passed."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        with tempfile.TemporaryFile("w+") as log:
            saved = os.dup(1)
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            try:
                run(CASES[name])
                line, code = "passed", 0
            except Unserved as missing:
                line, code = f"passed: this version has no {missing}", 0
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                log.seek(0)
                line, code = f"FAILED\n{log.read()[-5000:]}", 1
            os.write(saved, f"{name}: {line}\n".encode())
        os._exit(code)
    return os.waitpid(child, 0)[1] == 0


def import_all():
    """Imports what the cases need: that takes most of their time, and forks share it."""
    import vllm.model_executor.model_loader.utils  # noqa: F401
    import vllm.plugins
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import registry

    # vLLM imports a model's module in another process to look at it.
    registry._run_in_subprocess = lambda function: function()
    os.environ["VLLM_PLUGINS"] = ""
    with tempfile.TemporaryDirectory() as folder:
        for model in (MODEL, MODEL | WITH_SHARED_EXPERT):
            (pathlib.Path(folder) / "config.json").write_text(json.dumps(model))
            EngineArgs(model=folder, skip_tokenizer_init=True, enforce_eager=True, max_model_len=64).create_engine_config()
    os.environ["VLLM_PLUGINS"] = "nvfp4"
    vllm.plugins.plugins_loaded = False


def main():
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    import vllm_loads

    vllm_loads.stub_driver()
    import torch

    torch.set_num_threads(1)  # threads do not survive a fork
    vllm_loads.pretend_hopper()
    import vllm

    import_all()
    wanted = sys.argv[1:] or list(CASES)
    passed = [forked(name) for name in wanted]
    print(f"vLLM {vllm.__version__}, PyTorch {torch.__version__}: {sum(passed)} of {len(passed)} cases passed")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
