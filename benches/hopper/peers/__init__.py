"""What the library's kernel is compared with, a file each.

A peer has two functions. `contend(inputs, copies) -> list[Run]` prepares the inputs as that peer likes them best and
gives a way to run the operation on each copy; it raises `Unavailable` where the peer's package is missing.
`weight_bytes(inputs)` says how large a copy of the weights is.
"""


class Unavailable(Exception):
    """Why a peer cannot be measured here."""
