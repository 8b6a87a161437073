"""The causes of failures in other projects' tests, and the table of a record."""

import collections
import json
import pathlib
import re

NOT_REACHED = "not reached: the run's time ended"
TOO_LONG = "the test ran for more than"
CAUSES = {
    "fault": "fault of the project's kernel",
    "unsupported": "not supported by the emulator",
    "environment": "environment",
    "time": "time limit",
    "unexplained": "not explained",
}


def cause_of(project: str, failure: dict, known: list[dict]) -> tuple[str, str]:
    """Returns the cause of a failure and the words that explain it. `known`: causes of projects.toml, of which the first that fits counts."""
    for cause in known:
        if cause.get("project", project) != project or not re.search(cause.get("test", ""), f"{failure['file']} {failure['test']}"):
            continue
        if cause.get("fault", failure.get("ptx_fault")) != failure.get("ptx_fault"):
            continue
        if found := re.search(cause.get("message", ""), failure["message"]):
            return cause["cause"], found.expand(cause["why"])
    return "unexplained", failure["message"].split("\n")[0][:200]


def causes_in(file: str, failures: list[dict]) -> dict[str, int]:
    """Returns the number of failures of a file by cause."""
    return dict(sorted(collections.Counter(failure["cause"] for failure in failures if failure["file"] == file).items()))


def counted(tests: list[dict], failures: list[dict], counts: dict[str, int]) -> dict[str, dict]:
    """Returns the outcomes by file. `counts`: tests of each file before the sample was drawn."""
    found = {}
    for file in sorted({*counts, *(test["file"] for test in tests)}):
        mine = [test for test in tests if test["file"] == file]
        late = sum(test["outcome"] == "skipped" and NOT_REACHED in test["message"] for test in mine)
        found[file] = {
            "tests": counts.get(file, 0),
            "passed": sum(test["outcome"] == "passed" for test in mine),
            "passed_without_launch": sum(test["outcome"] == "passed" and "ptx_launches" not in test for test in mine),
            "skipped": sum(test["outcome"] == "skipped" for test in mine) - late,
            "not_reached": late,
            "failed": causes_in(file, failures),
        }
    return found


def table(record: dict) -> str:
    """Returns the tables of a record: outcomes by project, then causes."""
    head = ["project", "run on", "tests", "in the sample", "not reached", "skipped", "passed, with launches", "passed, without"]
    lines = [[*head, *CAUSES.values()]]
    reasons = []
    for name, entry in sorted(record.items(), key=lambda one: one[0].lower()):
        files = entry["files"].values()
        total = {key: sum(file[key] for file in files) for key in ("tests", "passed", "passed_without_launch", "skipped", "not_reached")}
        causes = collections.Counter(failure["cause"] for failure in entry["failures"])
        drawn = total["passed"] + total["skipped"] + total["not_reached"] + sum(causes.values())
        launched = total["passed"] - total["passed_without_launch"]
        numbers = [total["tests"], drawn, total["not_reached"], total["skipped"], launched, total["passed_without_launch"]]
        where = f"{entry['gpu']}, Triton {entry['versions']['triton']}"
        lines.append([f"[{name}]({entry['source']}) {entry['revision']}", where, *map(str, [*numbers, *(causes[one] for one in CAUSES)])])
        counted_reasons = collections.Counter((list(CAUSES).index(failure["cause"]), failure["why"]) for failure in entry["failures"])
        for (cause, why), count in sorted(counted_reasons.items()):
            reasons.append([name, list(CAUSES.values())[cause], why, str(count)])
    lines.insert(1, ["---", "---"] + ["--:"] * (len(lines[0]) - 2))
    reasons = [["project", "cause", "failures", "tests"], ["---", "---", "---", "--:"], *reasons]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + "\n" + "".join(f"| {' | '.join(line)} |\n" for line in reasons)
