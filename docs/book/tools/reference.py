"""Writes the pages of the reference that follow from the code.

    reference.py NVFP4 [--check]

NVFP4 is the built command, whose help becomes src/reference/command.md. src/reference/python.md has the documentation
of the Python package, and src/reference/errors.md tables of codes. With --check, nothing is written, and a page that
would change is an error.
"""

import ast
import os
import pathlib
import re
import subprocess
import sys

from pages import ROOT, SRC, with_sections

PACKAGE = ROOT / "python/nvfp4/python/nvfp4"
ERRORS = ROOT / "crates/nvfp4_core/src/error.rs"
DOCTOR = ROOT / "crates/nvfp4_checkpoint/src/doctor.rs"
REFERENCE = SRC / "reference"
COMMAND_HEAD = """# The command

This page is the output of `nvfp4 --help` and `nvfp4 SUBCOMMAND --help`. `docs/book/tools/reference.py` writes it, and CI compares it with
the command. [Errors and exit codes](errors.md) has the codes of all subcommands.

"""
PYTHON_HEAD = """# Python

This page is the documentation of the package `nvfp4`, as `help(nvfp4)` shows it. `docs/book/tools/reference.py` writes it from the
sources, and the package's tests run its examples. [PyTorch and Transformers](../guides/pytorch.md) explains how the parts work together.
"""


def help_of(command: str, *words: str) -> str:
    """Returns the help text of a subcommand at a width of 100 columns."""
    line = [command, *words, "--help"]
    run = subprocess.run(line, env={**os.environ, "COLUMNS": "100"}, capture_output=True, text=True, check=True)
    return "\n".join(text.rstrip() for text in run.stdout.rstrip().splitlines())


def command_page(command: str) -> str:
    """Returns the page of the command."""
    text = help_of(command)
    listed = text.partition("\nCommands:\n")[2].partition("\n\n")[0]
    parts = [COMMAND_HEAD, f"```text\n{text}\n```\n"]
    for name in re.findall(r"^  ([a-z]+) ", listed, re.MULTILINE):
        if name != "help":
            parts.append(f"\n## nvfp4 {name}\n\n```text\n{help_of(command, name)}\n```\n")
    return "".join(parts)


