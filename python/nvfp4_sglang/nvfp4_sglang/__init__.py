"""A plugin for SGLang: `nvfp4` computes NVFP4 mixture-of-experts and linear layers.

SGLang calls :func:`register` in each of its processes. The function registers a runner of experts, and replaces three of SGLang's
quantization configurations with subclasses. The subclasses give `nvfp4` the layers that it supports, and SGLang all other layers.
"""


def register():
    """Registers the runner and the configurations. SGLang calls it through the entry point `sglang.srt.plugins`.

    SGLang logs an exception of a plugin and goes on, so with `NVFP4_SGLANG_REQUIRE=1` this function ends the process instead. It changes
    nothing in SGLang before all of its checks have passed.
    """
    # Imports are part of what can fail: no SGLang, a version without one of these modules, or an `nvfp4` that does not load.
    try:
        import sglang  # noqa: F401

        from . import choices
    except Exception as error:
        _refuse_without_choices(error)
        return
    try:
        from nvfp4.serving import selftest
        from sglang.srt.layers import quantization

        from . import configs, runner, seams

        seams.check()
        selftest.run_if_asked(choices.CHOICES)
        runner.register()
        quantization.QUANTIZATION_METHODS |= {
            "modelopt_fp4": configs.ModelOptNvfp4,
            "modelopt_mixed": configs.ModelOptMixed,
            "compressed-tensors": configs.CompressedTensors,
        }
        engine, tested = choices.engine()
        if not tested:
            choices.CHOICES.note(f"nvfp4_sglang is used, but was not tested with {engine}: only with {choices.TESTED}")
    except Exception as error:
        try:
            choices.CHOICES.refuse_all(error, *choices.engine())
        except choices.Refused as refused:
            raise SystemExit(str(refused)) from error


def _refuse_without_choices(error):
    """Logs that the plugin cannot be used, if not even its messages can be imported."""
    import logging
    import os

    if isinstance(error, ModuleNotFoundError) and error.name == "sglang":
        message = "nvfp4_sglang is not used: SGLang is not installed in this environment"
    else:
        message = (
            f"nvfp4_sglang is not used: {type(error).__name__}: {error}. SGLang's own kernels serve all NVFP4 layers; reinstall `nvfp4` and"
            " `nvfp4-sglang` in versions that belong together"
        )
    if os.environ.get("NVFP4_SGLANG_REQUIRE", "0") not in ("", "0"):
        raise SystemExit(message) from error
    logging.getLogger("sglang.nvfp4").warning("%s", message)
