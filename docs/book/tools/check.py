"""Runs the shell blocks of the README and of the book, and checks their links and the paths that they name.

    check.py COMMANDS [--html FOLDER] [PAGE ...]

COMMANDS is the folder of the built commands, or several with colons between them. FOLDER is the built book, whose links and anchors are
then checked too. PAGE runs the blocks of these pages alone.

A block marked `sh` runs in an empty folder with a small model, `model/`. The blocks of a page run one after another in
one folder. A second word says why a block does not run here:

    gpu       needs a GPU
    network   installs packages, or downloads
    build     compiles for minutes, in a checkout of the repository
    files     needs files that the test does not have

A block that does not run is still checked: its paths exist, and its commands know its options. The number of these blocks is in
`SKIPPED`, so that no block stops running unnoticed.
"""

import argparse
import html.parser
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections import Counter

import model
from pages import LINK, ROOT, Block, blocks, documents, outside_of_blocks

# Number of blocks that do not run, by reason. `console` blocks show commands of other programs with a prompt.
SKIPPED = Counter(build=15, console=14, files=3, gpu=14, network=17)
# Longest time of a block, in seconds.
LIMIT = 300
# Largest size of the README, in bytes.
README_BYTES = 9 * 1024
# Languages of blocks that are no programs, and of programs that other tests run.
TEXTS = {"text", "json", "yaml", "toml", "diff", "c"}
TESTED_ELSEWHERE = {"rust", "python"}


def skipped_because(block: Block) -> str | None:
    """Returns the reason for which a block does not run. `None`: it runs, or is no program."""
    if block.language == "console":
        return "console"
    reasons = [mark for mark in block.marks if mark in ("gpu", "network", "build", "files")]
    return reasons[0] if reasons else None


def run(block: Block, folder: pathlib.Path, commands: str) -> None:
    """Runs a block in a folder. A failure ends the program with the block's place and its output."""
    environment = {**os.environ, "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}", "XDG_CACHE_HOME": str(folder / ".cache")}
    started = time.monotonic()
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text], cwd=folder, env=environment, timeout=LIMIT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )
    print(f"{block}: {time.monotonic() - started:.1f} s", flush=True)
    if done.returncode:
        sys.exit(f"{block} failed with exit code {done.returncode}:\n{block.text}\n{done.stdout}")


def check_words(block: Block, commands: str) -> None:
    """Checks what a skipped block names: paths of the repository, tasks, subcommands and options."""
    for line in block.text.replace("\\\n", " ").splitlines():
        line = re.sub(r"(^|\s)#.*", "", line).removeprefix("$ ")
        for path in re.findall(r"(?<![\w/.$-])(?:\./)?((?:host|python|crates|benches|c|tests|docs|\.ci)/[\w./-]+)", line):
            if "/target/" not in path and not (ROOT / path).exists():
                sys.exit(f"{block}: {path} does not exist")
        for task in re.findall(r"cargo xtask ([a-z-]+)", line):
            if not (ROOT / "xtask/src" / f"{task.replace('-', '_')}.rs").exists():
                sys.exit(f"{block}: there is no task {task}")
        for words in re.findall(r"(?:^|[;&|(] *|cargo run --release -- )nvfp4 ([^;&|]*)|cargo run --release -- ([^;&|]*)", line):
            check_options(block, (words[0] or words[1]).split(), commands)


def check_options(block: Block, words: list[str], commands: str) -> None:
    """Checks that a subcommand exists and has the options that a line gives it."""
    if not words or not words[0].isalpha():
        return
    known = subprocess.run([shutil.which("nvfp4", path=commands), words[0], "--help"], capture_output=True, text=True)
    if known.returncode:
        sys.exit(f"{block}: nvfp4 has no subcommand {words[0]}")
    for option in (word.split("=")[0] for word in words if word.startswith("--") and word != "--"):
        if not re.search(rf"{option}\b|alias: {option}\b", known.stdout):
            sys.exit(f"{block}: nvfp4 {words[0]} has no option {option}")


def run_blocks(pages: list[pathlib.Path], commands: str) -> Counter:
    """Runs the blocks of pages, and returns the number of those that ran and of those that did not, by reason."""
    counts = Counter()
    for page in pages:
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            for block in blocks(page):
                if block.language in TEXTS | TESTED_ELSEWHERE:
                    continue
                if block.language not in ("sh", "console"):
                    sys.exit(f"{block}: unknown language `{block.language}`")
                if reason := skipped_because(block):
                    check_words(block, commands)
                    print(f"{block}: not run ({reason})")
                    counts[reason] += 1
                    continue
                if not (folder / "model").exists():
                    model.write_model(folder / "model")
                    model.write_tensors(folder / "x.safetensors", {"hidden": (16, model.HIDDEN)}, seed=1)
                run(block, folder, commands)
                counts["ran"] += 1
    return counts


