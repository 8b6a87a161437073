"""A plugin for vLLM: `nvfp4` computes NVFP4 mixture-of-experts and linear layers.

vLLM calls :func:`register` in each of its processes. The function replaces three of vLLM's quantization configurations with
subclasses. The subclasses give `nvfp4` the layers that it supports, and vLLM all other layers.
"""


def register():
    """Registers the configurations. vLLM calls it through the entry point `vllm.general_plugins`.

    vLLM does not catch exceptions of a plugin. So this function raises none, except with `NVFP4_VLLM_REQUIRE=1`.
    """
    # Imports are part of what can fail: no vLLM, a version without one of these modules, or an `nvfp4` that does not load.
    try:
        import vllm  # noqa: F401

        from . import choices
    except Exception as error:
        _refuse_without_choices(error)
        return
    try:
        from nvfp4.serving import selftest
        from vllm.model_executor.layers.quantization import register_quantization_config

        from . import configs, seams

        seams.check()
        selftest.run_if_asked(choices.CHOICES)
        replaced = {
            "modelopt_fp4": configs.ModelOptNvfp4,
            "modelopt_mixed": configs.ModelOptMixed,
            "compressed-tensors": configs.CompressedTensors,
        }
        for name, config in replaced.items():
            register_quantization_config(name)(config)
        engine, tested = choices.engine()
        if not tested:
            oldest, newest = choices.TESTED
            choices.CHOICES.note(f"nvfp4_vllm is used, but was not tested with {engine}: only with {oldest} to {newest}")
    except Exception as error:
        choices.CHOICES.refuse_all(error, *choices.engine())


def _refuse_without_choices(error):
    """Logs that the plugin cannot be used, if not even its messages can be imported."""
    import logging
    import os

    if isinstance(error, ModuleNotFoundError) and error.name == "vllm":
        message = "nvfp4_vllm is not used: vLLM is not installed in this environment"
    else:
        message = (
            f"nvfp4_vllm is not used: {type(error).__name__}: {error}. vLLM's own kernels serve all NVFP4 layers; reinstall `nvfp4` and"
            " `nvfp4-vllm` in versions that belong together"
        )
    if os.environ.get("NVFP4_VLLM_REQUIRE", "0") not in ("", "0"):
        raise ValueError(message) from error
    logging.getLogger("vllm.nvfp4").warning("%s", message)
