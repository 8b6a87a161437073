"""Tests of the layer's routing, report and plot, for any machine: `python3 -m unittest discover benches/hopper`."""

from __future__ import annotations

import array
import doctest
import tempfile
import unittest
import xml.etree.ElementTree as xml
from pathlib import Path
from typing import Any

import layer_plot
import layer_report
import layers

MODELS = list(layers.MODELS.values())
SVG = "{http://www.w3.org/2000/svg}"


def load_tests(_loader: object, tests: unittest.TestSuite, _pattern: object) -> unittest.TestSuite:
    """Adds the examples in the modules."""
    for module in (layer_plot, layer_report, layers):
        tests.addTests(doctest.DocTestSuite(module))
    return tests


def point(model: str, routing: str, tokens: int, layer: float | None, hit: int = 4, **rivals: float) -> dict[str, Any]:
    """Returns a point with hit experts of 1 MB each. The layer takes `layer` µs, and twice that as a graph."""
    us = {name.replace("_graph", ",graph"): time for name, time in rivals.items()}
    if layer is not None:
        us |= {"layer": layer, "layer-graph": 2 * layer}
    return {
        "model": model,
        "routing": routing,
        "tokens": tokens,
        "hit": hit,
        "rows": tokens,
        "bytes": hit * 1e6,
        "operations": 1e9,
        "copy_bytes_per_second": 4e12,
        "us": {name: {"median": time, "runs": 120} for name, time in us.items()},
        "missing": {"compiled": "no compiler"},
        "host_us": {} if layer is None else {"layer": {"median": 15.0}},
        "launches": {} if layer is None else {"layer": 4},
    }


def result(*points: dict[str, Any]) -> dict[str, Any]:
    """Returns a result of these points."""
    made = {"gpu": "a GPU", "torch": "2", "triton": "3", "date": "today", "note": "a test"}
    names = [f"{one['model']} {one['routing']} {one['tokens']}" for one in points]
    return {"conditions": [made], "points": dict(zip(names, points, strict=True))}


