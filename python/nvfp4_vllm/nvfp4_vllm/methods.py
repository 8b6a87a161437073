"""The `quant_method` of layers of experts: vLLM loads the weights, then `nvfp4` packs them."""

import nvfp4
import torch
from nvfp4 import serving
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4 import (
    CompressedTensorsW4A4Nvfp4MoEMethod,
)
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4FusedMoE
from vllm.model_executor.layers.quantization.utils.quant_utils import kNvfp4Static
from vllm.model_executor.utils import set_weight_attrs

from . import choices, seams
from .choices import CARDS, Left, Refused
from .experts import Nvfp4Experts, activation_of


def check(layer, name):
    """Checks that `nvfp4` computes a layer of experts, and returns its :class:`serving.Tokens`.

    :raises Left: if it does not; the message is the reason.
    :raises Refused: if the layer is supported except for the intermediate size per rank.
    """
    config = layer.moe_config
    if config.moe_backend != "auto":
        raise Left(f"--moe-backend {config.moe_backend}")
    if config.is_lora_enabled:
        # vLLM's experts add the adapters' products to gate and up before the activation. It refuses experts that cannot do that.
        raise Left("--enable-lora: adapters of experts add to gate and up, which nvfp4's kernels multiply and activate at once")
    parallel = config.moe_parallel_config
    if parallel.use_all2all_kernels and not parallel.use_ag_rs_all2all_kernels:
        raise Left(f"--all2all-backend {parallel.all2all_backend}: nvfp4 was tried with allgather_reducescatter only")
    supported, reason = Nvfp4Experts.is_supported_config(Nvfp4Experts, config, kNvfp4Static, None, Nvfp4Experts.activation_format())
    if not supported:
        raise Left(reason)
    activation = activation_of(config)
    if activation is None:
        numbers = f"limit {config.swiglu_limit}, alpha {config.swiglu_alpha}, beta {config.swiglu_beta}"
        raise Left(f"the activation {config.activation.value} with {numbers} is not one of nvfp4's")
    if config.in_dtype not in (torch.bfloat16, torch.float16):
        raise Left(f"tokens of {config.in_dtype}")
    size, ranks = config.intermediate_size_per_partition, parallel.tp_size
    if size % nvfp4.BLOCK:
        raise Refused(
            f"{name}: the intermediate size {size * ranks} leaves {size} for each of {ranks} ranks, which is not a multiple of"
            f" {nvfp4.BLOCK}, and ranks cannot share a block; use fewer ranks or expert parallelism"
        )
    tokens = choices.tokens("experts", get_current_vllm_config_or_none())
    try:
        nvfp4.moe_workspace_bytes(1, config.experts_per_token, config.hidden_dim, size, config.num_local_experts, None, tokens.name)
    except ValueError as error:
        raise Left(f"its sizes: {error}") from error
    for token_format in tokens.formats:
        CARDS.check_moe(config.in_dtype, activation, config.has_bias, token_format)
    return tokens


