"""Checks that the book's tools find what they look for."""

import contextlib
import io
import os
import pathlib
import tempfile
import unittest

import check
import reference
from pages import ROOT, Block, blocks
from repository import Links

COMMANDS = tempfile.mkdtemp()


def shell(text: str, *marks: str) -> Block:
    """Returns a shell block of a page that does not exist."""
    return Block(ROOT / "page.md", 1, "sh", marks, text)


def setUpModule():
    """Makes a command `nvfp4` with the subcommand `run` and its option `--shape`."""
    command = pathlib.Path(COMMANDS, "nvfp4")
    command.write_text('#!/bin/sh\n[ "$1" = run ] && echo "  --shape <SHAPE>  [alias: --size]"\n')
    command.chmod(0o755)


def tearDownModule():
    os.unlink(pathlib.Path(COMMANDS, "nvfp4"))
    os.rmdir(COMMANDS)


class Blocks(unittest.TestCase):
    def test_language_and_marks_of_a_block(self):
        with tempfile.NamedTemporaryFile("w", suffix=".md") as page:
            page.write("a\n```sh gpu\nb\n```\n```rust,ignore\n```\n")
            page.flush()
            found = [(block.line, block.language, block.marks, block.text) for block in blocks(pathlib.Path(page.name))]
        self.assertEqual(found, [(2, "sh", ("gpu",), "b\n"), (5, "rust", ("ignore",), "\n")])

    def test_failing_line_ends_the_check_with_its_place(self):
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()), self.assertRaises(SystemExit) as ended:
            check.run(shell("false | true\necho unreachable\n"), pathlib.Path(folder), COMMANDS)
        self.assertIn("page.md:1 failed with exit code 1", str(ended.exception))

    def test_skipped_block_names_what_exists(self):
        check.check_words(shell("nvfp4 run --shape x --size=3   # --nothing\npip install ./python/nvfp4\ncargo xtask card\n"), COMMANDS)
        for wrong in ("nvfp4 run --shapes x", "nvfp4 fly", "pip install ./python/nvfp5", "cargo xtask cards", "cargo run --release -- fly"):
            with self.subTest(wrong), self.assertRaises(SystemExit):
                check.check_words(shell(wrong), COMMANDS)


class Documents(unittest.TestCase):
    def test_links_lead_to_pages_of_the_book_or_into_the_repository(self):
        links = Links(ROOT / "docs/book/src/guides/engines.md")
        document = ROOT / "docs/engines.md"
        self.assertEqual(links.target("../python/nvfp4_vllm/README.md#tests", document), "vllm.md#tests")
        self.assertEqual(links.target("../ARCHITECTURE.md", document), "../design/architecture.md")
        self.assertRegex(links.target("../c/Cargo.toml", document), r"^https://.*/blob/main/c/Cargo\.toml$")
        self.assertRegex(links.target("../tests", document), r"^https://.*/tree/main/tests$")
        with self.assertRaises(SystemExit):
            links.target("../no-such-file.md", document)

    def test_links_in_code_blocks_stay(self):
        links = Links(ROOT / "docs/book/src/introduction.md")
        text = "```text\n[a](b.md)\n```\n`x` [c](start/c.md)"
        self.assertEqual(links.mended(text, links.page), text)

    def test_source_file_that_does_not_exist_is_found(self):
        with tempfile.NamedTemporaryFile("w", suffix=".md", dir=ROOT) as page:
            page.write("`tools/check.py` and `…/moe/problem.rs`\n\n`host/src/new.rs`:\n")
            page.flush()
            self.assertEqual(check.check_paths([pathlib.Path(page.name)]), 2)
            page.write("in `host/src/new.rs`\n")
            page.flush()
            with self.assertRaises(SystemExit) as ended:
                check.check_paths([pathlib.Path(page.name)])
        self.assertIn("host/src/new.rs does not exist", str(ended.exception))

    def test_html_without_its_target_is_found(self):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            (folder / "a.html").write_text('<h1 id="x"></h1><a href="b.html#y">')
            (folder / "b.html").write_text('<h1 id="y"></h1><a href="a.html#x"><img src="https://x/y.png">')
            self.assertEqual(check.check_html(folder), 2)
            (folder / "b.html").write_text('<a href="a.html#z"><a href="c.html">')
            with self.assertRaises(SystemExit) as ended:
                check.check_html(folder)
        self.assertEqual(len(str(ended.exception).splitlines()), 3)

    def test_documentation_of_python_becomes_markdown(self):
        text = "Adds.\n\n:param x: a ``number``\n    or :class:`Y`.\n\n>>> 1 + 1\n2\n"
        expected = "Adds.\n\n- `x`: a `number`\n    or `Y`.\n\n```python doctest\n>>> 1 + 1\n2\n```"
        self.assertEqual(reference.markdown(text), expected)


if __name__ == "__main__":
    unittest.main()
