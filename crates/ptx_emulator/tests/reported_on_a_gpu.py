#!/usr/bin/env python3
"""Runs the programs of reported.json on this machine's GPU, and under the tools of compute-sanitizer.

    cargo build -p nvfp4-tests --example program_on_a_gpu
    reported_on_a_gpu.py target/debug/examples/program_on_a_gpu OUT.json

Each program runs 22 times without a tool, and once with each tool. A run that takes longer than a limit counts as a hang. Programs whose
`.target` does not run on the GPU are left out. `tests/reported_gpu.json` is a record, which REPORTED.md shows.
"""

import concurrent.futures
import json
import pathlib
import re
import subprocess
import sys

TESTS = pathlib.Path(__file__).resolve().parent
TOOLS = ["racecheck", "memcheck", "synccheck", "initcheck"]
TIMES, SECONDS, SECONDS_OF_A_TOOL = 22, 30, 90
FINDINGS = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)")
FIRST = re.compile(r"^========= (?:Error: |Warning: )?(.+)$", re.M)


def run(command, seconds):
    """Returns the output, or `None` after the time limit."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout + done.stderr


def plain(launcher, program):
    """Returns the number of runs by verdict."""
    output = run([launcher, program, str(TIMES)], SECONDS)
    if output is None:
        return {"hang": 1}
    lines = [line for line in output.splitlines() if line.startswith("{")]
    if not lines:
        return {"error": output.strip()[-300:]}
    return {verdict: number for verdict, number in json.loads(lines[-1]).items() if number}


def with_tool(launcher, program, tool):
    """Returns the number of findings and the first one; nothing if there is none."""
    output = run(["compute-sanitizer", "--tool", tool, launcher, program, "1"], SECONDS_OF_A_TOOL)
    if output is None:
        return {"hang": 1}
    number = FINDINGS.search(output)
    if not number:
        return {"error": output.strip()[-300:]}
    if not int(number[1]):
        return {}
    messages = [line for line in FIRST.findall(output) if not line.startswith("COMPUTE-SANITIZER") and "SUMMARY" not in line]
    return {"findings": int(number[1])} | ({"first": messages[0].strip()} if messages else {})


def record(launcher, program):
    """Returns the results of one program; `None` if the GPU does not run it."""
    alone = plain(launcher, program)
    if "skipped" in alone:
        return None
    found = {tool: with_tool(launcher, program, tool) for tool in TOOLS}
    return {"gpu": alone, "tools": {tool: what for tool, what in found.items() if what}}


def main():
    launcher, out = sys.argv[1:]
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    version = run(["compute-sanitizer", "--version"], 60)
    reports = json.loads((TESTS / "reported.json").read_text())
    names = [name for report in reports for name in report.get("programs") or []]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = pool.map(lambda name: record(launcher, str(TESTS / name)), names)
        programs = {name: result for name, result in zip(names, results) if result}
    card, version = run(query, 60).strip(), re.search(r"Version ([\d.]+)", version)[1]
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(result)}" for name, result in programs.items())
    head = f'{{\n "gpu": {json.dumps(card)},\n "compute-sanitizer": {json.dumps(version)},\n "programs": {{\n'
    pathlib.Path(out).write_text(f"{head}{lines}\n }}\n}}\n")


if __name__ == "__main__":
    main()
