"""Tests with the fixture `device` run on the CPU, and on a GPU if the layers have kernels for it."""

import pathlib
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))

HAS_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not HAS_GPU, reason="no GPU of compute capability 8.0 or later"))])
def device(request):
    return request.param


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def compiled(device):
    """Compiles a function as one graph. On the CPU the backend only checks fakes and mutations, because compiling C++ takes minutes."""
    return lambda function: torch.compile(function, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
