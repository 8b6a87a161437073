"""Peers of the library's kernels, one file each. A module is a `Peer`; the classes of `layer_*.py` are
`LayerPeer`s."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from inputs import Inputs
    from layer_inputs import Step
    from measure import Run


class Unavailable(Exception):
    """A peer cannot be measured here; the message says why."""


class Peer(Protocol):
    """A module that computes grouped products. Its constant `LARGEST_ERROR`, if it has one, replaces the usual limit of errors."""

    def contend(self, inputs: Inputs, copies: int) -> list[Run]:
        """Prepares the inputs in the peer's best layout and returns a run for each copy of the weights.

        :raises Unavailable: if the peer's package is missing.
        """

    def weight_bytes(self, inputs: Inputs) -> int:
        """Returns the bytes of one copy of the weights."""


class LayerPeer(Protocol):
    """An MoE layer with prepared weights."""

    def candidates(self, step: Step, copies: int) -> dict[str, list[Run]]:
        """Returns the ways to run the layer by name, each with a run for every copy of the weights."""
