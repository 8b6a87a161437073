"""The README's Python runs, and its fault is the real text."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_readme_runs(capsys):
    text = README.read_text()
    names: dict[str, object] = {}
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(code, names)
    printed = capsys.readouterr().out
    assert printed.strip() and printed.strip() in text
