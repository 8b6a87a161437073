"""Tests of the report. They run on any machine: `python3 -m unittest discover benches/hopper`."""

from __future__ import annotations

import doctest
import unittest
from typing import Any

import report


def load_tests(_loader: object, tests: unittest.TestSuite, _pattern: object) -> unittest.TestSuite:
    """Adds the examples in `report`."""
    tests.addTests(doctest.DocTestSuite(report))
    return tests


def shape(kernel: float, **peers: float) -> dict[str, Any]:
    """Returns a shape of 1 GB and 1 Top whose kernel takes `kernel` µs."""
    us = {report.KERNEL: kernel, report.KERNEL_GRAPH: kernel, "gated_simt": kernel / 10, **peers}
    return {
        "bytes": 1e9,
        "operations": 1e12,
        "us": {name: {"median": time} for name, time in us.items()},
        "missing": {"marlin": "no library"},
        "host_us": {name: {"median": 5.0} for name in us},
        "launches": {name: 1 for name in us},
    }


def result(**shapes: dict[str, Any]) -> dict[str, Any]:
    """Returns a result of these shapes on a device with 4 TB/s and 800 TFLOP/s."""
    return {
        "conditions": {"gpu": "a GPU", "torch": "2", "triton": "3", "date": "today", "note": "a test"},
        "rounds": 1,
        "runs": 1,
        "ceilings": {"copy_bytes_per_second": 4e12, "f16_operations_per_second": 8e14},
        "shapes": {name.replace("_", "-"): shape for name, shape in shapes.items()},
    }


class Report(unittest.TestCase):
    """Properties of a report."""

    def test_library_is_never_its_own_best_peer(self) -> None:
        measured = shape(100.0, triton=300.0, humming=200.0)
        self.assertEqual(report.best_peer(measured), "humming")
        self.assertAlmostEqual(report.ratio(measured) or 0, 2.0)
        self.assertIsNone(report.ratio(shape(100.0)))

    def test_another_checkpoint_is_shown_but_not_a_peer(self) -> None:
        measured = shape(100.0, humming=200.0, **{report.OTHER_CHECKPOINT: 50.0})
        self.assertEqual(report.best_peer(measured), "humming")
        text = report.text(result(moe_1=measured))
        self.assertIn("50.0", text)
        self.assertIn("torch fp8: another checkpoint", text)
        self.assertNotIn("another checkpoint", report.text(result(moe_1=shape(100.0, humming=200.0))))

    def test_shares_are_relative_to_the_runs_ceilings(self) -> None:
        measured = shape(1000.0)
        of = result(decode_1=measured)
        self.assertAlmostEqual(report.copy_share(of, measured), 0.25)
        self.assertAlmostEqual(report.f16_share(of, shape(2000.0)), 0.625)

    def test_goal_needs_all_of_its_shapes(self) -> None:
        names = [name.replace("-", "_") for name in report.AGAINST_PEERS]
        all_shapes = {name: shape(1000.0, humming=1600.0) for name in names}
        judged = report.goals(result(**all_shapes))
        self.assertEqual([round(reached, 4) for _, reached, _ in judged], [1.6, 0.25, 0.25, 1.25])
        del all_shapes["moe_3"]
        self.assertEqual(len(report.goals(result(**all_shapes))), 3)

    def test_the_text_has_a_row_for_each_shape_and_says_what_is_missing_and_missed(self) -> None:
        text = report.text(result(moe_1=shape(1000.0, humming=1500.0), decode_1=shape(300.0)))
        self.assertIn("moe-1: marlin not measured: no library", text)
        self.assertIn("share of the f16 matrix rate at moe-1: 1.25, goal 0.65: met", text)
        self.assertIn("share of copy bandwidth at decode-1: 0.83, goal 0.75: met", text)
        rows = [line.split() for line in text.splitlines() if line.startswith(("moe-1 ", "decode-1 "))]
        self.assertEqual([row[:2] for row in rows], [["moe-1", "1000.0"], ["decode-1", "300.0"]])


if __name__ == "__main__":
    unittest.main()
