"""Layers of experts: SGLang loads the weights, then `nvfp4` packs them."""

import nvfp4
import torch
from nvfp4 import serving
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase
from sglang.srt.layers.quantization.compressed_tensors.schemes import CompressedTensorsMoEScheme
from sglang.srt.layers.quantization.compressed_tensors.schemes.compressed_tensors_w4a16_nvfp4_moe import CompressedTensorsW4A16Nvfp4MoE
from sglang.srt.layers.quantization.modelopt_quant import ModelOptNvFp4FusedMoEMethod

from . import choices, runner, seams
from .choices import CARDS, Left, Refused


def check(layer, name):
    """Checks that `nvfp4` computes a layer of experts, and returns its :class:`serving.Tokens`.

    :raises Left: if it does not; the message is the reason.
    :raises Refused: if the layer is supported except for the intermediate size per rank.
    """
    config = layer.moe_runner_config
    if seams.moe_backend() not in ("auto", runner.NAME):
        raise Left(f"--moe-runner-backend {seams.moe_backend()}")
    if seams.all_to_all() != "none":
        raise Left(f"--moe-a2a-backend {seams.all_to_all()} gives batches in formats of its own")
    if layer.with_bias:
        raise Left("SGLang has no parameters for biases of NVFP4 experts")
    if config.no_combine:
        raise Left("the rows of a token's experts are summed outside of the layer")
    word, _ = seams.activation_of(config)
    if word is None:
        numbers = f"alpha {config.gemm1_alpha}, limits {config.gemm1_clamp_limit} and {config.swiglu_limit}"
        raise Left(f"the activation {config.activation} with {numbers} is not one of nvfp4's")
    dtype = layer_dtype(config)
    size = layer.intermediate_size_per_partition
    if size % nvfp4.BLOCK:
        raise Refused(
            f"{name}: tensor parallelism leaves an intermediate size of {size} per rank, which is not a multiple of {nvfp4.BLOCK}, and"
            " ranks cannot share a block; use fewer ranks or expert parallelism"
        )
    tokens = choices.tokens("experts")
    try:
        runner.check_sizes(config, tokens)
    except ValueError as error:
        raise Left(f"its sizes: {error}") from error
    for token_format in tokens.formats:
        CARDS.check_moe(dtype, word, False, token_format)
    return tokens


def layer_dtype(config):
    """Returns the type of a layer's tokens.

    :raises Left: if `nvfp4` does not multiply it.
    """
    dtype = config.params_dtype or torch.get_default_dtype()
    if dtype not in (torch.bfloat16, torch.float16):
        raise Left(f"tokens of {dtype}")
    return dtype


class _Packed:
    """A layer whose experts `nvfp4` has packed."""

    def created(self, layer):
        """Marks input scales, which a checkpoint may lack, as not loaded."""
        for name, parameter in layer.named_parameters(recurse=False):
            if "input" in name:
                parameter.data.fill_(float("nan"))

    def create_moe_runner(self, layer, moe_runner_config):
        self.moe_runner_config = moe_runner_config
        self.runner = runner.create(moe_runner_config)

    def get_moe_runner_backend(self, layer):
        return self.runner.runner_backend

    def pack(self, layer, w13, w2, input_scales):
        """Packs a loaded layer into `layer.w13_weight` (16-bit tokens) and `layer.w2_weight` (another format), and frees the loaded
        tensors. Gate and up keep separate global scales; SGLang's Marlin kernel uses gate's for both, or refuses the layer.

        :param w13: values, scales and global scales `[E, 2]` (`[E, 1]` without a gate) of gate and up.
        :param w2: values, scales and global scales `[E]` of down.
        :param input_scales: the checkpoint's global scales of tokens.
        """
        config = self.moe_runner_config
        word, in_turn = seams.activation_of(config)
        gate, up, _ = serving.split_rows(w13, None, config.is_gated, in_turn)
        packed = serving.pack_experts(
            layer.layer_name,
            gate,
            up,
            nvfp4.Quantized(*w2),
            self.tokens,
            dtype=layer_dtype(config),
            activation=word,
            biases=None,
            input_scales=input_scales,
        )
        for name in [name for name, _ in layer.named_parameters(recurse=False) if name.startswith(("w13_", "w2_"))]:
            delattr(layer, name)
        for name, weights in (("w13_weight", packed.plain), ("w2_weight", packed.other)):
            layer.register_parameter(name, torch.nn.Parameter(weights, requires_grad=False))
        layer.w13_blockscale_swizzled = layer.w2_blockscale_swizzled = None
        self.experts = serving.Experts(self.tokens, packed.options)

    def compute(self, layer, dispatch_output):
        # SGLang puts the factor into the router's weights for some runners.
        in_weights = getattr(layer, "should_fuse_routed_scaling_factor_in_topk", False)
        scale = 1.0 if in_weights else self.moe_runner_config.routed_scaling_factor or 1.0
        return self.runner.run(dispatch_output, runner.Packed(self.experts, layer.w13_weight, layer.w2_weight, scale))


