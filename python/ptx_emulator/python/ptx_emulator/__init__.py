"""Runs PTX on the CPU and finds its bugs. Needs no GPU, no CUDA toolkit and no PyTorch.

    report = ptx_emulator.launch(ptx, "kernel", grid=4, block=128, args=[x, y, np.int32(512)])

`launch` runs a kernel on NumPy arrays. A race, an overrun, a deadlock or the use of an undefined value raises `Fault`.
`explore` runs a small launch in every order of its warps. `Device` keeps memory between launches. `install` and the entry
points of this package run Triton programs; see the README.
"""

from ._device import Buffer, Device, explore, launch
from ._errors import BadLaunch, Fault, LaunchFailed, Party, Place, Unsupported
from ._install import install, installed
from ._memory import empty
from ._module import Module
from ._options import GPUS
from ._report import Exploration, Finding, Report, Time
from ._tensor_map import TensorMap

__all__ = [
    "GPUS",
    "BadLaunch",
    "Buffer",
    "Device",
    "Exploration",
    "Fault",
    "Finding",
    "LaunchFailed",
    "Module",
    "Party",
    "Place",
    "Report",
    "TensorMap",
    "Time",
    "Unsupported",
    "empty",
    "explore",
    "install",
    "installed",
    "launch",
]
