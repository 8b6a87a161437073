"""Linear layers: vLLM loads the weights, then `nvfp4` packs them."""

import nvfp4
import torch
from nvfp4 import serving
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    RowParallelLinear,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsScheme
from vllm.platforms import current_platform

from . import choices, seams
from .choices import CARDS, Left, Refused


def check(layer, quantization):
    """Checks that `nvfp4` computes a linear layer, and returns its :class:`serving.Tokens`.

    :param quantization: how vLLM would multiply tokens, `w4a16` or `w4a4`.
    :raises Left: if it does not; the message is the reason.
    """
    config = get_current_vllm_config()
    backend = seams.linear_backend(config.kernel_config, quantization)
    if backend != "auto":
        raise Left(f"the linear backend {backend} is configured for nvfp4_{quantization}")
    if not (current_platform.is_cuda() and current_platform.has_device_capability(80)):
        raise Left("the GPU is older than compute capability 8.0")
    # The output head does not have these attributes yet; its sizes are multiples of 64.
    for name in ("input_size", "output_size"):
        if getattr(layer, name, 0) % nvfp4.BLOCK:
            raise Left(f"{name} {getattr(layer, name)} is not a multiple of {nvfp4.BLOCK}")
    dtype = getattr(layer, "params_dtype", torch.bfloat16)
    if dtype not in (torch.bfloat16, torch.float16):
        raise Left(f"tokens of {dtype}")
    tokens = choices.tokens("linear", config)
    for token_format in tokens.formats:
        CARDS.check_linear(dtype, token_format)
    return tokens


class _Packed:
    """A layer that `nvfp4` packs. Each projection of a fused layer keeps its own global scale."""

    # vLLM's cache of processed weights keeps the formats of its own kernels.
    supports_pre_processed_weights = False

    def begin(self, layer, inputs, widths):
        """Checks a rank's sizes before the weights are created."""
        if wrong := [size for size in (*widths, inputs) if size % nvfp4.BLOCK]:
            raise Refused(
                f"{_name(layer)}: tensor parallelism leaves {wrong[0]} rows or columns of a projection per rank,"
                f" which is not a multiple of {nvfp4.BLOCK}, and ranks cannot share a block; use fewer ranks"
            )
        self.dtype = getattr(layer, "params_dtype", torch.get_default_dtype())

    def created(self, layer):
        """Marks input scales, which a checkpoint may lack, as not loaded."""
        for name, parameter in layer.named_parameters(recurse=False):
            if name.startswith("input_"):
                parameter.data.fill_(float("nan"))

    def pack(self, layer, weight, scales, global_scales, input_scales):
        """Packs a loaded layer into `layer.weight` (and `weight_of_many`, if the format depends on the number of tokens), and frees the
        loaded tensors.

        :param input_scales: the checkpoint's global scales of tokens, one per projection; `None` if the format has none.
        """
        if getattr(layer, "_retain_weight_for_gather", False):
            raise Refused(f"{_name(layer)}: rows of this layer's weights are read one by one; start vLLM with --linear-backend marlin")
        bias = getattr(layer, "bias", None)
        # If outputs are summed over ranks, only one rank adds the bias.
        is_other_rank = isinstance(layer, RowParallelLinear) and layer.tp_rank > 0
        self.has_bias = bias is not None and not layer.skip_bias_add and not is_other_rank
        matrix = nvfp4.Quantized(weight.data, scales.data, global_scales.data.float())
        weights = serving.pack_linear(
            matrix,
            bias.data if self.has_bias else None,
            self.tokens,
            dtype=self.dtype,
            rows=layer.logical_widths,
            input_scales=None if input_scales is None else input_scales.data,
        )
        for name in [name for name, _ in layer.named_parameters(recurse=False) if name != "bias"]:
            delattr(layer, name)
        for name, tensor in weights.items():
            layer.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))

    def compute(self, layer, x, bias):
        out = serving.linear(layer, x, layer.output_size_per_partition, self.tokens)
        return out if bias is None or self.has_bias else out + bias


def _name(layer):
    return getattr(layer, "prefix", "lm_head")


# vLLM has a list of method names whose parameters load themselves.
@register_weight_loader_v2_supported_method
class Nvfp4Linear(_Packed, LinearMethodBase):
    """A layer of a ModelOpt checkpoint. `theirs` is vLLM's method, which creates the parameters and does nothing else."""

    def __init__(self, theirs, tokens):
        self.theirs, self.tokens = theirs, tokens

    def create_weights(self, layer, input_size_per_partition, output_partition_sizes, *others, **named):
        self.begin(layer, input_size_per_partition, output_partition_sizes)
        with seams.kernels_left_open():
            self.theirs.kernel = seams.OpenKernel()
            self.theirs.create_weights(layer, input_size_per_partition, output_partition_sizes, *others, **named)
        self.created(layer)

    def process_weights_after_loading(self, layer):
        self.pack(layer, layer.weight, layer.weight_scale, layer.weight_scale_2, getattr(layer, "input_scale", None))

    def apply(self, layer, x, bias=None):
        return self.compute(layer, x, bias)


class Nvfp4Scheme(_Packed, CompressedTensorsScheme):
    """The scheme of a compressed-tensors layer, `format: nvfp4-pack-quantized`. `theirs` is vLLM's scheme, which creates the parameters."""

    def __init__(self, theirs, tokens):
        self.theirs, self.tokens = theirs, tokens

    @classmethod
    def get_min_capability(cls):
        return 80

    def create_weights(self, layer, output_partition_sizes, input_size_per_partition, *others, **named):
        self.begin(layer, input_size_per_partition, output_partition_sizes)
        self.theirs.create_weights(layer, output_partition_sizes, input_size_per_partition, *others, **named)
        self.created(layer)

    def process_weights_after_loading(self, layer):
        # The format stores divisors.
        scales = getattr(layer, "input_global_scale", None)
        self.pack(
            layer, layer.weight_packed, layer.weight_scale, 1.0 / layer.weight_global_scale.data, None if scales is None else 1.0 / scales.data
        )

    def apply_weights(self, layer, x, bias=None):
        return self.compute(layer, x, bias)
