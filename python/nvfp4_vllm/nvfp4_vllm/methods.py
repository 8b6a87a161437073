"""The `quant_method` of layers of experts: vLLM loads the weights, then `nvfp4` packs them."""

import nvfp4
import torch
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import make_nvfp4_moe_kernel
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4 import (
    CompressedTensorsW4A4Nvfp4MoEMethod,
)
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4FusedMoE
from vllm.model_executor.layers.quantization.utils.quant_utils import kNvfp4Static

from .experts import Nvfp4Experts


def serves(layer, name):
    """Whether `nvfp4` computes a layer of experts. `False` if the user has chosen another backend.

    :raises ValueError: if the layer is supported except for the intermediate size per rank.
    """
    config = layer.moe_config
    if config.moe_backend != "auto" or config.swiglu_limit is not None or config.has_bias:
        return False
    supported, _ = Nvfp4Experts.is_supported_config(
        Nvfp4Experts, config, kNvfp4Static, None, Nvfp4Experts.activation_format()
    )
    if not supported or config.in_dtype not in (torch.bfloat16, torch.float16):
        return False
    size, ranks = config.intermediate_size_per_partition, config.moe_parallel_config.tp_size
    if size % nvfp4.BLOCK:
        raise ValueError(
            f"{name}: the intermediate size {size * ranks} leaves {size} for each of {ranks} ranks, which is not a multiple of"
            f" {nvfp4.BLOCK}, and ranks cannot share a block; use fewer ranks or expert parallelism"
        )
    return True


class _Packed(FusedMoEMethodBase):
    """A layer whose experts `nvfp4` has packed."""

    # A single expert's packed weights cannot be moved to another rank.
    supports_eplb = False
    experts_cls = Nvfp4Experts
    use_global_sf = False

    def pack(self, layer, w13, w13_scale, w13_global, w2, w2_scale, w2_global):
        """Packs a loaded layer into `layer.w13_weight`, and frees the loaded tensors. Gate and up keep separate global scales."""
        middle = w13.shape[1] // 2
        gate, up = slice(0, middle), slice(middle, None)

        def half(part, column):
            return nvfp4.Quantized(w13.data[:, part], w13_scale.data[:, part], w13_global.data[:, column].float())

        down = nvfp4.Quantized(w2.data, w2_scale.data, w2_global.data.float())
        packed = nvfp4.Moe(half(gate, 0), half(up, 1), down, dtype=self.moe.in_dtype)
        for name in [name for name, _ in layer.named_parameters(recurse=False) if name.startswith(("w13_", "w2_"))]:
            delattr(layer, name)
        none = torch.empty(0, dtype=torch.uint8, device=packed.weights.device)
        for name, tensor in (("w13_weight", packed.weights), ("w2_weight", none)):
            layer.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        self.moe_kernel = make_nvfp4_moe_kernel(
            moe_quant_config=self.moe_quant_config,
            moe_config=self.moe,
            experts_cls=self.experts_cls,
            routing_tables=layer._expert_routing_tables(),
        )

    def get_fused_moe_quant_config(self, layer):
        # Tokens are not quantized, and all scales are in the packed weights.
        return FusedMoEQuantConfig.make(quant_dtype=None, weight_dtype="nvfp4")


class ModelOptNvfp4MoE(_Packed, ModelOptNvFp4FusedMoE):
    """Experts of a ModelOpt checkpoint."""

    def __init__(self, quant_config, moe_config):
        # Skips ModelOptNvFp4FusedMoE's constructor, which chooses among vLLM's kernels.
        FusedMoEMethodBase.__init__(self, moe_config)
        self.quant_config = quant_config

    def process_weights_after_loading(self, layer):
        self.pack(
            layer,
            layer.w13_weight,
            layer.w13_weight_scale,
            layer.w13_weight_scale_2,
            layer.w2_weight,
            layer.w2_weight_scale,
            layer.w2_weight_scale_2,
        )


class CompressedTensorsNvfp4MoE(_Packed, CompressedTensorsW4A4Nvfp4MoEMethod):
    """Experts of a compressed-tensors checkpoint."""

    def __init__(self, moe_config):
        FusedMoEMethodBase.__init__(self, moe_config)
        self.group_size = nvfp4.BLOCK

    def process_weights_after_loading(self, layer):
        # The format stores divisors.
        self.pack(
            layer,
            layer.w13_weight_packed,
            layer.w13_weight_scale,
            1.0 / layer.w13_weight_global_scale,
            layer.w2_weight_packed,
            layer.w2_weight_scale,
            1.0 / layer.w2_weight_global_scale,
        )
