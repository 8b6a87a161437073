"""mdBook's preprocessor for this book.

A line `{{#include FILE}}` becomes the text of a document of the repository. Links of all pages are resolved where they
were written. A link to a document that the book has becomes a link to its page, a link to another file becomes its
address in the repository, and a link to a file that does not exist is an error.
"""

import json
import os
import pathlib
import re
import sys

from pages import INCLUDE, LINK, ROOT, SRC, book_pages, included, outside_of_blocks, repository

# Languages of included files that are not Markdown.
LANGUAGES = {".h": "c", ".toml": "toml", ".yml": "yaml", ".rs": "rust,noplayground", ".c": "c"}


def pages_of_documents() -> dict[pathlib.Path, pathlib.Path]:
    """Returns the book's page of each document of the repository that the book has."""
    pages = {ROOT / "README.md": SRC / "introduction.md", ROOT / "docs/book": SRC / "introduction.md"}
    for page in book_pages():
        pages[page] = page
        for document in included(page):
            pages[document] = page
            if document.name == "README.md" and document.parent != ROOT:
                pages[document.parent] = page
    return pages


class Links:
    """Rewrites the links of a chapter."""

    def __init__(self, page: pathlib.Path):
        self.page = page
        self.pages = pages_of_documents()
        self.repository = repository()

    def mended(self, text: str, document: pathlib.Path) -> str:
        """Returns the text of `document` with links that are right in the book."""

        def link(match: re.Match) -> str:
            picture, label, target = match.groups()
            return f"{picture}[{label}]({self.target(target, document)})"

        return outside_of_blocks(text, lambda line: LINK.sub(link, line))

    def target(self, target: str, document: pathlib.Path) -> str:
        """Returns the address of a link that stands in `document`."""
        if re.match(r"[a-z]+:", target) or target.startswith("#"):
            return target
        path, mark, anchor = target.partition("#")
        file = pathlib.Path(os.path.normpath(document.parent / path))
        if file in self.pages:
            return os.path.relpath(self.pages[file], self.page.parent) + mark + anchor
        if file.is_relative_to(SRC) and file.exists():
            return os.path.relpath(file, self.page.parent)
        if not file.exists() or not file.is_relative_to(ROOT):
            sys.exit(f"{document.relative_to(ROOT)}: the link {target} names no file of the repository")
        kind = "tree" if file.is_dir() else "blob"
        return f"{self.repository}/{kind}/main/{file.relative_to(ROOT)}{mark}{anchor}"

    def chapter(self, text: str) -> str:
        """Returns a chapter with its documents included."""
        parts, end = [], 0
        for match in INCLUDE.finditer(text):
            parts.append(self.mended(text[end : match.start()], self.page))
            document = (self.page.parent / match[1]).resolve()
            content = document.read_text()
            if document.suffix == ".md":
                parts.append(self.mended(content, document))
            else:
                parts.append(f"```{LANGUAGES.get(document.suffix, 'text')}\n{content.rstrip()}\n```")
            end = match.end()
        return "".join([*parts, self.mended(text[end:], self.page)])


def walk(items: list) -> None:
    """Changes chapters and their subchapters in place."""
    for item in items:
        if isinstance(item, dict) and (chapter := item.get("Chapter")):
            if chapter["path"]:
                chapter["content"] = Links(SRC / chapter["path"]).chapter(chapter["content"])
            walk(chapter["sub_items"])


def main() -> None:
    if sys.argv[1:2] == ["supports"]:
        return
    _, book = json.load(sys.stdin)
    walk(book.get("items", book.get("sections")))
    json.dump(book, sys.stdout)


if __name__ == "__main__":
    main()
