"""vLLM's quantization configurations, changed to give `nvfp4` the layers that it supports."""

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

from . import linear
from .methods import CompressedTensorsNvfp4MoE, ModelOptNvfp4MoE, serves


class ModelOptNvfp4(ModelOptNvFp4Config):
    """`quant_method: modelopt`, `quant_algo: NVFP4` or `W4A16_NVFP4`."""

    def get_quant_method(self, layer, prefix):
        if isinstance(layer, RoutedExperts) and not self.is_layer_excluded(prefix) and serves(layer, prefix):
            return ModelOptNvfp4MoE(self, layer.moe_config)
        return linear.instead_of(super().get_quant_method(layer, prefix), layer)


class ModelOptMixed(ModelOptMixedPrecisionConfig):
    """`quant_algo: MIXED_PRECISION`: some layers are NVFP4."""

    def get_quant_method(self, layer, prefix):
        if isinstance(layer, RoutedExperts) and not self.is_layer_excluded(prefix):
            config = {"NVFP4": self.nvfp4_config, "W4A16_NVFP4": self.w4a16_nvfp4_config}.get(self._resolve_quant_algo(prefix))
            if config is not None and serves(layer, prefix):
                return ModelOptNvfp4MoE(config, layer.moe_config)
        return linear.instead_of(super().get_quant_method(layer, prefix), layer)


class CompressedTensors(CompressedTensorsConfig):
    """`quant_method: compressed-tensors`, `format: nvfp4-pack-quantized`."""

    def get_quant_method(self, layer, prefix):
        if isinstance(layer, RoutedExperts) and self._experts_are_nvfp4(layer, prefix) and serves(layer, prefix):
            return CompressedTensorsNvfp4MoE(layer.moe_config)
        method = super().get_quant_method(layer, prefix)
        # Only unmodified classes are replaced: a subclass may transform the layer's numbers.
        if type(method) is CompressedTensorsLinearMethod and type(layer.scheme) is CompressedTensorsW4A4Fp4 and linear.serves(layer):
            layer.scheme = linear.CompressedTensorsNvfp4(layer.scheme.use_a16)
        return method

    def _experts_are_nvfp4(self, layer, prefix):
        """Whether all projections have one scheme with NVFP4 weights, and with NVFP4 or unquantized inputs."""
        self._add_fused_moe_to_target_scheme_map()
        schemes = [self.get_scheme_dict(layer, f"{prefix}.0.{name}_proj") for name in ("gate", "up", "down")]
        if schemes[0] is None or any(scheme != schemes[0] for scheme in schemes):
            return False
        inputs = schemes[0].get("input_activations")
        return self._is_nvfp4_format(schemes[0].get("weights")) and (inputs is None or self._is_nvfp4_format(inputs))
