"""Prints the time of a launch of an empty kernel of one block, in microseconds: the minimum and the median of batches."""

import statistics
import sys
import time
from pathlib import Path

import numpy as np

import ptx_emulator

sys.path.insert(0, str(Path(__file__).parent / "tests"))
from kernels import DOUBLE, EMPTY  # noqa: E402

BATCH = 100


def measure(name, call):
    call()
    times = []
    for _ in range(50):
        began = time.perf_counter()
        for _ in range(BATCH):
            call()
        times.append((time.perf_counter() - began) / BATCH * 1e6)
    print(f"{name}: {min(times):.1f} us at least, {statistics.median(times):.1f} us median of {len(times)} batches")


device = ptx_emulator.Device("h200")
x, y = np.zeros(32, np.float32), np.zeros(32, np.float32)
measure("launch, empty kernel", lambda: ptx_emulator.launch(EMPTY))
measure("Device.launch, empty kernel", lambda: device.launch(EMPTY))
measure(
    "launch, one block of 32 threads and two arrays", lambda: ptx_emulator.launch(DOUBLE, block=32, args=[x, y, 32])
)
