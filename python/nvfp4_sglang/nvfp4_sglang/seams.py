"""The places where this package and SGLang meet.

:func:`check` looks for them in the SGLang that is installed. A version without one of them is refused as a whole, before any layer exists.
"""

import inspect

from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
from sglang.srt.layers.moe.utils import get_moe_a2a_backend, get_moe_runner_backend
from sglang.srt.layers.quantization import modelopt_quant
from sglang.srt.layers.quantization.compressed_tensors import compressed_tensors
from sglang.srt.runtime_context import get_exec


class Missing(Exception):
    """A place that this version of SGLang does not have."""


def moe_backend():
    """Returns the runner of experts that the user has chosen, `auto` if none."""
    return get_moe_runner_backend().value


def all_to_all():
    """Returns the kernels that send tokens to experts of other ranks, `none` if each rank sees all tokens."""
    return get_moe_a2a_backend().value


def linear_backend():
    """Returns the kernels that the user has chosen for linear layers, `auto` if none."""
    return get_exec().kernel.fp4_gemm_runner_backend


def activation_of(config):
    """Returns `nvfp4`'s word for a layer's activation (`None` if it has none), and whether rows of gate and up alternate.

    The definitions follow SGLang's runner in Triton.
    """
    name, limit, slope = config.activation, config.gemm1_clamp_limit, config.gemm1_alpha
    if name == "silu" and config.is_gated:
        if slope is not None:
            known = limit is not None and config.gemm1_beta in (None, 1.0)
            return (f"gpt-oss={slope},{limit}" if known else None), config.gate_up_interleaved
        if limit is not None:  # the limit of the result of SiLU, not of its argument
            return (f"swiglu-step={limit}" if config.swiglu_limit is None else None), False
        return ("silu" if config.swiglu_limit is None else f"silu-limit={config.swiglu_limit}"), False
    if name == "situ" and config.is_gated:
        # SGLang's default for the number of gate is 4.
        beta = 4.0 if slope is None else slope
        return (f"situ={beta}" if limit is None else f"situ={beta},{limit}"), False
    if (slope, limit, config.swiglu_limit) != (None, None, None):
        return None, False
    known = {("gelu", True): "gelu", ("gelu_tanh", True): "gelu-tanh", ("relu2", False): "relu2"}
    return known.get((name, config.is_gated)), False


def check():
    """Looks for every seam.

    :raises Missing: if one is missing or has other arguments.
    """
    from . import configs, linear, methods

    known = MoeRunnerConfig.__dataclass_fields__
    wanted = (
        "activation apply_router_weight_on_input gate_up_interleaved gemm1_alpha gemm1_beta gemm1_clamp_limit hidden_size is_gated"
        " intermediate_size_per_partition no_combine num_local_experts routed_scaling_factor swiglu_limit top_k"
    )
    for name in wanted.split():
        if name not in known:
            raise Missing(f"MoeRunnerConfig has no {name}")
    for module, names in (
        (modelopt_quant, "ModelOptFp4Config ModelOptMixedPrecisionConfig ModelOptFp4LinearMethod ModelOptNvFp4A16LinearMethod"),
        (compressed_tensors, "CompressedTensorsConfig CompressedTensorsLinearMethod CompressedTensorsW4A16Fp4"),
    ):
        for name in names.split():
            if not hasattr(module, name):
                raise Missing(f"{module.__name__} has no {name}")
    ours = (configs.ModelOptNvfp4, configs.ModelOptMixed, configs.CompressedTensors, methods.Nvfp4Experts, methods.Nvfp4ExpertsScheme)
    for cls in (*ours, linear.Nvfp4Linear, linear.Nvfp4A16Linear, linear.Nvfp4Scheme):
        _check_overrides(cls)


def _check_overrides(cls):
    """Checks that the methods of `cls` take what SGLang's methods of the same names take."""
    if missing := sorted(getattr(cls, "__abstractmethods__", ())):
        raise Missing(f"{cls.__name__} lacks {', '.join(missing)}")
    for base in (base for base in cls.__mro__ if base.__module__.startswith("nvfp4_sglang")):
        for name in (name for name, ours in vars(base).items() if inspect.isfunction(ours) and not name.startswith("__")):
            theirs = next((vars(other)[name] for other in cls.__mro__ if other.__module__.startswith("sglang.") and name in vars(other)), None)
            if not inspect.isfunction(theirs):
                continue
            wanted, taken = (inspect.signature(function).parameters for function in (theirs, getattr(cls, name)))
            if any(parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) for parameter in (*wanted.values(), *taken.values())):
                continue
            if list(wanted) != list(taken):
                raise Missing(f"{theirs.__qualname__} takes {', '.join(wanted)}; this plugin knows {', '.join(taken)}")
