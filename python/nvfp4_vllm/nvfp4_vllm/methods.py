"""The `quant_method` of layers of experts: vLLM loads the weights, then `nvfp4` packs them."""

import functools

import nvfp4
import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4 import (
    CompressedTensorsW4A4Nvfp4MoEMethod,
)
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4FusedMoE
from vllm.model_executor.layers.quantization.utils.quant_utils import kNvfp4Static
from vllm.model_executor.utils import set_weight_attrs

from . import cards, seams
from .choices import Left, Refused, Tokens
from .experts import Nvfp4Experts, activation_of


def check(layer, name):
    """Checks that `nvfp4` computes a layer of experts, and returns its :class:`Tokens`.

    :raises Left: if it does not; the message is the reason.
    :raises Refused: if the layer is supported except for the intermediate size per rank.
    """
    config = layer.moe_config
    if config.moe_backend != "auto":
        raise Left(f"--moe-backend {config.moe_backend}")
    if config.moe_parallel_config.enable_eplb:
        raise Left("--enable-eplb moves the weights of single experts between ranks, and nvfp4 packs a layer's experts together")
    if config.is_lora_enabled:
        raise Left("LoRA")
    supported, reason = Nvfp4Experts.is_supported_config(Nvfp4Experts, config, kNvfp4Static, None, Nvfp4Experts.activation_format())
    if not supported:
        raise Left(reason)
    activation = activation_of(config)
    if activation is None:
        numbers = f"limit {config.swiglu_limit}, alpha {config.swiglu_alpha}, beta {config.swiglu_beta}"
        raise Left(f"the activation {config.activation.value} with {numbers} is not one of nvfp4's")
    if config.in_dtype not in (torch.bfloat16, torch.float16):
        raise Left(f"tokens of {config.in_dtype}")
    size, ranks = config.intermediate_size_per_partition, config.moe_parallel_config.tp_size
    if size % nvfp4.BLOCK:
        raise Refused(
            f"{name}: the intermediate size {size * ranks} leaves {size} for each of {ranks} ranks, which is not a multiple of"
            f" {nvfp4.BLOCK}, and ranks cannot share a block; use fewer ranks or expert parallelism"
        )
    tokens = Tokens("experts", get_current_vllm_config_or_none())
    try:
        nvfp4.moe_workspace_bytes(1, config.experts_per_token, config.hidden_dim, size, config.num_local_experts, None, tokens.name)
    except ValueError as error:
        raise Left(f"its sizes: {error}") from error
    for token_format in {tokens.name, "16-bit"} if tokens.is_split else {tokens.name}:
        cards.check_moe(config.in_dtype, activation, config.has_bias, token_format)
    return tokens


class _Packed(FusedMoEMethodBase):
    """A layer whose experts `nvfp4` has packed."""

    # A single expert's packed weights cannot be moved to another rank.
    supports_eplb = False
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
        separate global scales.

        :param w13: values, scales and global scales `[E, 2]` (`[E, 1]` without a gate) of gate and up.
        :param w2: values, scales and global scales `[E]` of down.
        :param input_scales: the checkpoint's global scales of tokens, `[E, 2]` (or `[E, 1]`) and `[E]`.
        """
        gate, up, biases = self._halves(layer, w13)
        down = nvfp4.Quantized(*w2)
        pack = functools.partial(
            nvfp4.Moe, gate, up, down, dtype=self.moe.in_dtype, activation=activation_of(self.moe), biases=biases
        )
        packed, none = {}, torch.empty(0, dtype=torch.uint8, device=down.values.device)
        options = {"activation": activation_of(self.moe), "biases": biases is not None, "token_format": self.tokens.name}
        if self.tokens.name == "16-bit" or self.tokens.is_split:
            packed["w13_weight"] = pack().weights
        if self.tokens.name != "16-bit":
            scales = self._scales_of_tokens(layer, input_scales) if self.tokens.name == "nvfp4" else None
            options["input_scales"] = scales is not None
            packed["w2_weight"] = pack(token_format=self.tokens.name, input_scales=scales).weights
        for name in [name for name, _ in layer.named_parameters(recurse=False) if name.startswith(("w13_", "w2_"))]:
            delattr(layer, name)
        for name in ("w13_weight", "w2_weight"):
            layer.register_parameter(name, torch.nn.Parameter(packed.get(name, none), requires_grad=False))
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        experts = self.experts_cls(moe_config=self.moe, quant_config=self.moe_quant_config)
        experts.configure(self.tokens, options)
        self.moe_kernel = seams.moe_kernel(self.moe, self.moe_quant_config, layer._expert_routing_tables(), experts)

    def _halves(self, layer, w13):
        """Returns gate (or `None`), up and the biases (or `None`)."""
        has_bias = self.moe.has_bias
        w13_bias, w2_bias = (layer.w13_bias.data, layer.w2_bias.data) if has_bias else (None, None)
        *parts, global_scales = w13
        if not self.moe.is_act_and_mul:
            up = nvfp4.Quantized(*parts, global_scales.reshape(-1))
            return None, up, (None, w13_bias, w2_bias) if has_bias else None
        rows = parts[0].shape[1]
        # gpt-oss has gate and up in turn. The packing reads views if an expert's rows are contiguous.
        in_turn = self.moe.activation == MoEActivation.SWIGLUOAI
        halves = (slice(0, rows, 2), slice(1, rows, 2)) if in_turn else (slice(0, rows // 2), slice(rows // 2, rows))

        def half(tensor, index):
            part = tensor[:, halves[index]]
            return part.contiguous() if in_turn else part

        gate, up = (nvfp4.Quantized(*(half(part, index) for part in parts), global_scales[:, index]) for index in (0, 1))
        return gate, up, (half(w13_bias, 0), half(w13_bias, 1), w2_bias) if has_bias else None

    def _scales_of_tokens(self, layer, input_scales):
        """Returns the checkpoint's input scales for `nvfp4`; `None` if it has none, and then each token has its own."""
        w13, w2 = (scales.float() for scales in input_scales)
        unknown = torch.cat([w13.isnan().flatten(), w2.isnan().flatten()])
        if unknown.all():
            return None
        if unknown.any():
            raise Refused(f"{layer.layer_name}: the checkpoint has input scales for some experts only; use another token format")
        return w13.amax(dim=1), w2

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
