"""vLLM's quantization configurations, changed to give `nvfp4` the layers that it supports."""

from nvfp4 import serving
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
    CompressedTensorsLinearMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsW4A4Fp4
from vllm.model_executor.layers.quantization.modelopt import (
    ModelOptMixedPrecisionConfig,
    ModelOptNvFp4Config,
)

from . import choices, linear, methods, seams
from .choices import CHOICES, Left


class _Serving(serving.Serving):
    """Gives layers to `nvfp4`, and vLLM all others."""

    engine = staticmethod(choices.engine)
    choices = CHOICES

    def ours(self, layer, prefix):
        if isinstance(layer, RoutedExperts):
            return self.of_experts(layer, prefix)
        with seams.kernels_left_open() as opened:
            theirs = super(serving.Serving, self).get_quant_method(layer, prefix)
            method = self.of_linear(theirs, layer, prefix)
        if method is None and opened:
            raise Left("vLLM transforms its numbers")
        return method

    def of_linear(self, theirs, layer, prefix):
        """Returns our method in place of vLLM's, `theirs`, for a linear layer of ModelOpt; `None` for other layers."""
        quantization = seams.input_format(theirs)
        if quantization is None:
            return None
        method = linear.Nvfp4Linear(theirs, linear.check(layer, quantization))
        CHOICES.serve("linear layers", prefix, method.tokens)
        return method


class ModelOptNvfp4(_Serving, ModelOptNvFp4Config):
    """`quant_method: modelopt`, `quant_algo: NVFP4` or `W4A16_NVFP4`."""

    def of_experts(self, layer, prefix):
        return None if self.is_layer_excluded(prefix) else _of_experts(self, layer, prefix)


class ModelOptMixed(_Serving, ModelOptMixedPrecisionConfig):
    """`quant_algo: MIXED_PRECISION`: some layers are NVFP4."""

    def of_experts(self, layer, prefix):
        if self.is_layer_excluded(prefix):
            return None
        config = {"NVFP4": self.nvfp4_config, "W4A16_NVFP4": self.w4a16_nvfp4_config}.get(self._resolve_quant_algo(prefix))
        return None if config is None else _of_experts(config, layer, prefix)


def _of_experts(config, layer, prefix):
    """Returns our method for experts of ModelOpt."""
    # Since 0.31 a user can choose how tokens are quantized.
    if getattr(config, "moe_activation_override", None) is not None:
        raise Left("the quantization of tokens is configured")
    method = methods.ModelOptNvfp4MoE(config, layer.moe_config, methods.check(layer, prefix))
    CHOICES.serve("experts", prefix, method.tokens)
    return method


class CompressedTensors(_Serving, CompressedTensorsConfig):
    """`quant_method: compressed-tensors`, `format: nvfp4-pack-quantized`."""

    def of_experts(self, layer, prefix):
        """Serves experts whose projections have one scheme with NVFP4 weights, and with NVFP4 or unquantized inputs."""
        self._add_fused_moe_to_target_scheme_map()
        schemes = [self.get_scheme_dict(layer, f"{prefix}.0.{name}_proj") for name in ("gate", "up", "down")]
        if schemes[0] is None or not self._is_nvfp4_format(schemes[0].get("weights")):
            return None
        inputs = schemes[0].get("input_activations")
        if any(scheme != schemes[0] for scheme in schemes) or not (inputs is None or self._is_nvfp4_format(inputs)):
            raise Left("its projections have different schemes, or quantized inputs of another format")
        method = methods.CompressedTensorsNvfp4MoE(layer.moe_config, methods.check(layer, prefix))
        CHOICES.serve("experts", prefix, method.tokens)
        return method

    def of_linear(self, theirs, layer, prefix):
        # Only unmodified classes are replaced: a subclass may transform the layer's numbers.
        if type(theirs) is not CompressedTensorsLinearMethod or type(layer.scheme) is not CompressedTensorsW4A4Fp4:
            return None
        tokens = linear.check(layer, "w4a16" if layer.scheme.use_a16 else "w4a4")
        layer.scheme = linear.Nvfp4Scheme(layer.scheme, tokens)
        CHOICES.serve("linear layers", prefix, tokens)
        return theirs
