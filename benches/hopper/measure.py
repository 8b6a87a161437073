"""Times a peer: the device's time of one run of the operation, with inputs already on the device.

A run is everything between its two events: the product of all groups and, if it is a separate launch, silu·up. Each
run takes the next copy of weights, tokens and outputs, so that the L2 cache has none of them. Runs are queued behind a
kernel that only waits, long enough that the device never waits for the host.
"""

from __future__ import annotations

import datetime
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import triton

# Launches the operation on the current stream. Returns the output `[T, N]`, always in the same memory.
Run = Callable[[], torch.Tensor]

WARM_UP = 3
# Cycles of `torch.cuda._sleep` per second, at the highest clock of an H200.
CYCLES = 1.98e9


class Contender:
    """A peer with copies of its inputs, which it uses in turn."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = list(runs)
        self.next = 0
        self.host_seconds = self._host_seconds()

    def _step(self) -> None:
        self.next = (self.next + 1) % len(self.runs)
        self.runs[self.next]()

    def _host_seconds(self, runs: int = 5) -> float:
        """Returns the host time to queue a run."""
        for _ in range(len(self.runs)):
            self._step()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(runs):
            self._step()
        seconds = (time.perf_counter() - start) / runs
        torch.cuda.synchronize()
        return seconds

    def round(self, runs: int) -> list[float]:
        """Returns the microseconds of `runs` runs, after some warm-up runs."""
        count = WARM_UP + runs
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        torch.cuda._sleep(int((1.5 * count * (self.host_seconds + 10e-6) + 1e-3) * CYCLES))
        for start, end in events:
            start.record()
            self._step()
            end.record()
        torch.cuda.synchronize()
        return [1e3 * start.elapsed_time(end) for start, end in events[WARM_UP:]]


def alternate(contenders: Mapping[str, Callable[[], list[float]]], rounds: int) -> dict[str, list[float]]:
    """Returns each contender's times of all rounds. Every second round is in reverse order, so that neighbors change.

    >>> order = []
    >>> alternate({name: lambda name=name: order.append(name) or [1.0] for name in "ab"}, 2)
    {'a': [1.0, 1.0], 'b': [1.0, 1.0]}
    >>> order
    ['a', 'b', 'b', 'a']
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name in list(contenders) if number % 2 == 0 else list(reversed(contenders)):
            times[name] += contenders[name]()
    return times


def fastest(candidates: Sequence[Sequence[Run]], runs: int = 7) -> int:
    """Returns the index of the candidate with the least median. A candidate that cannot run here is skipped."""
    times = []
    for candidate in candidates:
        try:
            times.append(statistics.median(Contender(candidate).round(runs)))
        except Exception as error:  # a configuration may need more than the device has
            if not torch.cuda.is_available() or "illegal" in str(error):
                raise
            times.append(float("inf"))
    return times.index(min(times))


def relative_error(run: Run, reference: torch.Tensor) -> float:
    """‖out − reference‖ / ‖reference‖ of a run, after the output was filled with NaN; NaN if any element still is."""
    run().fill_(float("nan"))
    torch.cuda.synchronize()
    out = run().double()
    return (torch.linalg.vector_norm(out - reference) / torch.linalg.vector_norm(reference)).item()


def copy_rate(gigabytes: int = 4, runs: int = 15) -> list[float]:
    """Returns bytes per second of copies from device memory to device memory, read plus written."""
    source = torch.randint(256, (gigabytes << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = Contender([lambda: target.copy_(source)]).round(runs)
    return [2 * source.numel() / (us * 1e-6) for us in times]


def f16_rate(size: int = 8192, runs: int = 15) -> list[float]:
    """Returns operations per second of PyTorch's f16 product of two square matrices of random numbers."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.float16) for _ in range(2))
    out = torch.empty_like(a)
    times = Contender([lambda: torch.mm(a, b, out=out)]).round(runs)
    return [2 * size**3 / (us * 1e-6) for us in times]


def captured(run: Run) -> Run:
    """Returns the same run as a CUDA graph, captured once, with its own memory."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        run()  # does the work of a first call outside of the graph
        stream.synchronize()
        graph.capture_begin()
        try:
            out = run()
        finally:
            graph.capture_end()

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    return replay


def summary(us: list[float]) -> dict[str, float]:
    """Returns statistics of the times of all rounds."""
    ordered = sorted(us)
    return {
        "median": statistics.median(us),
        "p10": ordered[len(us) // 10],
        "p90": ordered[len(us) * 9 // 10],
        "runs": len(us),
    }


def conditions(note: str) -> dict[str, str]:
    """Returns date, GPU and versions of the run."""
    query = "--query-gpu=name,driver_version,clocks.sm,clocks.mem,power.limit"
    smi = subprocess.run(["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, check=False)
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "gpu": smi.stdout.strip() or torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "note": note,
    }
