"""Tests of the field and its report. They run on any machine: `python3 -m unittest discover benches/hopper`."""

from __future__ import annotations

import doctest
import unittest
from typing import Any

import field
import field_report


def load_tests(_loader: object, tests: unittest.TestSuite, _pattern: object) -> unittest.TestSuite:
    """Adds the examples in the modules."""
    for module in (field, field_report):
        tests.addTests(doctest.DocTestSuite(module))
    return tests


def layer(model: str, tokens: int, megabytes: float, gigaflop: float, **us: float) -> dict[str, Any]:
    """Returns a layer's point on a card that copies 1 MB and computes 1 GFLOP in a microsecond."""
    return {
        "model": model,
        "routing": "uniform",
        "tokens": tokens,
        "bytes": megabytes * 1e6,
        "operations": gigaflop * 1e9,
        "copy_bytes_per_second": 1e12,
        "f16_operations_per_second": 1e15,
        "us": {name: {"median": time} for name, time in us.items()},
        "missing": {},
    }


def matrix(tokens: int, megabytes: float, gigaflop: float, **us: float) -> dict[str, Any]:
    """Returns a matrix's point on the same card."""
    point = layer("", tokens, megabytes, gigaflop, **us) | {"n": 4096, "k": 7168}
    del point["model"], point["routing"]
    return point


class Field(unittest.TestCase):
    """Properties of the field."""

    def test_halves_are_apart_and_of_the_same_size(self) -> None:
        for of in (field.LAYERS, field.MATRICES):
            self.assertFalse(set(of[field.TUNED]) & set(of[field.HELD_OUT]))
            self.assertEqual(len(of[field.TUNED]), len(of[field.HELD_OUT]))

    def test_ranks_have_experts_of_their_own(self) -> None:
        for model in field.ALL_LAYERS.values():
            self.assertLessEqual(model.first + model.local, model.experts)
            self.assertEqual(model.intermediate % 16, 0)

    def test_part_that_does_not_exist_is_refused(self) -> None:
        with self.assertRaisesRegex(ValueError, "part 3/2"):
            field.part(["a"], "3/2")


class Report(unittest.TestCase):
    """Properties of the report."""

    def test_limit_is_the_longer_of_weights_and_products(self) -> None:
        self.assertEqual(field_report.limit_us(layer("mixtral-8x7b", 1, megabytes=90, gigaflop=1)), 90)
        self.assertEqual(field_report.limit_us(layer("mixtral-8x7b", 1, megabytes=90, gigaflop=200)), 200)

    def test_time_is_allowed_only_where_weights_are_the_limit(self) -> None:
        self.assertAlmostEqual(field_report.allowed_us(layer("mixtral-8x7b", 1, 90, 1)) or 0, 100 + 14)
        self.assertAlmostEqual(field_report.allowed_us(matrix(1, 90, 1)) or 0, 100 + 8)
        self.assertIsNone(field_report.allowed_us(layer("mixtral-8x7b", 1, 90, 91)))

    def test_few_tokens_of_a_matrix_have_a_goal_of_their_own(self) -> None:
        goals = [field_report.least_ratio(point) for point in (matrix(64, 1, 1), matrix(96, 1, 1))]
        self.assertEqual(goals, [1.0, 0.97])
        self.assertEqual(field_report.least_ratio(layer("mixtral-8x7b", 1, 1, 1)), 0.97)

    def test_report_marks_missed_goals_and_keeps_halves_apart(self) -> None:
        points = [
            layer("mixtral-8x7b", 1, 90, 1, layer=120, marlin=140),
            layer("lfm2-8b-a1b", 1, 90, 1, layer=110, marlin=100),
            matrix(8, 90, 1, linear=100, marlin=99),
        ]
        made = {"gpu": "a GPU", "torch": "2", "triton": "3", "date": "today", "note": "a test"}
        parts = [{"conditions": [made], "points": {"a": points[0], "b": points[1]}}]
        parts.append({"conditions": made, "points": {"c": points[2]}})
        merged = field_report.merged(parts)
        self.assertEqual(merged["conditions"], [made])
        lines = field_report.text(merged).splitlines()
        ends = {line.split()[0]: line.split()[-1] for line in lines if line.split()[1:2] in (["1"], ["8"])}
        self.assertEqual(ends, {"mixtral-8x7b": "+", "lfm2-8b-a1b": "*", "4096x7168": "*"})
        summary = {line.split("  ")[0]: line.split()[2:] for line in lines if line.startswith(("layers,", "matrices,"))}
        self.assertEqual(summary["layers, tuned"][:4], ["1", "1.17", "1.17", "0"])
        self.assertEqual(summary["layers, held-out"][:4], ["1", "0.91", "0.91", "1"])
        self.assertEqual(summary["matrices, tuned"][:4], ["1", "0.99", "0.99", "1"])


if __name__ == "__main__":
    unittest.main()
