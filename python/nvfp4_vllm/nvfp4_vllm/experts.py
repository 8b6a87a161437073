"""The experts of a layer, with the interface of vLLM's modular kernels."""

import nvfp4
import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization.utils.quant_utils import kNvfp4Dynamic, kNvfp4Static
from vllm.platforms import current_platform

GPT_OSS = 1.702, 7.0
"""The slope and the limit of `swigluoai`, constants of vLLM's kernels."""

STEP_LIMIT = 7.0
"""The limit of `swiglustep`, a constant of vLLM's kernels."""

WITHOUT_NUMBERS = {"GELU": "gelu", "GELU_TANH": "gelu-tanh", "RELU2": "relu2-gated", "RELU2_NO_MUL": "relu2"}
"""vLLM's names of activations without numbers, and `nvfp4`'s words."""

ACTIVATIONS = {*WITHOUT_NUMBERS, "SILU", "SITU", "SWIGLUOAI", "SWIGLUOAI_UNINTERLEAVE", "SWIGLUSTEP"}
"""vLLM's names of the activations that `nvfp4` has."""


def activation_of(config):
    """Returns `nvfp4`'s word for a layer's activation; `None` if it has none."""
    name, limit, slope = config.activation.name, config.swiglu_limit, config.swiglu_alpha
    offset = config.swiglu_beta or 0.0
    if name == "SILU" and slope in (None, 1.0) and offset == 0.0:
        return "silu" if limit is None else f"silu-limit={limit}"
    if name == "SWIGLUOAI" and slope in (None, GPT_OSS[0]) and limit in (None, GPT_OSS[1]):
        return "gpt-oss={},{}".format(*GPT_OSS)
    if name == "SWIGLUOAI_UNINTERLEAVE" and limit is not None:
        return f"swigluoai={1.0 if slope is None else slope},{limit},{offset}"
    if name == "SWIGLUSTEP" and limit in (None, STEP_LIMIT):
        return f"swiglu-step={STEP_LIMIT}"
    if limit is not None:
        return None
    if name == "SITU":
        return _situ(config)
    return WITHOUT_NUMBERS.get(name)


def _situ(config):
    """Returns the word of SiTU, which vLLM has since 0.27. A linear beta that is not positive changes nothing in vLLM's kernels."""
    beta, linear = config.activation_situ_beta, config.activation_situ_linear_beta
    if beta is None:
        return None
    return f"situ={beta}" if linear is None or linear <= 0 else f"situ={beta},{linear}"


class Nvfp4Experts(mk.FusedMoEExpertsModular):
    """Gate, up and down of all experts and the weighted sum of each token's rows, as one operator.

    `w1` has the weights packed for 16-bit tokens, `w2` those for another token format. One of them is empty, unless the format depends on
    the number of tokens.
    """

    packed = None
    """The layer's :class:`nvfp4.serving.Experts`, set after packing."""

    @staticmethod
    def activation_format():
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device():
        # The oldest GPU with bf16. `nvfp4` itself decides whether its kernels may run on this one.
        return current_platform.is_cuda() and current_platform.has_device_capability(80)

    @staticmethod
    def _supports_no_act_and_mul():
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key, activation_key):
        return weight_key == kNvfp4Static and activation_key in (None, kNvfp4Dynamic)

    @staticmethod
    def _supports_activation(activation):
        return activation.name in ACTIVATIONS

    @staticmethod
    def _supports_parallel_config(moe_parallel_config):
        # With tensor and expert parallelism every rank sees all tokens. With allgather_reducescatter a rank gets the tokens of all ranks,
        # and returns its experts' part of each token's sum.
        return not moe_parallel_config.use_all2all_kernels or moe_parallel_config.use_ag_rs_all2all_kernels

    @staticmethod
    def _supports_shape(hidden_dim):
        return hidden_dim % nvfp4.BLOCK == 0

    @staticmethod
    def _supports_batch_invariance():
        # Every sum goes along K in one fixed order, and a token's rows are added in the order of its choices.
        return True

    @property
    def expects_unquantized_inputs(self):
        return True

    def moe_problem_size(self, a1, w1, w2, topk_ids):
        # `w1` is the packed layer, whose shape does not contain the sizes.
        config = self.moe_config
        rows = config.intermediate_size_per_partition * (2 if config.is_act_and_mul else 1)
        return config.num_local_experts, a1.shape[0], rows, a1.shape[1], topk_ids.shape[1]

    def workspace_shapes(
        self, M, N, K, topk, global_num_experts, local_num_experts, expert_tokens_meta, activation
    ):
        config = self.moe_config
        # `local_num_experts` is the first dimension of the packed weights.
        sizes = M, topk, K, config.intermediate_size_per_partition, config.num_local_experts, None
        needed = max(nvfp4.moe_workspace_bytes(*sizes, name) for name in self.packed.tokens.formats)
        # The output shares memory with the first workspace, so this kernel uses the second. Its first dimension must be M.
        return (M, 0), (M, -(-needed // (2 * M))), (M, K)

    def finalize_weight_and_reduce_impl(self):
        return TopKWeightAndReduceNoOP()

    def apply(
        self,
        output,
        hidden_states,
        w1,
        w2,
        topk_weights,
        topk_ids,
        activation,
        global_num_experts,
        expert_map,
        a1q_scale,
        a2_scale,
        workspace13,
        workspace2,
        expert_tokens_meta,
        apply_router_weight_on_input,
    ):
        if apply_router_weight_on_input:
            # vLLM has already multiplied the tokens by the weights.
            topk_weights = torch.ones_like(topk_weights)
        self.packed.compute(
            hidden_states,
            topk_ids,
            topk_weights,
            w1,
            w2,
            self.moe_config.num_local_experts,
            self.moe_config.intermediate_size_per_partition,
            expert_map=expert_map,
            out=output,
            workspace=workspace2.view(-1).view(torch.uint8),
        )
