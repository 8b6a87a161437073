"""SGLang's quantization configurations, changed to give `nvfp4` the layers that it supports."""

from nvfp4 import serving
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
    CompressedTensorsFusedMoEMethod,
    CompressedTensorsLinearMethod,
)
from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4Config, ModelOptMixedPrecisionConfig
from sglang.srt.layers.quantization.utils import is_layer_skipped
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead

from . import choices, linear, methods
from .choices import CHOICES, Left


class _Serving(serving.Serving):
    """Gives layers to `nvfp4`, and SGLang all others."""

    engine = staticmethod(choices.engine)
    choices = CHOICES

    def ours(self, layer, prefix):
        is_linear = isinstance(layer, (LinearBase, ParallelLMHead))
        if not is_linear and not isinstance(layer, FusedMoE):
            return None
        return self.of_linear(layer, prefix) if is_linear else self.of_experts(layer, prefix)


class _ModelOpt(_Serving):
    def of_linear(self, layer, prefix):
        config, algorithm = self.algorithm_of(layer, prefix)
        kinds = {"NVFP4": linear.Nvfp4Linear, "W4A16_NVFP4": linear.Nvfp4A16Linear}
        if algorithm not in kinds:
            return None
        if config.is_awq:
            raise Left("its tokens are scaled per channel (NVFP4_AWQ)")
        tokens = linear.check(layer)
        CHOICES.serve("linear layers", prefix, tokens)
        return kinds[algorithm](config, tokens)

    def of_experts(self, layer, prefix):
        config, algorithm = self.algorithm_of(layer, prefix)
        if algorithm not in ("NVFP4", "W4A16_NVFP4"):
            return None
        tokens = methods.check(layer, prefix)
        CHOICES.serve("experts", prefix, tokens)
        return methods.Nvfp4Experts(config, tokens)

    def is_excluded(self, layer, prefix):
        of_linear = isinstance(layer, (LinearBase, ParallelLMHead))
        return self.is_layer_excluded(prefix) or of_linear and is_layer_skipped(prefix, self.exclude_modules, self.packed_modules_mapping)


class ModelOptNvfp4(_ModelOpt, ModelOptFp4Config):
    """`quant_algo: NVFP4` or `W4A16_NVFP4`."""

    def algorithm_of(self, layer, prefix):
        """Returns the configuration and the algorithm of a layer; `None` for one that is not NVFP4 in the checkpoint."""
        if not self.is_checkpoint_nvfp4_serialized or self.is_excluded(layer, prefix):
            return self, None
        return self, "W4A16_NVFP4" if self.is_w4a16 else "NVFP4"


class ModelOptMixed(_ModelOpt, ModelOptMixedPrecisionConfig):
    """`quant_algo: MIXED_PRECISION`: some layers are NVFP4."""

    def algorithm_of(self, layer, prefix):
        """Returns the configuration and the algorithm of a layer; `None` for one that is not NVFP4 in the checkpoint."""
        algorithm = None if self.is_excluded(layer, prefix) else self.resolve_quant_algo(prefix)
        return (self.nvfp4a16_config if algorithm == "W4A16_NVFP4" else self.nvfp4_config), algorithm


class CompressedTensors(_Serving, CompressedTensorsConfig):
    """`quant_method: compressed-tensors`, `format: nvfp4-pack-quantized`."""

    def inputs_of(self, scheme):
        """Returns whether an NVFP4 scheme quantizes inputs; `None` if it is not NVFP4."""
        weights, inputs = (scheme.get(name) for name in ("weights", "input_activations")) if scheme else (None, None)
        if self._is_fp4a16_nvfp4(weights, inputs):
            return False
        return True if self._is_fp4a4_nvfp4(weights, inputs) else None

    def of_linear(self, layer, prefix):
        # Output heads have rules of their own.
        if self.linear_fp8_config is not None or isinstance(layer, ParallelLMHead):
            return None
        quantizes_inputs = self.inputs_of(self.get_scheme_dict(layer, prefix))
        if quantizes_inputs is None:
            return None
        tokens = linear.check(layer)
        layer.scheme = linear.Nvfp4Scheme(quantizes_inputs, tokens)
        CHOICES.serve("linear layers", prefix, tokens)
        return CompressedTensorsLinearMethod(self)

    def of_experts(self, layer, prefix):
        """Serves experts whose projections have one scheme with NVFP4 weights, and with NVFP4 or unquantized inputs."""
        self._add_fused_moe_to_target_scheme_map()
        schemes = [self.get_scheme_dict(layer, f"{prefix}.0.{name}_proj") for name in ("gate", "up", "down")]
        quantizes_inputs = self.inputs_of(schemes[0])
        if quantizes_inputs is None:
            return None
        if any(scheme != schemes[0] for scheme in schemes):
            raise Left("its projections have different schemes")
        tokens = methods.check(layer, prefix)
        layer.scheme = methods.Nvfp4ExpertsScheme(quantizes_inputs, tokens)
        CHOICES.serve("experts", prefix, tokens)
        return CompressedTensorsFusedMoEMethod(self)
