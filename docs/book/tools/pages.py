"""What the book's tools share: the repository's documents, their code blocks and their links."""

import pathlib
import re
import tomllib
from collections.abc import Iterator
from typing import NamedTuple

BOOK = pathlib.Path(__file__).resolve().parents[1]
SRC = BOOK / "src"
ROOT = BOOK.parents[1]

INCLUDE = re.compile(r"^\{\{#include ([^\s}]+)\}\}$", re.MULTILINE)
FENCE = re.compile(r"^ *```(.*)$")
# Inline links and pictures. Titles and reference links are not used in the documents.
LINK = re.compile(r"(!?)\[((?:[^\[\]`]|`[^`]*`|\[[^\]]*\])*)\]\(([^()\s]+)\)")


class Block(NamedTuple):
    """A fenced code block of a document."""

    page: pathlib.Path
    line: int
    language: str
    marks: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def book_pages() -> list[pathlib.Path]:
    """Returns the book's pages in the order of SUMMARY.md."""
    summary = (SRC / "SUMMARY.md").read_text()
    return [SRC / target for _, _, target in LINK.findall(summary)]


def included(page: pathlib.Path) -> list[pathlib.Path]:
    """Returns the documents that a page includes."""
    return [(page.parent / target).resolve() for target in INCLUDE.findall(page.read_text())]


def documents() -> list[pathlib.Path]:
    """Returns the README, the book's pages and the documents that the pages include, without duplicates."""
    pages = [ROOT / "README.md"]
    for page in book_pages():
        pages += [page, *(document for document in included(page) if document.suffix == ".md")]
    return list(dict.fromkeys(pages))


def blocks(page: pathlib.Path) -> Iterator[Block]:
    """Returns the code blocks of a document. `language` is the first word after the fence, `marks` are the others."""
    begin, words, lines = 0, [], []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        fence = FENCE.match(line)
        if begin and fence:
            yield Block(page, begin, words[0] if words else "", tuple(words[1:]), "\n".join(lines) + "\n")
            begin = 0
        elif fence:
            begin, words, lines = number, fence[1].replace(",", " ").split(), []
        elif begin:
            lines.append(line)
    if begin:
        raise SystemExit(f"{page}:{begin}: the code block does not end")


def outside_of_blocks(text: str, change) -> str:
    """Returns a document whose lines outside of code blocks are changed by `change`."""
    lines, inside = [], False
    for line in text.split("\n"):
        if FENCE.match(line):
            inside = not inside
        elif not inside:
            line = change(line)
        lines.append(line)
    return "\n".join(lines)


def with_sections(text: str, sections: dict[str, str]) -> str:
    """Returns a page whose sections between `<!-- begin NAME -->` and `<!-- end NAME -->` are replaced."""
    for name, content in sections.items():
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->\n"
        before, rest = text.split(begin)
        text = before + begin + content + end + rest.split(end)[1]
    return text


def repository() -> str:
    """Returns the address of the repository, from the workspace's manifest."""
    return tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["repository"]
