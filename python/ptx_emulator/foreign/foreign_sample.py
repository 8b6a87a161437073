"""The pytest plugin of a run of another project's tests: a sample of each file, in a drawn order, with limits of time.

`foreign_tests.py` loads it, and sets its environment variables.
"""

import collections
import json
import os
import pathlib
import random
import signal
import time

import pytest
from foreign_report import NOT_REACHED, TOO_LONG

SEED, PER_FILE = os.environ["FOREIGN_SEED"], int(os.environ["FOREIGN_PER_FILE"])
TEST_SECONDS, DEADLINE = float(os.environ["FOREIGN_TEST_SECONDS"]), float(os.environ["FOREIGN_DEADLINE"])
COUNTS = pathlib.Path(os.environ["FOREIGN_COUNTS"])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Keeps a sample of each file. Each worker of pytest-xdist draws the same one."""
    by_file = collections.defaultdict(list)
    for item in items:
        by_file[item.nodeid.split("::")[0]].append(item)
    kept = []
    for name, tests in by_file.items():
        kept += random.Random(f"{SEED} {name}").sample(tests, min(PER_FILE, len(tests)))
    # A file's tests are spread over the run, so that its end cuts all files alike.
    random.Random(SEED).shuffle(kept)
    if getattr(config, "workerinput", {"workerid": "gw0"})["workerid"] == "gw0":
        COUNTS.write_text(json.dumps({name: len(tests) for name, tests in by_file.items()}))
    chosen = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = kept


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    if time.time() > DEADLINE:
        pytest.skip(NOT_REACHED)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    """Ends a test at its limit. A launch ends first, at the plugin's own limit."""

    def late(*_):
        signal.setitimer(signal.ITIMER_REAL, 5)  # The test may catch the first one.
        pytest.fail(f"{TOO_LONG} {TEST_SECONDS:g} s", pytrace=False)

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, TEST_SECONDS)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
