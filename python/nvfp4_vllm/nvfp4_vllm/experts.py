"""The experts of a layer, with the interface of vLLM's modular kernels."""

import nvfp4
import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization.utils.quant_utils import kNvfp4Dynamic, kNvfp4Static
from vllm.platforms import current_platform


class Nvfp4Experts(mk.FusedMoEExpertsModular):
    """Gate, up and down of all experts and the weighted sum of each token's rows, as one operator.

    Tokens stay in 16 bits, with or without input scales in the checkpoint.
    """

    @staticmethod
    def activation_format():
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device():
        return current_platform.is_cuda() and current_platform.is_device_capability((9, 0))

    @staticmethod
    def _supports_no_act_and_mul():
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key, activation_key):
        return weight_key == kNvfp4Static and activation_key in (None, kNvfp4Dynamic)

    @staticmethod
    def _supports_activation(activation):
        return activation == MoEActivation.SILU

    @staticmethod
    def _supports_parallel_config(moe_parallel_config):
        # With tensor and expert parallelism every rank sees all tokens. Kernels that send tokens to experts are untested.
        return not moe_parallel_config.use_all2all_kernels

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
        return (
            config.num_local_experts,
            a1.shape[0],
            2 * config.intermediate_size_per_partition,
            a1.shape[1],
            topk_ids.shape[1],
        )

    def workspace_shapes(
        self, M, N, K, topk, global_num_experts, local_num_experts, expert_tokens_meta, activation
    ):
        # `local_num_experts` is the first dimension of the packed weights.
        needed = nvfp4.moe_workspace_bytes(M, topk, K, N // 2, self.moe_config.num_local_experts)
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
        nvfp4.moe(
            hidden_states,
            topk_ids.to(torch.int32),
            topk_weights.to(torch.float32),
            w1,
            self.moe_config.num_local_experts,
            self.moe_config.intermediate_size_per_partition,
            expert_map=expert_map,
            out=output,
            workspace=workspace2.view(-1).view(torch.uint8),
        )
