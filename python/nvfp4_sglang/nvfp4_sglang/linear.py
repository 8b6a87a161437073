"""Linear layers: SGLang loads the weights, then `nvfp4` packs them."""

import nvfp4
import torch
from nvfp4 import serving
from sglang.srt.layers.linear import RowParallelLinear
from sglang.srt.layers.quantization.compressed_tensors.schemes.compressed_tensors_w4a16_nvfp4 import CompressedTensorsW4A16Fp4
from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4LinearMethod, ModelOptNvFp4A16LinearMethod

from . import choices, seams
from .choices import CARDS, Left, Refused


def check(layer):
    """Checks that `nvfp4` computes a linear layer, and returns its :class:`serving.Tokens`.

    :raises Left: if it does not; the message is the reason.
    """
    if seams.linear_backend() != "auto":
        raise Left(f"--fp4-gemm-backend {seams.linear_backend()}")
    # The output head does not have these attributes yet; its sizes are multiples of 64.
    for name in ("input_size", "output_size"):
        if getattr(layer, name, 0) % nvfp4.BLOCK:
            raise Left(f"{name} {getattr(layer, name)} is not a multiple of {nvfp4.BLOCK}")
    dtype = getattr(layer, "params_dtype", None) or torch.get_default_dtype()
    if dtype not in (torch.bfloat16, torch.float16):
        raise Left(f"tokens of {dtype}")
    tokens = choices.tokens("linear")
    for token_format in tokens.formats:
        CARDS.check_linear(dtype, token_format)
    return tokens


class _Packed:
    """A layer that `nvfp4` packs. Each projection of a fused layer keeps its own global scale."""

    def begin(self, layer, inputs, widths):
        """Checks a rank's sizes before the weights are created."""
        if wrong := [size for size in (*widths, inputs) if size % nvfp4.BLOCK]:
            raise Refused(
                f"{getattr(layer, 'prefix', 'a linear layer')}: tensor parallelism leaves {wrong[0]} rows or columns of a projection per"
                f" rank, which is not a multiple of {nvfp4.BLOCK}, and ranks cannot share a block; use fewer ranks"
            )

    def created(self, layer):
        """Marks input scales, which a checkpoint may lack, as not loaded."""
        for name, parameter in layer.named_parameters(recurse=False):
            if name.startswith("input_"):
                parameter.data.fill_(float("nan"))

    def pack(self, layer, weight, scales, global_scales, input_scales):
        """Packs a loaded layer into `layer.weight` (and `weight_of_many`, if the format depends on the number of tokens), and frees the
        loaded tensors.

        :param input_scales: the checkpoint's global scales of tokens, one per projection; `None` if it has none.
        """
        bias = getattr(layer, "bias", None)
        # If outputs are summed over ranks, only one rank adds the bias.
        is_other_rank = isinstance(layer, RowParallelLinear) and layer.tp_rank > 0
        self.has_bias = bias is not None and not getattr(layer, "skip_bias_add", False) and not is_other_rank
        weights = serving.pack_linear(
            nvfp4.Quantized(weight.data, scales.data, global_scales.data.float()),
            bias.data if self.has_bias else None,
            self.tokens,
            dtype=layer.params_dtype,
            rows=layer.logical_widths,
            input_scales=input_scales,
        )
        for name in [name for name, _ in layer.named_parameters(recurse=False) if name != "bias"]:
            delattr(layer, name)
        for name, tensor in weights.items():
            layer.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
        layer.output_size_per_partition = sum(layer.logical_widths)

    def compute(self, layer, x, bias):
        out = serving.linear(layer, x, layer.output_size_per_partition, self.tokens)
        return out if bias is None or self.has_bias else out + bias


class _ModelOpt(_Packed):
    def __init__(self, quant_config, tokens):
        # Skips the base class's constructor, which chooses among SGLang's kernels.
        self.quant_config, self.tokens = quant_config, tokens

    def create_weights(
        self, layer, input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype, **extra_weight_attrs
    ):
        self.begin(layer, input_size_per_partition, output_partition_sizes)
        super().create_weights(
            layer, input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype, **extra_weight_attrs
        )
        self.created(layer)

    def process_weights_after_loading(self, layer):
        self.pack(layer, layer.weight, layer.weight_scale, layer.weight_scale_2, layer.input_scale.data)

    def apply(self, layer, x, bias=None):
        return self.compute(layer, x, bias)


class Nvfp4Linear(_ModelOpt, ModelOptFp4LinearMethod):
    """`quant_algo: NVFP4`."""

    # Some models fuse a layer with this mode with others if SGLang's own kernels multiply its NVFP4 tokens.
    quant_mode = "nvfp4"


class Nvfp4A16Linear(_ModelOpt, ModelOptNvFp4A16LinearMethod):
    """`quant_algo: W4A16_NVFP4`."""


class Nvfp4Scheme(_Packed, CompressedTensorsW4A16Fp4):
    """The scheme of a compressed-tensors layer, `format: nvfp4-pack-quantized`."""

    def __init__(self, has_input_global_scale, tokens):
        super().__init__(has_input_global_scale)
        self.tokens = tokens

    def create_weights(self, layer, output_partition_sizes, input_size_per_partition, params_dtype, weight_loader, **kwargs):
        self.begin(layer, input_size_per_partition, output_partition_sizes)
        super().create_weights(layer, output_partition_sizes, input_size_per_partition, params_dtype, weight_loader, **kwargs)
        self.created(layer)

    def process_weights_after_loading(self, layer):
        # The format stores divisors.
        inputs = 1.0 / layer.input_global_scale.data if self.has_input_global_scale else None
        self.pack(layer, layer.weight_packed, layer.weight_scale, 1.0 / layer.weight_global_scale.data, inputs)

    def apply_weights(self, layer, x, bias=None):
        return self.compute(layer, x, bias)


# SGLang's loaders know a method by the name of its class.
Nvfp4Linear.__name__ = ModelOptFp4LinearMethod.__name__
Nvfp4A16Linear.__name__ = ModelOptNvFp4A16LinearMethod.__name__
