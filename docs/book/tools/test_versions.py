"""Checks that the pages about engines say of versions what `benches/lab/versions.json` recorded."""

import json
import re
import unittest

from pages import ROOT

RECORDED = json.loads((ROOT / "benches/lab/versions.json").read_text())


def rows(page: str, *titles: str) -> list[list[str]]:
    """Returns the cells of the rows of the table that has these titles."""
    lines = iter((ROOT / page).read_text().splitlines())
    for line in lines:
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        if cells[: len(titles)] == list(titles):
            next(lines)
            found = []
            for row in lines:
                if not row.startswith("|"):
                    return found
                found.append([cell.strip() for cell in row.strip("| ").split(" | ")])
    raise AssertionError(f"{page}: no table with the titles {titles}")


def minor(version: str) -> tuple[int, ...]:
    """Returns the first two numbers of a version."""
    return tuple(int(number) for number in version.split(".")[:2])


class Versions(unittest.TestCase):
    def test_engines_page_names_the_recorded_versions_of_pytorch(self):
        cell = next(row[1] for row in rows("docs/engines.md", "engine", "versions") if row[0] == "PyTorch")
        oldest, newest = (minor(version) for version in re.fullmatch(r"([\d.]+) to ([\d.]+)", cell).groups())
        for version in RECORDED["torch"]:
            self.assertTrue(oldest <= minor(version) <= newest, version)
        run = next(row for row in rows("docs/engines.md", "what", "where") if row[0].startswith("all tests of `nvfp4`"))
        self.assertEqual(re.findall(r"\d+\.\d+\.\d+", run[1]), list(RECORDED["torch"]))

    def test_recorded_runs_failed_nowhere(self):
        for package, versions in RECORDED.items():
            for version, found in versions.items():
                self.assertEqual(found["failed"], [], f"{package} {version}")
                self.assertGreater(found["passed"], 0, f"{package} {version}")
                self.assertEqual(found.get("cases", found["passed"]), found["passed"], f"{package} {version}")

    def test_tables_of_the_plugins_say_what_was_recorded(self):
        for package, page, engine in (
            ("vllm", "python/nvfp4_vllm/README.md", "vLLM"),
            ("sglang", "python/nvfp4_sglang/README.md", "SGLang"),
        ):
            said = {}
            for versions, torch, cases in rows(page, engine, "PyTorch that it pins"):
                said |= {version: (torch, cases) for version in versions.split(", ")}
            for version, found in RECORDED.get(package, {}).items():
                torch, cases = said[version]
                self.assertEqual(minor(torch), minor(found["torch"]), f"{engine} {version}")
                self.assertTrue(cases.startswith(f"{found['passed']} of {found['cases']}"), f"{engine} {version}: {cases}")


if __name__ == "__main__":
    unittest.main()
