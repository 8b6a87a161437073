"""Tests of the report on linear layers. They run on any machine: `python3 -m unittest discover benches/hopper`."""

from __future__ import annotations

import doctest
import unittest
from typing import Any

import linear_report


def load_tests(_loader: object, tests: unittest.TestSuite, _pattern: object) -> unittest.TestSuite:
    """Adds the examples in `linear_report`."""
    tests.addTests(doctest.DocTestSuite(linear_report))
    return tests


NAMES = {"linear_fp8": "linear-fp8", "torch_fp8": "torch fp8"}


def point(tokens: int, **us: float) -> dict[str, Any]:
    """Returns a point of a matrix of a million numbers, with these times in µs."""
    return {
        "n": 1000,
        "k": 1000,
        "tokens": tokens,
        "us": {NAMES.get(name, name): {"median": time} for name, time in us.items()},
        "missing": {"humming": "no package"},
        "host_us": {"linear": {"median": 3.0}},
    }


def result(*points: dict[str, Any]) -> dict[str, Any]:
    """Returns a result of these points."""
    return {
        "conditions": {"gpu": "a GPU", "torch": "2", "triton": "3", "date": "today", "note": "a test"},
        "runs": 120,
        "points": {f"1000x1000 {point['tokens']}": point for point in points},
    }


class Report(unittest.TestCase):
    """Properties of a report."""

    def test_fp8_checkpoint_is_not_a_rival(self) -> None:
        """Neither an FP8 checkpoint nor this library's layer with FP8 tokens is a rival."""
        of = point(1, linear=10, linear_fp8=1, torch_fp8=2, marlin=15, humming=20)
        self.assertEqual(linear_report.ratio(of), 1.5)

    def test_each_goal_names_its_worst_point(self) -> None:
        """The report names the worst point of each goal."""
        text = linear_report.text(result(point(1, linear=10, marlin=12), point(64, linear=10, marlin=9)))
        self.assertIn("goal 1.00: least 0.90 (1000x1000 64), geometric mean 1.04: missed", text)
        text = linear_report.text(result(point(512, linear=10, marlin=9.6)))
        self.assertIn("goal 0.95: least 0.96 (1000x1000 512), geometric mean 0.96: met", text)

    def test_missing_contenders_are_named(self) -> None:
        """The report names each contender that was not measured, with the reason."""
        self.assertIn("humming not measured at 1000x1000 1: no package", linear_report.text(result(point(1, linear=1))))

    def test_merged_parts_are_in_the_order_of_tokens(self) -> None:
        """Points of merged parts are sorted by tokens."""
        parts = [result(point(16, linear=1), point(256, linear=1)), result(point(4, linear=1))]
        tokens = [of["tokens"] for of in linear_report.merged(parts)["points"].values()]
        self.assertEqual(tokens, [4, 16, 256])


if __name__ == "__main__":
    unittest.main()