def definitions(path: pathlib.Path) -> dict[str, ast.AST]:
    """Returns the functions and classes of a module, by name."""
    body = ast.parse(path.read_text()).body
    return {node.name: node for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def markdown(text: str) -> str:
    """Returns a docstring in reStructuredText as Markdown."""
    text = re.sub(r":(?:class|func|meth|attr):`([^`]+)`", r"`\1`", text)
    text = text.replace("``", "`")
    lines, example = [], False
    for line in text.splitlines():
        begins = line.startswith(">>>")
        if begins and not example:
            lines += ["```python doctest"]
        if example and not line:
            lines += ["```"]
        example = begins or (example and bool(line))
        field = re.match(r":(?:param |raises )?(\w+):? ?(.*)", line) if not example else None
        if field and line.startswith((":param", ":raises")):
            line = f"- {'raises ' * line.startswith(':raises')}`{field[1]}`: {field[2]}"
        lines.append(line)
    return "\n".join([*lines, "```"] if example else lines)


def described(name: str, node: ast.AST, level: int = 2, with_methods: bool = True) -> str:
    """Returns the section of a function or class, with its public methods if `with_methods`."""
    functions = {part.name: part for part in node.body if isinstance(part, ast.FunctionDef)} if isinstance(node, ast.ClassDef) else {}
    signature = functions.get("__init__", node)
    arguments = ""
    if isinstance(signature, ast.FunctionDef):
        arguments = ast.unparse(signature.args).removeprefix("self").removeprefix(", ")
        arguments = re.sub(r"(: [^=,]+)=", r"\1 = ", arguments)
        words = re.split(r", (?![^\[(]*[\])])", arguments)
        arguments = arguments if len(arguments) < 60 else "\n" + "".join(f"    {word},\n" for word in words)
    returns = f" -> {ast.unparse(node.returns)}" if isinstance(node, ast.FunctionDef) and node.returns else ""
    fields = [part for part in node.body if isinstance(part, ast.AnnAssign)] if isinstance(node, ast.ClassDef) else []
    shown = f"{name}({arguments}){returns}" if not fields else f"{name}({', '.join(ast.unparse(field) for field in fields)})"
    text = f"\n{'#' * level} {name}\n\n```python signature\n{shown}\n```\n\n{markdown(ast.get_docstring(node) or '')}\n"
    for method, part in functions.items():
        if with_methods and not method.startswith("_") and ast.get_docstring(part):
            text += described(f"{name.rpartition('.')[2]}.{method}", part, level + 1)
    return text


def python_page() -> str:
    """Returns the page of the Python package."""
    modules = {name: definitions(PACKAGE / f"{name}.py") for name in ("_operators", "_linear", "_moe", "_checkpoint", "transformers")}
    public = next(
        ast.literal_eval(node.value)
        for node in ast.parse((PACKAGE / "__init__.py").read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    parts = [PYTHON_HEAD, "\n", markdown(ast.get_docstring(ast.parse((PACKAGE / "__init__.py").read_text()))), "\n"]
    for name in public:
        found = [of[name] for module, of in modules.items() if module != "transformers" and name in of]
        parts += [described(f"nvfp4.{name}", node) for node in found]
    for name, node in modules["transformers"].items():
        if name in ("Nvfp4Config", "lora"):
            parts.append(described(f"nvfp4.transformers.{name}", node, with_methods=False))
    return "".join(parts)


def error_codes() -> str:
    """Returns the table of the library's errors, from `Error` and its `code`."""
    text = ERRORS.read_text()
    variants = dict(re.findall(r'#\[error\((?:\n\s*)?"((?:[^"\\]|\\.)*)".*?\)\]\n    (\w+)', text, re.DOTALL))
    messages = {variant: message for message, variant in variants.items()}
    text = text.partition("pub fn code(")[2].partition("\n    }")[0]
    codes = re.findall(r"((?:Self::\w+[^=|]*\|? ?)+)=> \"([a-z-]+)\"", text)
    rows = ["| code | message |\n|---|---|\n"]
    for named, code in codes:
        for variant in re.findall(r"Self::(\w+)", named):
            message = messages.get(variant, "")
            shown = re.sub(r"\{[^}]*\}", "…", message).replace("|", "\\|")
            rows.append(f"| `{code}` | {shown if shown.strip('…') else 'the message says why'} |\n")
    if len(rows) < 15:
        sys.exit(f"{ERRORS}: the codes of errors were not found")
    return "".join(rows)


def rules() -> str:
    """Returns the table of what engines make of a checkpoint's faults, from `RULES`."""
    text = DOCTOR.read_text()
    constants = {name: value for name, value in re.findall(r'const (\w+): &str = "([^"]*)"', text)} | {"OWN": "this version"}
    engines = dict(re.findall(r'Self::(\w+) => "([^"]*)"', text))
    found = re.findall(r'\n    rule\(\s*"([^"]*)",\s*Engine::(\w+),\s*(\w+|"[^"]*"),\s*Effect::(\w+),\s*"([^"]*)"', text)
    if len(found) != text.count("\n    rule("):
        sys.exit(f"{DOCTOR}: {text.count(chr(10) + '    rule(')} rules exist, and {len(found)} were read")
    rows = ["| code | engine | versions | effect | remedy |\n|---|---|---|---|---|\n"]
    for code, engine, versions, effect, remedy in found:
        versions = versions.strip('"') if versions.startswith('"') else constants[versions]
        rows.append(f"| `{code}` | {engines[engine]} | {versions} | {engines[effect]} | {remedy} |\n")
    return "".join(rows)


def errors_page() -> str:
    """Returns the page of errors with its tables renewed."""
    return with_sections((REFERENCE / "errors.md").read_text(), {"errors": error_codes(), "rules": rules()})


def main() -> None:
    command, *options = sys.argv[1:]
    pages = {"command.md": command_page(command), "python.md": python_page(), "errors.md": errors_page()}
    for name, text in pages.items():
        if options != ["--check"]:
            (REFERENCE / name).write_text(text)
        elif (REFERENCE / name).read_text() != text:
            sys.exit(f"reference/{name} is out of date; run `python3 docs/book/tools/reference.py target/release/nvfp4`")


if __name__ == "__main__":
    main()
