"""Examples in the documentation."""

import doctest

import pytest

import nvfp4
from nvfp4 import _moe, _operators


@pytest.mark.parametrize("module", [nvfp4, _moe, _operators])
def test_the_examples_are_right(module):
    found = doctest.testmod(module)
    assert found.attempted > 0 and found.failed == 0
