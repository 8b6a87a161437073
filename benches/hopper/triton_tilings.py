"""Times single tilings of the Triton peer on a Hopper GPU, to compare the time model with them.

python3 triton_tilings.py --out result.json
"""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path

import torch

from inputs import Inputs, Problem
from measure import Contender, alternate, conditions, relative_error, summary
from peers import triton_decode
from triton_decode_kernel import SHAPES, TIMED, Config

ROUNDS, RUNS = 6, 20
# All copies of the operands together are three times as large as the L2 cache.
ROTATED = 180 << 20


def measure(problem: Problem, tilings: list[Config]) -> dict[str, dict[str, float]]:
    """Returns the times of each tiling, after its result was checked."""
    inputs = Inputs(problem)
    reference = inputs.reference()
    copies = max(2, -(-ROTATED // triton_decode.weight_bytes(inputs)))
    sets = triton_decode.operands(inputs, copies)
    contenders = {}
    for tiling in tilings:
        runs = triton_decode.runs(inputs, tiling, sets)
        error = relative_error(runs[0], reference)
        assert error < 0.01, f"{problem.name} {tiling}: relative error {error}"
        contenders[str(tiling)] = functools.partial(Contender(runs).round, RUNS)
    return {name: summary(us) for name, us in alternate(contenders, ROUNDS).items()}


def main() -> None:
    """Measures all tilings and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    shapes = {shape["name"]: shape for shape in json.loads(SHAPES.read_text())}
    result = {"conditions": conditions("tilings of the Triton peer"), "shapes": {}}
    for name, tilings in TIMED.items():
        shape = shapes[name]
        problem = Problem.from_groups(name, shape["op"], shape["input"], shape["groups"])
        us = measure(problem, tilings)
        result["shapes"][name] = {"us": us}
        print(name, {tiling: round(times["median"], 2) for tiling, times in us.items()}, flush=True)
        torch.cuda.empty_cache()
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
