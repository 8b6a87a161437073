"""The field: layers and matrices of current models with 1 to 8192 tokens. Needs neither a GPU nor a package.

The library's rules for tiles and splits may be tuned on the half `TUNED`. The half `HELD_OUT` shows whether they hold
elsewhere. A part of the field is a share of its points, drawn without looking at them. All parts are the whole field.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

from layers import MODELS, Model

TUNED, HELD_OUT = "tuned", "held-out"
TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048, 4096, 8192)

# Sizes as in `nvfp4 shapes`; `@tp8` and `@ep8` are the parts of one of eight ranks.
LAYERS: dict[str, dict[str, Model]] = {
    TUNED: MODELS
    | {
        model.name: model
        for model in (
            Model("deepseek-v3@tp8", 7168, 256, 256, 8, local=256),
            Model("glm-4.5-air", 4096, 1408, 128, 8, local=128),
            Model("minimax-m2", 3072, 1536, 256, 8, local=256),
            Model("llama-4-scout", 5120, 8192, 16, 1, local=16),
            Model("qwen3.5-35b-a3b", 2048, 512, 256, 8, local=256),
            Model("qwen3-235b-a22b@tp4", 4096, 384, 128, 8, local=128),
        )
    },
    HELD_OUT: {
        model.name: model
        for model in (
            Model("qwen3-30b-a3b@tp8", 2048, 96, 128, 8, local=128),
            Model("qwen3-next-80b-a3b", 2048, 512, 512, 10, local=512),
            Model("kimi-k2@tp8", 7168, 256, 384, 8, local=384),
            Model("glm-5@ep8", 6144, 2048, 256, 8, local=32),
            Model("mistral-small-4@ep8", 4096, 2048, 128, 4, local=16),
            Model("step-3.7-flash@tp4", 4096, 320, 288, 8, local=288),
            Model("gemma-4-26b-a4b", 2816, 704, 128, 8, local=128),
            Model("granite-4.0-h-small", 4096, 768, 72, 10, local=72),
            Model("ernie-4.5-21b-a3b", 2560, 1536, 64, 6, local=64),
            Model("lfm2-8b-a1b", 2048, 1792, 32, 4, local=32),
        )
    },
}
ALL_LAYERS = LAYERS[TUNED] | LAYERS[HELD_OUT]

# N x K. The held-out half: Qwen3-0.6B qkv and down, Qwen3-8B gate_up and down, Qwen3-32B o, Llama-70B qkv, o and down.
MATRICES: dict[str, tuple[str, ...]] = {
    TUNED: (
        "4096x7168", "7168x2048", "5120x5120", "4096x14336", "2880x4096", "6144x4096", "28672x4096", "4096x4096",
    ),
    HELD_OUT: (
        "4096x1024", "1024x3072", "24576x4096", "4096x12288", "5120x8192", "10240x8192", "8192x8192", "8192x28672",
    ),
}  # fmt: skip

T = TypeVar("T")


def half(name: str) -> str:
    """Returns the half in which a layer or a matrix is.

    >>> half("glm-5@ep8"), half("4096x7168")
    ('held-out', 'tuned')
    """
    return next(half for half in (TUNED, HELD_OUT) if name in LAYERS[half] or name in MATRICES[half])


def part(names: Sequence[T], text: str) -> list[tuple[T, int]]:
    """Returns a part of all pairs of a name and a number of tokens, such as `2/8` for the second of eight parts.

    >>> parts = [part("ab", f"{number}/3") for number in (1, 2, 3)]
    >>> [len(of) for of in parts], len({pair for of in parts for pair in of})
    ([14, 13, 13], 40)
    """
    number, count = (int(word) for word in text.split("/"))
    if not 1 <= number <= count:
        raise ValueError(f"part {text}: expected a number from 1 to {count} before the slash")
    pairs = [(name, tokens) for name in names for tokens in TOKENS]
    random.Random("field").shuffle(pairs)
    return sorted(pairs[number - 1 :: count], key=lambda pair: (names.index(pair[0]), pair[1]))
