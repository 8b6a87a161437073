"""The plugin's options and messages, and the version of SGLang."""

import logging

import torch
from nvfp4 import serving
from nvfp4.serving import Left, Refused

__all__ = ["CARDS", "CHOICES", "TESTED", "Left", "Refused", "engine", "tokens"]

TESTED = "0.5.23"
"""The version of SGLang with which the tests run."""

CHOICES = serving.Choices("SGLang", lambda: logging.getLogger("sglang.nvfp4"))


def _name():
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU"


def _capability():
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


CARDS = serving.Cards(CHOICES, _name, _capability)


def engine():
    """Returns the engine's name and version, and whether this package was tested with it."""
    try:
        import sglang

        return f"SGLang {sglang.__version__}", sglang.__version__ == TESTED
    except Exception:  # a broken installation
        return "this SGLang", False


def tokens(kind):
    """Returns the :class:`serving.Tokens` of a kind of layers, `experts` or `linear`.

    :raises Refused: if an option is unknown.
    """
    return serving.Tokens(kind, CHOICES.options())
