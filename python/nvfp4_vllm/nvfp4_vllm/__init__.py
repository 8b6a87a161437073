"""A plugin for vLLM: `nvfp4` computes NVFP4 mixture-of-experts and linear layers.

vLLM calls :func:`register` in each of its processes. The function replaces three of vLLM's quantization configurations with
subclasses. The subclasses give `nvfp4` the layers that it supports, and vLLM all other layers.
"""

from . import choices


def register():
    """Registers the configurations. vLLM calls it through the entry point `vllm.general_plugins`.

    vLLM does not catch exceptions of a plugin. So this function raises none, except with `NVFP4_VLLM_REQUIRE=1`.
    """
    try:
        from vllm.model_executor.layers.quantization import register_quantization_config

        from . import configs, seams, selftest

        seams.check()
        selftest.run_if_asked()
        replaced = {
            "modelopt_fp4": configs.ModelOptNvfp4,
            "modelopt_mixed": configs.ModelOptMixed,
            "compressed-tensors": configs.CompressedTensors,
        }
        for name, config in replaced.items():
            register_quantization_config(name)(config)
        engine, tested = choices.engine()
        if not tested:
            choices.note(f"nvfp4_vllm is used, but was not tested with {engine}: only with {choices.TESTED[0]} to {choices.TESTED[1]}")
    except Exception as error:
        choices.refuse_all(error, choices.engine())
