"""Runs the examples of the package's documentation and of the repository's README."""

import doctest
import pathlib

import pytest

import nvfp4
from nvfp4 import _linear, _moe, _operators


@pytest.mark.parametrize("module", [nvfp4, _linear, _moe, _operators])
def test_documentation_examples_pass(module):
    found = doctest.testmod(module)
    assert found.attempted > 0 and found.failed == 0


def test_readme_program_runs(capsys):
    readme = (pathlib.Path(__file__).parents[3] / "README.md").read_text()
    section = readme.split("## From PyTorch\n")[1].split("\n## ")[0]
    exec(compile(section.split("```python\n")[1].split("```")[0], "README.md", "exec"), {})
    assert capsys.readouterr().out == "torch.Size([5, 128])\n"
