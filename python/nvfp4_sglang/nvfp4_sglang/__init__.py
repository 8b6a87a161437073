"""A plugin for SGLang: `nvfp4` computes NVFP4 mixture-of-experts and linear layers.

SGLang calls :func:`register` in each of its processes. The function registers a runner of experts, and replaces three of SGLang's
quantization configurations with subclasses. The subclasses give `nvfp4` the layers that it supports, and SGLang all other layers.
"""


def register():
    """Registers the runner and the configurations. SGLang calls it through the entry point `sglang.srt.plugins`.

    SGLang logs an exception of a plugin and goes on, so with `NVFP4_SGLANG_REQUIRE=1` this function ends the process instead. It changes
    nothing in SGLang before all of its checks have passed.
    """
    from . import choices

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
