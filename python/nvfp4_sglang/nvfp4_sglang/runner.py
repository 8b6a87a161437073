"""SGLang's runner of experts: it takes a dispatched batch and returns the experts' weighted sums."""

from dataclasses import dataclass

import nvfp4
import torch
from sglang.srt.layers.moe.moe_runner import runner
from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore, MoeQuantInfo
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
from sglang.srt.layers.moe.topk import TopKOutputChecker
from sglang.srt.layers.moe.utils import resolve_moe_runner_backend

from .choices import Refused

NAME = "nvfp4"
"""The runner's name in SGLang."""


def register():
    """Registers the runner, once per process."""
    if NAME not in runner._CUSTOM_RUNNER_CORE_FACTORIES:
        runner.register_moe_runner_core(NAME, Nvfp4Runner)


def create(config):
    """Returns SGLang's runner of a layer's experts."""
    return runner.MoeRunner(resolve_moe_runner_backend(NAME), config)


@dataclass
class Packed(MoeQuantInfo):
    """A packed layer, for one call."""

    experts: object
    """A :class:`nvfp4.serving.Experts`."""
    plain: torch.Tensor
    """Weights for 16-bit tokens."""
    other: torch.Tensor
    """Weights for the other format."""
    scale: float
    """Factor of the output."""


class Nvfp4Runner(DispatchMoeRunnerCore):
    """Runs gate, up and down of all experts, and the weighted sum of each token's rows, as one operator."""

    @property
    def runner_backend(self):
        return resolve_moe_runner_backend(NAME)

    def run_from_dispatch(self, dispatch_output, quant_info, runner_config, hooks=None):
        """Computes the experts of this rank. Experts of other ranks have the id -1, and contribute nothing."""
        if hooks is not None:
            raise Refused("LoRA on NVFP4 experts: nvfp4's runner has none; start SGLang with --moe-runner-backend lora_marlin")
        routes = dispatch_output.topk_output
        if not TopKOutputChecker.format_is_standard(routes):
            routes = routes.to_standard()
        x, weights = dispatch_output.hidden_states, routes.topk_weights.to(torch.float32)
        on_input = runner_config.apply_router_weight_on_input
        if quant_info.scale != 1.0 and not on_input:
            weights = weights * quant_info.scale
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        quant_info.experts.compute(
            x,
            routes.topk_ids,
            weights,
            quant_info.plain,
            quant_info.other,
            runner_config.num_local_experts,
            runner_config.intermediate_size_per_partition,
            out=out,
            **({"weights_on_input": True} if on_input else {}),
        )
        if quant_info.scale != 1.0 and on_input:
            out *= quant_info.scale
        return StandardCombineInput(hidden_states=out)


def check_sizes(config, tokens):
    """Checks that `nvfp4` computes experts of a layer's sizes.

    :raises ValueError: if it does not.
    """
    sizes = config.top_k or 1, config.hidden_size, config.intermediate_size_per_partition, config.num_local_experts
    for token_format in tokens.formats:
        nvfp4.moe_workspace_bytes(1, *sizes, None, token_format)
