"""Paths and environments of the tests."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
pytest_plugins = ["pytester"]

# A GPU of the machine must not take part.
os.environ.setdefault("PTX_EMULATOR", "1")