class _Packed(FusedMoEMethodBase):
    """A layer whose experts `nvfp4` has packed."""

    supports_eplb = True
    # vLLM's cache of processed weights keeps the formats of its own kernels.
    supports_pre_processed_weights = False
    experts_cls = Nvfp4Experts
    use_global_sf = False

    def create_weights(self, layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **extra_weight_attrs):
        # vLLM's method changes the dictionary.
        extra = dict(extra_weight_attrs)
        super().create_weights(layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **extra_weight_attrs)
        for name, parameter in layer.named_parameters(recurse=False):
            # A checkpoint may lack input scales, and then vLLM leaves the parameter uninitialized.
            if "input" in name:
                parameter.data.fill_(float("nan"))
        if not self.moe.has_bias or hasattr(layer, "w13_bias"):
            return
        rows = intermediate_size_per_partition * (2 if self.moe.is_act_and_mul else 1)
        for name, length in (("w13_bias", rows), ("w2_bias", hidden_size)):
            bias = torch.nn.Parameter(torch.zeros(num_experts, length, dtype=params_dtype), requires_grad=False)
            layer.register_parameter(name, bias)
            set_weight_attrs(bias, extra)

    def pack(self, layer, w13, w2, input_scales):
        """Packs a loaded layer into `layer.w13_weight` (or `w2_weight`: see `Nvfp4Experts`), and frees the loaded tensors. Gate and up keep
        separate global scales. With `--enable-eplb` these tensors are buffers, and the parameters are their parts by expert, because vLLM
        moves rows of all parameters between ranks.

        :param w13: values, scales and global scales `[E, 2]` (`[E, 1]` without a gate) of gate and up.
        :param w2: values, scales and global scales `[E]` of down.
        :param input_scales: the checkpoint's global scales of tokens, `[E, 2]` (or `[E, 1]`) and `[E]`.
        """
        w13_bias, w2_bias = (layer.w13_bias.data, layer.w2_bias.data) if self.moe.has_bias else (None, None)
        in_turn = self.moe.activation == MoEActivation.SWIGLUOAI  # gpt-oss
        gate, up, biases = serving.split_rows(w13, w13_bias, self.moe.is_act_and_mul, in_turn)
        packed = serving.pack_experts(
            layer.layer_name,
            gate,
            up,
            nvfp4.Quantized(*w2),
            self.tokens,
            dtype=self.moe.in_dtype,
            activation=activation_of(self.moe),
            biases=(*biases, w2_bias) if self.moe.has_bias else None,
            input_scales=input_scales,
        )
        for name in [name for name, _ in layer.named_parameters(recurse=False) if name.startswith(("w13_", "w2_"))]:
            delattr(layer, name)
        is_moved = self.moe.moe_parallel_config.enable_eplb
        for name, weights in (("w13_weight", packed.plain), ("w2_weight", packed.other)):
            if is_moved:
                layer.register_buffer(name, weights, persistent=False)
            else:
                layer.register_parameter(name, torch.nn.Parameter(weights, requires_grad=False))
        for number, part in enumerate(packed.parts if is_moved else ()):
            layer.register_parameter(f"nvfp4_part_{number}", torch.nn.Parameter(part, requires_grad=False))
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        experts = self.experts_cls(moe_config=self.moe, quant_config=self.moe_quant_config)
        experts.packed = serving.Experts(self.tokens, packed.options)
        self.moe_kernel = seams.moe_kernel(self.moe, self.moe_quant_config, layer._expert_routing_tables(), experts)

    def get_fused_moe_quant_config(self, layer):
        return seams.quant_config()


class ModelOptNvfp4MoE(_Packed, ModelOptNvFp4FusedMoE):
    """Experts of a ModelOpt checkpoint."""

    def __init__(self, quant_config, moe_config, tokens):
        # Skips ModelOptNvFp4FusedMoE's constructor, which chooses among vLLM's kernels.
        FusedMoEMethodBase.__init__(self, moe_config)
        self.quant_config, self.tokens = quant_config, tokens

    def process_weights_after_loading(self, layer):
        self.pack(
            layer,
            (layer.w13_weight.data, layer.w13_weight_scale.data, layer.w13_weight_scale_2.data.float()),
            (layer.w2_weight.data, layer.w2_weight_scale.data, layer.w2_weight_scale_2.data.float()),
            (layer.w13_input_scale.data, layer.w2_input_scale.data),
        )


class CompressedTensorsNvfp4MoE(_Packed, CompressedTensorsW4A4Nvfp4MoEMethod):
    """Experts of a compressed-tensors checkpoint."""

    def __init__(self, moe_config, tokens):
        FusedMoEMethodBase.__init__(self, moe_config)
        self.group_size, self.tokens = nvfp4.BLOCK, tokens

    def process_weights_after_loading(self, layer):
        # The format stores divisors.
        self.pack(
            layer,
            (layer.w13_weight_packed.data, layer.w13_weight_scale.data, 1.0 / layer.w13_weight_global_scale.data),
            (layer.w2_weight_packed.data, layer.w2_weight_scale.data, 1.0 / layer.w2_weight_global_scale.data),
            (1.0 / layer.w13_input_global_scale.data, 1.0 / layer.w2_input_global_scale.data),
        )


# vLLM's loaders know a method by the name of its class.
ModelOptNvfp4MoE.__name__ = ModelOptNvFp4FusedMoE.__name__
CompressedTensorsNvfp4MoE.__name__ = CompressedTensorsW4A4Nvfp4MoEMethod.__name__
