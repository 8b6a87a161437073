"""The measured layers: sizes of models, and routing drawn from a seed. Needs neither a GPU nor a package."""

from __future__ import annotations

import array
import dataclasses
import itertools
import random
from pathlib import Path

# Bytes per NVFP4 weight: half a byte, and a scale byte per 16 weights.
NVFP4 = 9 / 16
BF16 = 2


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes of a model's MoE layer. The router's experts `first .. first + local` are on this GPU."""

    name: str
    hidden: int
    intermediate: int
    experts: int
    k: int
    local: int
    first: int = 0

    @property
    def weights(self) -> int:
        """Number of weights in an expert: gate, up and down projection."""
        return 3 * self.hidden * self.intermediate

    def is_local(self, expert: int) -> bool:
        """Whether an expert of the router is on this GPU."""
        return self.first <= expert < self.first + self.local

    def expert_map(self) -> list[int]:
        """Returns the index on this GPU, or -1, of each expert of the router.

        >>> Model("x", 64, 64, 4, 1, local=2, first=1).expert_map()
        [-1, 0, 1, -1]
        """
        return [expert - self.first if self.is_local(expert) else -1 for expert in range(self.experts)]


MODELS = {
    model.name: model
    for model in (
        Model("qwen3-30b", 2048, 768, 128, 8, local=128),
        Model("mixtral-8x7b", 4096, 14336, 8, 2, local=8),
        Model("gpt-oss-120b", 2880, 2880, 128, 4, local=128),
        Model("deepseek-r1/8", 7168, 2048, 256, 8, local=32),
    )
}
TOKENS = (1, 8, 32, 128, 512, 2048, 8192)
# `elsewhere`: every token has experts on other GPUs only.
ROUTINGS = ("uniform", "zipf", "elsewhere")


@dataclasses.dataclass(frozen=True)
class Point:
    """Inputs of a layer's step: model, number of tokens and routing."""

    model: Model
    tokens: int
    routing: str
    ids: list[list[int]]
    weights: list[list[float]]

    @property
    def name(self) -> str:
        """Key of the point in results."""
        return f"{self.model.name} {self.routing} {self.tokens}"

    def counts(self) -> list[int]:
        """Returns the number of rows of each local expert."""
        counts = [0] * self.model.local
        for expert in itertools.chain.from_iterable(self.ids):
            if self.model.is_local(expert):
                counts[expert - self.model.first] += 1
        return counts

    @property
    def hit(self) -> int:
        """Number of local experts with at least one row."""
        return sum(count > 0 for count in self.counts())

    def weight_bytes(self, element: float) -> int:
        """Returns the bytes of the weights that the step reads."""
        return int(self.hit * self.model.weights * element)

    def copies(self, rotate_bytes: int, element: float) -> int:
        """Returns the number of copies whose hit experts have at least `rotate_bytes` bytes together; at least two."""
        return max(2, -(-rotate_bytes // max(1, self.weight_bytes(element)))) if self.hit else 2

    @property
    def operations(self) -> int:
        """Number of multiplications and additions of all rows."""
        return 2 * sum(self.counts()) * self.model.weights

    def write(self, folder: Path) -> dict[str, str]:
        """Writes ids as i32 and weights as f32, little-endian `[tokens, k]`, to files for another process."""
        paths = {"ids": folder / "ids.i32", "weights": folder / "weights.f32"}
        paths["ids"].write_bytes(array.array("i", itertools.chain.from_iterable(self.ids)).tobytes())
        paths["weights"].write_bytes(array.array("f", itertools.chain.from_iterable(self.weights)).tobytes())
        return {name: str(path) for name, path in paths.items()}


def draw(model: Model, tokens: int, routing: str, seed: int = 0) -> Point:
    """Draws routing: k different experts per token, and weights that sum to one.

    With `zipf`, the expert of rank r is drawn in proportion to 1/r. The ranks are random too.
    """
    # A string seed gives the same numbers in every process; a tuple does not.
    dice = random.Random(f"{model.name} {routing} {tokens} {seed}")
    if routing == "elsewhere":
        candidates = [expert for expert in range(model.experts) if not model.is_local(expert)]
        if len(candidates) < model.k:
            raise ValueError(f"{model.name}: expected at least {model.k} experts on other GPUs")
    else:
        candidates = list(range(model.experts))
    if routing == "zipf":
        dice.shuffle(candidates)
        cumulative = list(itertools.accumulate(1 / rank for rank in range(1, len(candidates) + 1)))

    def experts() -> list[int]:
        if routing != "zipf":
            return dice.sample(candidates, model.k)
        chosen: dict[int, None] = {}
        while len(chosen) < model.k:
            chosen[dice.choices(candidates, cum_weights=cumulative)[0]] = None
        return list(chosen)

    def weights() -> list[float]:
        parts = [dice.uniform(0.5, 1.5) for _ in range(model.k)]
        return [part / sum(parts) for part in parts]

    return Point(model, tokens, routing, [experts() for _ in range(tokens)], [weights() for _ in range(tokens)])


def points(model: Model, tokens: list[int], routings: list[str]) -> list[Point]:
    """Returns a model's points. `elsewhere`: only for models with experts on other GPUs, and up to 8 tokens."""
    return [
        draw(model, count, routing)
        for routing in routings
        for count in tokens
        if routing != "elsewhere" or (model.local < model.experts and count <= 8)
    ]
