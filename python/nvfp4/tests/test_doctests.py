"""Runs the examples of the package's documentation."""

import doctest

import pytest

import nvfp4
from nvfp4 import _linear, _moe, _operators


@pytest.mark.parametrize("module", [nvfp4, _linear, _moe, _operators])
def test_documentation_examples_pass(module):
    found = doctest.testmod(module)
    assert found.attempted > 0 and found.failed == 0
