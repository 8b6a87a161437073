"""Peers of the library's kernel, one file each.

A peer has two functions. `contend(inputs, copies) -> list[Run]` prepares the inputs in the peer's best layout and
returns a run of the operation for each copy. It raises `Unavailable` if the peer's package is missing.
`weight_bytes(inputs)` returns the size of a copy of the weights.
"""


class Unavailable(Exception):
    """A peer cannot be measured here; the message says why."""
