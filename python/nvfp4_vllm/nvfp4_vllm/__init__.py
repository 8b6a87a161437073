"""A plugin for vLLM 0.24.0: `nvfp4` computes NVFP4 mixture-of-experts and linear layers on Hopper GPUs.

vLLM calls :func:`register` in each of its processes. The function replaces three of vLLM's quantization configurations with
subclasses. The subclasses give `nvfp4` the layers that it supports, and vLLM all other layers.
"""

TESTED = "0.24.0"
"""The version of vLLM whose classes this package subclasses."""


def register():
    """Registers the configurations. vLLM calls it through the entry point `vllm.general_plugins`."""
    import vllm
    from vllm.logger import init_logger

    if vllm.__version__.split("+")[0] != TESTED:
        # Another version's classes may differ, and then the plugin could fail halfway.
        init_logger("vllm.nvfp4").warning("nvfp4_vllm is for vLLM %s; this is %s, so the plugin is not used", TESTED, vllm.__version__)
        return
    from vllm.model_executor.layers.quantization import register_quantization_config

    from . import configs

    register_quantization_config("modelopt_fp4")(configs.ModelOptNvfp4)
    register_quantization_config("modelopt_mixed")(configs.ModelOptMixed)
    register_quantization_config("compressed-tensors")(configs.CompressedTensors)
