"""What plugins for inference engines share: options, messages, checks of the GPU, packing and computing of layers.

An engine's plugin has only the places where it meets the engine. This package imports no engine.
"""

from .cards import Cards
from .choices import FORMATS, Choices, Left, Refused, Tokens
from .configs import Serving
from .layers import Experts, PackedExperts, linear, pack_experts, pack_linear, split_rows

__all__ = [
    "FORMATS",
    "Cards",
    "Choices",
    "Experts",
    "Left",
    "PackedExperts",
    "Refused",
    "Serving",
    "Tokens",
    "linear",
    "pack_experts",
    "pack_linear",
    "split_rows",
]
