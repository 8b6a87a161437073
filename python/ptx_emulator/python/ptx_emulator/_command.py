"""The command `ptx-emulator`, a program of its own that the wheel contains."""

import os
import stat
import sys

from ._libcuda import LIB


def main() -> None:
    """Replaces this process by the command."""
    path = LIB / "ptx-emulator"
    if not os.access(path, os.X_OK):
        # Some installers drop the permission to execute.
        path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    os.execv(path, ["ptx-emulator", *sys.argv[1:]])
