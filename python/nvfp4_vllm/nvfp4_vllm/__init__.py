"""A plugin of vLLM 0.24.0: NVFP4 mixture-of-experts layers on Hopper cards, computed by `nvfp4`.

vLLM calls :func:`register` in each of its processes. It puts subclasses in the place of three of vLLM's quantization
configurations; those give the layers that `nvfp4` computes to `nvfp4`, and all others to vLLM as before.
"""

TESTED = "0.24.0"
"""The version of vLLM whose classes these are subclasses of."""


def register():
    """Registers the configurations; vLLM calls it by the entry point `vllm.general_plugins`."""
    import vllm
    from vllm.logger import init_logger

    if vllm.__version__.split("+")[0] != TESTED:
        # Another version's classes may differ, and a plugin that fails half way would serve nobody.
        init_logger("vllm.nvfp4").warning("nvfp4_vllm is for vLLM %s, this is %s: not used", TESTED, vllm.__version__)
        return
    from vllm.model_executor.layers.quantization import register_quantization_config

    from . import configs

    register_quantization_config("modelopt_fp4")(configs.ModelOptNvfp4)
    register_quantization_config("modelopt_mixed")(configs.ModelOptMixed)
    register_quantization_config("compressed-tensors")(configs.CompressedTensors)