class Routing(unittest.TestCase):
    """Properties of drawn routing."""

    def test_token_has_distinct_experts_and_weights_that_sum_to_one(self) -> None:
        for model in MODELS:
            for routing in ("uniform", "zipf"):
                drawn = layers.draw(model, 50, routing)
                for ids, weights in zip(drawn.ids, drawn.weights, strict=True):
                    self.assertEqual(len(set(ids)), model.k)
                    self.assertTrue(all(0 <= expert < model.experts for expert in ids))
                    self.assertAlmostEqual(sum(weights), 1.0)

    def test_only_the_same_seed_draws_the_same_routing(self) -> None:
        first, again, other = (layers.draw(MODELS[0], 9, "zipf", seed) for seed in (0, 0, 1))
        self.assertEqual(first, again)
        self.assertNotEqual(first.ids, other.ids)

    def test_zipf_is_skewed_and_uniform_is_not(self) -> None:
        skewed, even = (layers.draw(MODELS[0], 2048, routing).counts() for routing in ("zipf", "uniform"))
        mean = 2048 * MODELS[0].k / MODELS[0].experts
        self.assertGreater(max(skewed), 8 * mean)
        self.assertLess(max(even), 1.5 * mean)

    def test_experts_on_other_gpus_are_not_counted(self) -> None:
        rank = layers.MODELS["deepseek-r1/8"]
        drawn = layers.draw(rank, 512, "uniform")
        self.assertLess(abs(sum(drawn.counts()) / (512 * rank.k) - 1 / 8), 0.02)
        nobody = layers.draw(rank, 8, "elsewhere")
        self.assertEqual((sum(nobody.counts()), nobody.hit, nobody.weight_bytes(layers.NVFP4)), (0, 0, 0))
        self.assertEqual(rank.expert_map().count(-1), 224)
        with self.assertRaisesRegex(ValueError, "mixtral"):
            layers.draw(layers.MODELS["mixtral-8x7b"], 1, "elsewhere")

    def test_elsewhere_points_need_experts_on_other_gpus(self) -> None:
        found = [one.name for model in MODELS for one in layers.points(model, [1, 8, 32], ["elsewhere"])]
        self.assertEqual(found, ["deepseek-r1/8 elsewhere 1", "deepseek-r1/8 elsewhere 8"])

    def test_copies_have_the_required_bytes_and_are_two_at_least(self) -> None:
        one = layers.draw(MODELS[0], 1, "uniform")
        bytes_ = one.weight_bytes(layers.NVFP4)
        self.assertEqual(bytes_, 8 * 3 * 2048 * 768 * 9 // 16)
        self.assertEqual(one.copies(5 * bytes_, layers.NVFP4), 5)
        self.assertEqual(one.copies(5 * bytes_ + 1, layers.NVFP4), 6)
        self.assertEqual(one.copies(1, layers.NVFP4), 2)

    def test_files_for_the_binary_have_one_row_per_token(self) -> None:
        drawn = layers.draw(MODELS[2], 3, "uniform")
        with tempfile.TemporaryDirectory() as folder:
            paths = drawn.write(Path(folder))
            ids, weights = array.array("i"), array.array("f")
            ids.frombytes(Path(paths["ids"]).read_bytes())
            weights.frombytes(Path(paths["weights"]).read_bytes())
        self.assertEqual(ids.tolist(), sum(drawn.ids, []))
        self.assertAlmostEqual(weights[5], drawn.weights[1][1], places=6)


class Report(unittest.TestCase):
    """Properties of a report."""

    def test_contender_counts_with_its_faster_way(self) -> None:
        one = point("m", "uniform", 1, 10.0, marlin=40.0, marlin_graph=30.0, torch=35.0, torch_graph=90.0)
        self.assertEqual(layer_report.rivals(one), {"marlin": 30.0, "torch": 35.0})
        self.assertEqual((layer_report.best_rival(one), layer_report.own(one)), ("marlin", 10.0))
        self.assertAlmostEqual(layer_report.ratio(one) or 0, 3.0)
        self.assertIsNone(layer_report.ratio(point("m", "uniform", 1, None, marlin=40.0)))
        self.assertIsNone(layer_report.ratio(point("m", "uniform", 1, 10.0)))

    def test_goals_are_two_means_and_the_least_point(self) -> None:
        judged = layer_report.goals(
            result(
                point("m", "uniform", 32, 10.0, marlin=20.0),
                point("m", "zipf", 512, 10.0, marlin=45.0),
                point("m", "uniform", 2048, 10.0, marlin=9.6),
                point("m", "elsewhere", 8, 7.0, hit=0, marlin=70.0),
                point("m", "zipf", 1, 9.0, hit=0, marlin=90.0),
            )
        )
        values = [(round(reached, 4), wanted, met) for _, reached, wanted, met in judged]
        means = [(3.0, 1.35, True), (0.96, 1.05, False), (0.96, 0.97, False)]
        self.assertEqual(values, [*means, (7.0, 8.0, True), (9.0, 8.0, False)])
        self.assertIn("m uniform 2048", judged[2][0])

    def test_fp8_tokens_are_compared_only_with_16_bit_tokens(self) -> None:
        def both(tokens: int, layer: float, fp8: float, **others: float) -> dict[str, Any]:
            one = point("m", "uniform", tokens, layer, torch=30.0, **others)
            one["us"]["layer-fp8-graph"] = {"median": fp8, "runs": 120}
            return one

        many = both(2048, 20.0, 10.0, scaled=12.0), both(8192, 90.0, 45.0, scaled_graph=9.0)
        of = result(both(512, 10.0, 10.5), *many)
        values = [(round(reached, 4), met) for _, reached, _, met in layer_report.fp8_goals(of)]
        self.assertEqual(values, [(2.0, True), (0.9524, False)])
        self.assertEqual(layer_report.rivals(of["points"]["m uniform 2048"]), {"torch": 30.0})
        text = layer_report.text(of)
        self.assertRegex(text, r"m uniform 2048 +20.0 +10.0 +2.00 +12.0 +1.20 +100")
        self.assertRegex(text, r"m uniform 512 +10.0 +10.5 +0.95 +– +– +95")
        self.assertEqual(layer_report.fp8_goals(result(point("m", "uniform", 2048, 10.0))), [])
        self.assertNotIn("FP8", layer_report.text(result(point("m", "uniform", 2048, 10.0))))

    def test_few_tokens_may_take_fixed_time_plus_weight_reading(self) -> None:
        # 4 MB at 92 % of 4 TB/s take 1.09 µs.
        for us, met in ((13.0, True), (13.2, False)):
            ((_, reached, wanted, is_met),) = layer_report.goals(result(point("m", "uniform", 8, us)))
            self.assertEqual((reached, round(wanted, 2), is_met), (us, 13.09, met))
        self.assertEqual(layer_report.goals(result(point("m", "zipf", 8, 99.0))), [])

    def test_text_has_all_points_missing_contenders_and_missed_goals(self) -> None:
        text = layer_report.text(
            result(point("m", "uniform", 512, 10.0, marlin=12.0), point("m", "uniform", 8, 20.0, marlin=30.0))
        )
        rows = [line.split()[:5] for line in text.splitlines() if line.startswith("m uniform ")]
        self.assertEqual(rows[:2], [["m", "uniform", "8", "20.0", "30.0"], ["m", "uniform", "512", "10.0", "12.0"]])
        self.assertIn("compiled not measured at m uniform 512, m uniform 8: no compiler", text)
        self.assertIn("2 points of at most 512 tokens: 1.34, goal 1.35: missed", text)
        self.assertIn("least (m uniform 512): 1.20, goal 0.97: met", text)
        self.assertIn("layer: launches per run 4, host time per run 15.0 to 15.0 µs", text)

    def test_result_without_the_library_has_no_goals(self) -> None:
        alone = result(point("m", "uniform", 8, None, marlin=30.0))
        self.assertEqual(layer_report.goals(alone), [])
        self.assertIn("30.0", layer_report.text(alone))

    def test_merging_keeps_the_last_result_of_each_point(self) -> None:
        first = result(point("m", "uniform", 1, 10.0), point("m", "uniform", 8, 10.0))
        second = result(point("m", "uniform", 8, 20.0), point("n", "uniform", 1, 30.0))
        second["conditions"][0]["note"] = "another"
        both = layer_report.merged([first, second])
        times = {name: layer_report.own(one) for name, one in both["points"].items()}
        self.assertEqual(times, {"m uniform 1": 10.0, "m uniform 8": 20.0, "n uniform 1": 30.0})
        self.assertEqual([made["note"] for made in both["conditions"]], ["a test", "another"])
        self.assertEqual(len(layer_report.merged([first, first])["conditions"]), 1)


class Plot(unittest.TestCase):
    """Properties of the picture."""

    def setUp(self) -> None:
        self.points = [
            point(model, routing, tokens, 10.0, marlin=20.0 * tokens, torch=80.0)
            for model in ("first", "second & last")
            for routing in ("uniform", "zipf")
            for tokens in (1, 2, 3)
        ]

    def draw(self) -> xml.Element:
        return xml.fromstring(layer_plot.svg(result(*self.points)))

    def lines(self, drawn: xml.Element) -> list[list[tuple[float, float]]]:
        found = [line.attrib["points"].split() for line in drawn.iter(f"{SVG}polyline")]
        return [[(float(place.split(",")[0]), float(place.split(",")[1])) for place in line] for line in found]

    def test_rival_has_a_line_per_panel_and_slower_is_higher(self) -> None:
        lines = self.lines(self.draw())
        self.assertEqual([len(line) for line in lines], [3] * 8)
        marlin, torch = lines[:2]
        self.assertTrue(marlin[0][1] > marlin[1][1] > marlin[2][1])
        # The scale is logarithmic: the distance from 2 to 4 equals the distance from 4 to 8.
        self.assertAlmostEqual(marlin[0][1] - marlin[1][1], (marlin[1][1] - torch[1][1]), places=0)

    def test_all_lines_are_inside_the_picture(self) -> None:
        self.points[0]["us"]["torch"]["median"] = 0.7
        drawn = self.draw()
        _, _, width, height = map(float, drawn.attrib["viewBox"].split())
        for a, b in sum(self.lines(drawn), []):
            self.assertTrue(0 < a < width and 0 < b < height)

    def test_missing_point_breaks_the_line(self) -> None:
        del self.points[1]["us"]["marlin"]
        self.assertEqual([len(line) for line in self.lines(self.draw())], [1, 1, 3, 3, 3, 3, 3, 3, 3])

    def test_picture_has_names_and_both_color_schemes(self) -> None:
        picture = layer_plot.svg(result(*self.points))
        for words in (
            "second &amp; last",
            "vLLM, Marlin",
            "PyTorch, bf16",
            "even routing",
            "prefers-color-scheme: dark",
        ):
            self.assertIn(words, picture)

    def test_result_without_comparable_points_is_refused(self) -> None:
        with self.assertRaisesRegex(ValueError, "no point"):
            layer_plot.svg(
                result(point("m", "uniform", 1, None, marlin=1.0), point("m", "elsewhere", 1, 9.0, marlin=1.0))
            )


if __name__ == "__main__":
    unittest.main()