def _local(scales, layer):
    """Returns the input scales of this rank's experts; SGLang loads the scales of all experts."""
    first = layer.moe_ep_rank * layer.num_local_experts if len(scales) != layer.num_local_experts else 0
    return scales[first : first + layer.num_local_experts]


class Nvfp4Experts(_Packed, ModelOptNvFp4FusedMoEMethod):
    """Experts of a ModelOpt checkpoint."""

    # What `create_weights` of the base class asks.
    enable_flashinfer_trtllm_moe = use_flashinfer_trtllm_weight_layout = False
    enable_flashinfer_cutlass_moe = enable_flashinfer_cutedsl_moe = load_up_proj_weight_first = False

    def __init__(self, quant_config, tokens):
        # Skips ModelOptNvFp4FusedMoEMethod's constructor, which chooses among SGLang's kernels.
        FusedMoEMethodBase.__init__(self)
        self.quant_config, self.tokens = quant_config, tokens

    def create_weights(self, layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **extra_weight_attrs):
        super().create_weights(layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **extra_weight_attrs)
        self.created(layer)

    def process_weights_after_loading(self, layer):
        self.pack(
            layer,
            (layer.w13_weight.data, layer.w13_weight_scale.data, layer.w13_weight_scale_2.data.reshape(layer.num_local_experts, -1)),
            (layer.w2_weight.data, layer.w2_weight_scale.data, layer.w2_weight_scale_2.data),
            (_local(layer.w13_input_scale.data, layer), _local(layer.w2_input_scale.data, layer)),
        )

    def apply(self, layer, dispatch_output):
        return self.compute(layer, dispatch_output)


class Nvfp4ExpertsScheme(_Packed, CompressedTensorsW4A16Nvfp4MoE):
    """The scheme of experts of a compressed-tensors checkpoint."""

    def __init__(self, has_input_global_scale, tokens):
        CompressedTensorsMoEScheme.__init__(self)
        self.has_input_global_scale, self.group_size, self.tokens = has_input_global_scale, nvfp4.BLOCK, tokens

    def create_weights(self, layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **extra_weight_attrs):
        super().create_weights(layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **extra_weight_attrs)
        self.created(layer)

    def process_weights_after_loading(self, layer):
        # The format stores divisors.
        unknown = torch.full((layer.num_local_experts, 1), float("nan"))
        w13_inputs, w2_inputs = unknown, unknown.reshape(-1)
        if self.has_input_global_scale:
            w13_inputs, w2_inputs = 1.0 / layer.w13_input_global_scale.data, 1.0 / layer.w2_input_global_scale.data
        self.pack(
            layer,
            (layer.w13_weight_packed.data, layer.w13_weight_scale.data, 1.0 / layer.w13_weight_global_scale.data),
            (layer.w2_weight_packed.data, layer.w2_weight_scale.data, 1.0 / layer.w2_weight_global_scale.data),
            (w13_inputs, w2_inputs),
        )

    def apply_weights(self, layer, dispatch_output):
        return self.compute(layer, dispatch_output)


# SGLang's loaders know a method by the name of its class.
Nvfp4Experts.__name__ = ModelOptNvFp4FusedMoEMethod.__name__
Nvfp4ExpertsScheme.__name__ = CompressedTensorsW4A16Nvfp4MoE.__name__
