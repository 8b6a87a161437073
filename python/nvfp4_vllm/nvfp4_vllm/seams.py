"""The places where this package and vLLM meet. All of them are the same in vLLM 0.24 to 0.33, except where a function says how not.

:func:`check` looks for them in the vLLM that is installed. A version without one of them is refused as a whole, before any layer exists.
"""

import contextlib
import inspect

import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.config import VllmConfig
from vllm.config.kernel import KernelConfig
from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, FusedMoEQuantConfig
from vllm.model_executor.layers.quantization import modelopt
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import compressed_tensors_w4a4_nvfp4 as tensors
from vllm.model_executor.layers.quantization.utils.quant_utils import kNvfp4Dynamic, kNvfp4Static


class Missing(Exception):
    """A place that this version of vLLM does not have."""


# Linear layers.


class OpenKernel:
    """Stands for the kernel of a linear layer whose kernel vLLM must not choose."""

    @staticmethod
    def input_quant_key():
        # Tokens are not quantized before the layer.
        return None


@contextlib.contextmanager
def kernels_left_open():
    """Keeps vLLM from choosing kernels of NVFP4 linear layers. Some versions end loading there if no kernel of theirs fits.

    The value is a list of the kernels that were left open.
    """
    opened, chosen = [], [(module, module.init_nvfp4_linear_kernel) for module in (modelopt, tensors)]

    def leave_open(*arguments, **named):
        opened.append(OpenKernel())
        return opened[-1]

    for module, _ in chosen:
        module.init_nvfp4_linear_kernel = leave_open
    try:
        yield opened
    finally:
        for module, choose in chosen:
            module.init_nvfp4_linear_kernel = choose


def input_format(method):
    """Returns how vLLM would multiply tokens in a ModelOpt layer, `w4a16` or `w4a4`; `None` if its weights are not NVFP4.

    Until 0.29 each format has a class, since 0.30 all formats share one class with a specification.
    """
    # Only unmodified classes count: a subclass may transform the layer's numbers.
    kind = type(method)
    if kind is getattr(modelopt, "ModelOptLinearMethod", None):
        formats = {(kNvfp4Static, None): "w4a16", (kNvfp4Static, kNvfp4Dynamic): "w4a4"}
        return formats.get((method.spec.weight, method.spec.activation))
    formats = {
        getattr(modelopt, "ModelOptNvFp4W4A16LinearMethod", None): "w4a16",
        getattr(modelopt, "ModelOptNvFp4LinearMethod", None): "w4a4",
    }
    return formats.get(kind)


def linear_backend(config, quantization):
    """Returns the kernels that the user has chosen for linear layers: a choice per format (since 0.30) comes first."""
    per_format = getattr(config, "linear_backend_per_quant", None) or {}
    return per_format.get(f"nvfp4_{quantization}") or config.linear_backend


# Experts.


def moe_kernel(moe, quant_config, routing_tables, experts):
    """Returns vLLM's kernel around our experts. The oracle's function for that has other arguments since 0.25."""
    prepare = maybe_make_prepare_finalize(
        moe=moe, quant_config=quant_config, routing_tables=routing_tables, allow_new_interface=True, use_monolithic=False
    )
    if prepare is None or prepare.activation_format != experts.activation_format():
        raise Missing("vLLM prepares tokens in another format than the experts'")
    return mk.FusedMoEKernel(prepare, experts)


def quant_config():
    """Returns vLLM's description of experts whose tokens are not quantized and whose scales are inside the packed weights."""
    return FusedMoEQuantConfig.make(quant_dtype=None, weight_dtype="nvfp4")


def check():
    """Looks for every seam.

    :raises Missing: if one is missing or has other arguments.
    """
    from . import experts, linear, methods

    if not (hasattr(modelopt, "ModelOptLinearMethod") or hasattr(modelopt, "ModelOptNvFp4LinearMethod")):
        raise Missing("ModelOpt's linear methods have other names")
    for module in (modelopt, tensors):
        if not callable(getattr(module, "init_nvfp4_linear_kernel", None)):
            raise Missing(f"{module.__name__} has no init_nvfp4_linear_kernel")
    ours = (experts.Nvfp4Experts, methods.ModelOptNvfp4MoE, methods.CompressedTensorsNvfp4MoE, linear.Nvfp4Linear, linear.Nvfp4Scheme)
    for cls in ours:
        _check_overrides(cls)
    attributes = {
        FusedMoEConfig: "moe_backend swiglu_limit swiglu_alpha swiglu_beta has_bias is_lora_enabled in_dtype activation num_local_experts"
        " experts_per_token hidden_dim intermediate_size_per_partition moe_parallel_config",
        FusedMoEParallelConfig: "all2all_backend enable_eplb tp_size use_ag_rs_all2all_kernels use_all2all_kernels",
        KernelConfig: "linear_backend moe_backend",
        VllmConfig: "kernel_config additional_config",
    }
    for cls, names in attributes.items():
        known = getattr(cls, "__dataclass_fields__", {})
        for name in names.split():
            if name not in known and not hasattr(cls, name):
                raise Missing(f"{cls.__name__} has no {name}")
    calls = {
        maybe_make_prepare_finalize: "moe quant_config routing_tables allow_new_interface use_monolithic",
        FusedMoEQuantConfig.make: "quant_dtype weight_dtype",
    }
    for function, names in calls.items():
        missing = set(names.split()) - set(inspect.signature(function).parameters)
        if missing:
            raise Missing(f"{function.__name__} takes no {', '.join(sorted(missing))}")


def _check_overrides(cls):
    """Checks that the methods of `cls` take what vLLM's methods of the same names take."""
    if missing := sorted(getattr(cls, "__abstractmethods__", ())):
        raise Missing(f"{cls.__name__} lacks {', '.join(missing)}")
    for base in (base for base in cls.__mro__ if base.__module__.startswith("nvfp4_vllm")):
        for name, ours in vars(base).items():
            theirs = next((getattr(other, name) for other in cls.__mro__ if other.__module__.startswith("vllm.") and name in vars(other)), None)
            if name.startswith("__") or not inspect.isfunction(theirs):
                continue
            wanted, taken = (inspect.signature(function).parameters for function in (theirs, getattr(cls, name)))
            takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
            if not takes_all and list(wanted) != list(taken):
                raise Missing(f"{theirs.__qualname__} takes {', '.join(wanted)}; this plugin knows {', '.join(taken)}")
