"""Whether `nvfp4` may run on this process's GPU: tiny layers are computed there once, before the first layer of their kind is created.

`nvfp4` uses a kernel that has only run in an emulator after its self-test has passed on the GPU, and says so in the error that it raises.
"""

import functools

import torch

import nvfp4

from . import selftest
from .choices import Left

SIZE = 64
"""The sizes of the tiny layers."""


class Cards:
    """The checks of one plugin.

    :param choices: the plugin's :class:`Choices`.
    :param name: returns the GPU's name.
    :param capability: returns the GPU's compute capability as two numbers; `None` if there is no GPU.
    """

    def __init__(self, choices, name, capability):
        self._choices, self._name, self._capability, self._told = choices, name, capability, set()

    def check_moe(self, dtype, activation, biased, token_format):
        """:raises Left: if `nvfp4` does not compute such experts on this GPU."""
        self._check("experts", _moe, dtype, activation, biased, token_format)

    def check_linear(self, dtype, token_format):
        """:raises Left: if `nvfp4` does not compute such linear layers on this GPU."""
        self._check("linear layers", _linear, dtype, token_format)

    def _check(self, what, compute, *kind):
        device = torch.get_default_device()
        if device.type not in ("cpu", "cuda"):  # a model that is first built without memory
            device = torch.device("cuda")
        reason = _tried(compute, device, *kind)
        if reason is not None:
            raise Left(f"{what} on {self._name()}: {reason}; {selftest.remedy(self._choices)}")
        self._tell(what)

    def _tell(self, what):
        if what in self._told:
            return
        self._told.add(what)
        capability = self._capability()
        if capability is None or tuple(capability) == (9, 0):
            return
        self._choices.note(
            f"emulated only: nvfp4's kernels for {what} on {self._name()} (compute capability {capability[0]}.{capability[1]}) were developed in"
            " an emulator, and not measured on this GPU"
        )


@functools.cache
def _tried(compute, device, *kind):
    """Returns why a tiny layer cannot be computed; `None` if it can."""
    try:
        compute(device, *kind)
        if device.type == "cuda":
            torch.cuda.synchronize()
    except (nvfp4.Error, ValueError) as error:
        return str(error)
    return None


def _quantized(device, *shape):
    values = torch.zeros(*shape[:-1], shape[-1] // 2, dtype=torch.uint8, device=device)
    scales = torch.ones(*shape[:-1], shape[-1] // nvfp4.BLOCK, dtype=torch.float32, device=device).to(torch.float8_e4m3fn)
    return nvfp4.Quantized(values, scales, torch.ones(shape[:-2], dtype=torch.float32, device=device))


def _moe(device, dtype, activation, biased, token_format):
    matrix = _quantized(device, 1, SIZE, SIZE)
    gate = None if activation == "relu2" else matrix
    bias = torch.zeros(1, SIZE, dtype=dtype, device=device)
    biases = (bias if gate else None, bias, bias) if biased else None
    layer = nvfp4.Moe(gate, matrix, matrix, dtype=dtype, activation=activation, biases=biases, token_format=token_format)
    ids = torch.zeros(1, 1, dtype=torch.int32, device=device)
    layer(torch.zeros(1, SIZE, dtype=dtype, device=device), ids, torch.ones(1, 1, dtype=torch.float32, device=device))


def _linear(device, dtype, token_format):
    layer = nvfp4.Linear(_quantized(device, SIZE, SIZE), dtype=dtype, token_format=token_format)
    layer(torch.zeros(1, SIZE, dtype=dtype, device=device))