def check_readme() -> None:
    """Checks the README's size, and that `.ci/run` calls what the README builds, runs and tests."""
    readme, calls = ROOT / "README.md", (ROOT / ".ci/run").read_text()
    if readme.stat().st_size > README_BYTES:
        sys.exit(f"README.md has {readme.stat().st_size} bytes, more than {README_BYTES}; move text to the book")
    for block in blocks(readme):
        for line in block.text.splitlines() if "build" in block.marks else []:
            if line.partition("#")[0].strip() not in calls:
                sys.exit(f"{block}: .ci/run does not call `{line}`")


def check_rust(pages: list[pathlib.Path]) -> None:
    """Checks that the library's documentation tests have each page of the book with a Rust program."""
    tested = (ROOT / "host/src/lib.rs").read_text()
    for page in pages:
        path = str(page.relative_to(ROOT))
        ours = path == "README.md" or path.startswith("docs/book/")
        if ours and any(block.language == "rust" for block in blocks(page)) and f'"../../{path}"' not in tested:
            sys.exit(f"{path} has a Rust program; add the page to the documentation tests in host/src/lib.rs")


def check_links(pages: list[pathlib.Path]) -> int:
    """Checks that each relative link of the documents names a file, and returns the number of links."""
    count = 0
    for page in pages:
        for _, _, target in LINK.findall(outside_of_blocks(page.read_text(), lambda line: line)):
            if not re.match(r"[a-z]+:|#", target):
                count += 1
                if not (page.parent / target.partition("#")[0]).exists():
                    sys.exit(f"{page.relative_to(ROOT)}: the link {target} names no file")
    return count


def check_paths(pages: list[pathlib.Path]) -> int:
    """Checks that each source file that a document names exists, and returns the number of names.

    A name may omit the first folders. A line with nothing but a name and a colon is the head of a block that adds the file.
    """
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    known = {"/".join(parts[begin:]) for parts in (file.split("/") for file in files) for begin in range(len(parts))}
    count = 0
    for page in pages:
        for line in page.read_text().splitlines():
            for path in re.findall(r"`(?:…/)?([\w./-]+\.(?:rs|py))`(?!:$)", line):
                count += 1
                if path not in known:
                    sys.exit(f"{page.relative_to(ROOT)}: {path} does not exist")
    return count


class Anchors(html.parser.HTMLParser):
    """Ids and links of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.ids, self.links = set(), []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list) -> None:
        of = dict(attributes)
        self.ids |= {of[key] for key in ("id", "name") if of.get(key)}
        self.links += [of[key] for key in ("href", "src") if of.get(key)]


def check_html(folder: pathlib.Path) -> int:
    """Checks that each internal link of the built book names a file and an id, and returns the number of links."""
    pages = {path: Anchors(path.read_text()) for path in folder.rglob("*.html")}
    count, faults = 0, []
    for path, found in pages.items():
        if path.name in ("print.html", "toc.html", "404.html"):
            continue
        for link in found.links:
            address, _, anchor = urllib.parse.unquote(link).partition("#")
            if re.match(r"[a-z]+:|//", address):
                continue
            count += 1
            target = (path.parent / address).resolve() if address else path
            if not target.exists():
                faults.append(f"{path.relative_to(folder)}: {link} names no file")
            elif anchor and target in pages and anchor not in pages[target].ids:
                faults.append(f"{path.relative_to(folder)}: {link} names no heading")
    if faults:
        sys.exit("\n".join(faults))
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commands")
    parser.add_argument("--html", type=pathlib.Path)
    parser.add_argument("pages", nargs="*", type=pathlib.Path)
    options = parser.parse_intermixed_args()
    commands = os.pathsep.join(str(pathlib.Path(folder).resolve()) for folder in options.commands.split(os.pathsep))
    check_readme()
    pages = [page.resolve() for page in options.pages] or documents()
    print(f"{check_links(pages)} links of documents name files")
    print(f"{check_paths(pages)} source files of documents exist")
    check_rust(pages)
    if options.html:
        print(f"{check_html(options.html.resolve())} links of the book name files and headings")
    counts = run_blocks(pages, commands)
    print(", ".join(f"{reason}: {count}" for reason, count in sorted(counts.items())))
    ran = counts.pop("ran", 0)
    if not options.pages and (counts != SKIPPED or not ran):
        sys.exit(f"the blocks that do not run are {dict(counts)}, not {dict(SKIPPED)}; change SKIPPED in check.py if that is right")


if __name__ == "__main__":
    main()
