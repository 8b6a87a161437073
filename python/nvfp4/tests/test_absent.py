"""What the package and the plugins do where an engine, Transformers or `nvfp4` itself is missing, too old or broken.

The plugins' cases run in processes of their own, in which the named packages cannot be found.
"""

import importlib
import os
import pathlib
import re
import subprocess
import sys
import types

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
PLUGINS = {"nvfp4_vllm": "vLLM", "nvfp4_sglang": "SGLang"}

HIDE = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hidden())
"""


def python(code, hidden=(), folders=(), **variables):
    """Runs code in which the packages `hidden` cannot be found, and those of `folders` are found first."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("NVFP4_")} | variables
    environment["PYTHONPATH"] = os.pathsep.join(map(str, folders))
    line = [sys.executable, "-c", HIDE.format(names=set(hidden)) + code]
    return subprocess.run(line, env=environment, capture_output=True, text=True)


@pytest.fixture(params=PLUGINS)
def plugin(request):
    if not (ROOT / "python" / request.param).exists():
        pytest.skip("needs the repository's plugins")
    return request.param


@pytest.fixture
def old_engine(plugin, tmp_path):
    """A folder with an engine that has none of the modules that the plugin needs."""
    package = tmp_path / PLUGINS[plugin].lower()
    package.mkdir()
    (package / "__init__.py").write_text('__version__ = "0.1.0"\n')
    return tmp_path


def start(plugin, hidden=(), folders=(), **variables):
    """Does with the plugin's entry point what the engine does at its start."""
    text = (ROOT / "python" / plugin / "pyproject.toml").read_text()
    group, function = re.search(r'\[project\.entry-points\."(.+)"\]\nnvfp4 = "(.+)"', text).groups()
    code = f"from importlib.metadata import EntryPoint\nEntryPoint('nvfp4', {function!r}, {group!r}).load()()"
    return python(code, hidden, (ROOT / "python" / plugin, *folders), **variables)


def only_line(done):
    """Returns the only line that a process wrote, which ended without an error."""
    assert done.returncode == 0, done.stderr
    lines = (done.stdout + done.stderr).splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def test_plugin_without_its_engine_says_so_in_one_line(plugin):
    engine = PLUGINS[plugin]
    said = only_line(start(plugin, hidden=[engine.lower()]))
    assert said == f"{plugin} is not used: {engine} is not installed in this environment"


@pytest.mark.parametrize("missing", ["nvfp4", "torch"])
def test_plugin_without_nvfp4_leaves_all_layers_to_the_engine(plugin, old_engine, missing):
    said = only_line(start(plugin, hidden=[missing], folders=[old_engine]))
    assert said.startswith(f"{plugin} is not used: ModuleNotFoundError: No module named '{missing}'")
    assert f"{PLUGINS[plugin]}'s own kernels serve all NVFP4 layers" in said


def test_plugin_with_an_engine_without_its_modules_leaves_all_layers_to_the_engine(plugin, old_engine):
    engine = PLUGINS[plugin]
    said = only_line(start(plugin, folders=[old_engine]))
    assert said.startswith(f"{plugin} is not used: ModuleNotFoundError: No module named '{engine.lower()}.")
    assert f"{engine}'s own kernels serve all NVFP4 layers" in said


@pytest.mark.parametrize("missing", ["engine", "nvfp4", "modules of the engine"])
def test_missing_package_ends_the_start_if_the_plugin_is_required(plugin, old_engine, missing):
    engine = PLUGINS[plugin]
    hidden = {"engine": [engine.lower()], "nvfp4": ["nvfp4"]}.get(missing, [])
    done = start(plugin, hidden, [old_engine], **{f"NVFP4_{engine.upper()}_REQUIRE": "1"})
    assert done.returncode == 1
    assert f"{plugin} is not used: " in done.stderr.splitlines()[-1]


def test_import_of_a_plugin_imports_nothing_else(plugin):
    code = f"before = set(sys.modules)\nimport {plugin}\nprint(sorted(set(sys.modules) - before))"
    assert only_line(python(code, folders=[ROOT / "python" / plugin])) == f"['{plugin}']"


def test_package_needs_no_transformers():
    code = "import nvfp4, nvfp4.serving\nprint('transformers' in sys.modules)"
    assert only_line(python(code, hidden=["transformers", "safetensors"])) == "False"


@pytest.mark.parametrize(
    "installed, message",
    [
        (None, "nvfp4.transformers needs Transformers, which is not installed"),
        ("4.57.1", "nvfp4.transformers needs Transformers 5.20 or later, found 4.57.1"),
        ("5.19.0", "nvfp4.transformers needs Transformers 5.20 or later, found 5.19.0"),
    ],
)
def test_missing_or_old_transformers_is_named_with_the_remedy(monkeypatch, installed, message):
    pretended = installed and types.ModuleType("transformers")
    if installed:
        pretended.__version__ = installed
    monkeypatch.setitem(sys.modules, "transformers", pretended)
    monkeypatch.delitem(sys.modules, "nvfp4.transformers", raising=False)
    with pytest.raises(ImportError) as raised:
        importlib.import_module("nvfp4.transformers")
    assert str(raised.value) == f'{message}: pip install "transformers>=5.20"'
    assert type(raised.value) is ImportError
