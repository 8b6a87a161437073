"""Linear layers: vLLM loads the weights, then `nvfp4` packs them."""

import nvfp4
import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    RowParallelLinear,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsW4A4Fp4
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4LinearMethod, ModelOptNvFp4W4A16LinearMethod
from vllm.platforms import current_platform


def serves(layer):
    """Whether `nvfp4` computes a linear layer. `False` if the user has chosen another backend."""
    if get_current_vllm_config().kernel_config.linear_backend != "auto":
        return False
    if not (current_platform.is_cuda() and current_platform.is_device_capability((9, 0))):
        return False
    # The output head does not have these attributes yet; its sizes are multiples of 64.
    sizes = getattr(layer, "input_size", 0), getattr(layer, "output_size", 0)
    dtype = getattr(layer, "params_dtype", torch.bfloat16)
    return dtype in (torch.bfloat16, torch.float16) and not any(size % nvfp4.BLOCK for size in sizes)


class _Kernel:
    """The part of a kernel's interface that vLLM uses while it creates a layer."""

    @staticmethod
    def input_quant_key():
        # Tokens are not quantized before the layer.
        return None


class _Packed:
    """A layer that `nvfp4` packs. Each projection of a fused layer keeps its own global scale."""

    def begin(self, layer, inputs, widths):
        """Checks a rank's sizes before the weights are created."""
        if wrong := [size for size in (*widths, inputs) if size % nvfp4.BLOCK]:
            raise ValueError(
                f"{getattr(layer, 'prefix', 'lm_head')}: tensor parallelism leaves {wrong[0]} rows or columns of a projection per rank,"
                f" which is not a multiple of {nvfp4.BLOCK}, and ranks cannot share a block; use fewer ranks"
            )
        self.dtype = getattr(layer, "params_dtype", torch.get_default_dtype())

    def pack(self, layer, weight, scales, global_scales):
        """Packs a loaded layer into `layer.weight`, and frees the loaded tensors."""
        weight, scales, global_scales = (tensor.data for tensor in (weight, scales, global_scales))
        bias = getattr(layer, "bias", None)
        # If outputs are summed over ranks, only one rank adds the bias.
        is_other_rank = isinstance(layer, RowParallelLinear) and layer.tp_rank > 0
        self.has_bias = bias is not None and not layer.skip_bias_add and not is_other_rank
        packed = nvfp4.Linear(
            nvfp4.Quantized(weight, scales, global_scales.float()),
            bias.data if self.has_bias else None,
            dtype=self.dtype,
            rows=layer.logical_widths,
        )
        for name in [name for name, _ in layer.named_parameters(recurse=False) if name != "bias"]:
            delattr(layer, name)
        layer.register_parameter("weight", torch.nn.Parameter(packed.weights, requires_grad=False))

    def compute(self, layer, x, bias):
        if x.stride(-2) % 8:
            x = x.contiguous()  # the rows' addresses are not multiples of 16 bytes
        out = torch.ops.nvfp4.linear(x, layer.weight, layer.output_size_per_partition)
        return out if bias is None or self.has_bias else out + bias


class _ModelOpt(_Packed):
    """A layer of a ModelOpt checkpoint."""

    def __init__(self, quant_config):
        # Skips ModelOpt's constructor, which chooses among vLLM's kernels.
        LinearMethodBase.__init__(self)
        self.quant_config, self.kernel = quant_config, _Kernel()

    def create_weights(self, layer, input_size_per_partition, output_partition_sizes, *others, **named):
        self.begin(layer, input_size_per_partition, output_partition_sizes)
        super().create_weights(layer, input_size_per_partition, output_partition_sizes, *others, **named)

    def process_weights_after_loading(self, layer):
        self.pack(layer, layer.weight, layer.weight_scale, layer.weight_scale_2)

    def apply(self, layer, x, bias=None):
        return self.compute(layer, x, bias)


# vLLM has a list of method names whose parameters load themselves.
@register_weight_loader_v2_supported_method
class ModelOptNvfp4Linear(_ModelOpt, ModelOptNvFp4LinearMethod):
    """`quant_algo: NVFP4`."""


@register_weight_loader_v2_supported_method
class ModelOptNvfp4W4A16Linear(_ModelOpt, ModelOptNvFp4W4A16LinearMethod):
    """`quant_algo: W4A16_NVFP4`."""


class CompressedTensorsNvfp4(_Packed, CompressedTensorsW4A4Fp4):
    """The scheme of a compressed-tensors layer, `format: nvfp4-pack-quantized`."""

    def __init__(self, use_a16):
        # Skips CompressedTensorsW4A4Fp4's constructor, which chooses among vLLM's kernels.
        self.use_a16, self.group_size, self.kernel = use_a16, nvfp4.BLOCK, _Kernel()

    def create_weights(self, layer, output_partition_sizes, input_size_per_partition, *others, **named):
        self.begin(layer, input_size_per_partition, output_partition_sizes)
        super().create_weights(layer, output_partition_sizes, input_size_per_partition, *others, **named)

    def process_weights_after_loading(self, layer):
        # The format stores divisors.
        self.pack(layer, layer.weight_packed, layer.weight_scale, 1.0 / layer.weight_global_scale)

    def apply_weights(self, layer, x, bias=None):
        return self.compute(layer, x, bias)


OURS = {
    ModelOptNvFp4LinearMethod: ModelOptNvfp4Linear,
    ModelOptNvFp4W4A16LinearMethod: ModelOptNvfp4W4A16Linear,
}


def instead_of(method, layer):
    """Returns our method for a ModelOpt layer that vLLM computes in NVFP4 and `nvfp4` supports, else `method`."""
    ours = OURS.get(type(method))
    return ours(method.quant_config) if ours is not None and serves(layer) else method
