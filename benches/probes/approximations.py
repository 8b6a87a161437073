"""Computes the tables of `crates/ptx_emulator/src/hw/mufu.rs` from the results that `approximations.cu` has written.

    python benches/probes/approximations.py FOLDER        needs numpy

A parabola's value is `first / 4 + slope * place + curvature * square(place) + addend / 2^17`, cut to an integer. `place` is from 0 to 1, and
`square` leaves small partial products out. A least-squares fit gives slope and curvature, because they are integers. Then each result bounds
the constant part from below and from above; the script fails if no constant fits all results of a parabola.
"""

import sys
from pathlib import Path

import numpy as np

FRACTION_BITS, SQUARE_BITS = 23, 15


def square(place: np.ndarray, bits: int) -> np.ndarray:
    """Returns the squares in units of 2^-15, without smaller partial products."""
    least = 2 * bits - SQUARE_BITS
    sums = np.zeros_like(place)
    for low in range(bits):
        for high in range(low, bits):
            weight = 2 * low if low == high else low + high + 1
            if weight >= least:
                sums += ((place >> low & 1) * (place >> high & 1)) << weight
    return sums >> least


def table(significands: np.ndarray, parabolas: int) -> tuple[list[list[int]], range]:
    """Returns the parabolas, and the addends in units of 2^-17 with which they give all significands."""
    bits = FRACTION_BITS - (parabolas.bit_length() - 1)
    place = np.arange(1 << bits)
    squares, x = square(place, bits) / 2.0**SQUARE_BITS, place / 2.0**bits
    rows, least, most = [], 0.0, 0.25
    for part in significands.reshape(parabolas, -1):
        _, slope, curvature = np.linalg.lstsq(np.stack([np.ones_like(x), x, squares], 1), part + 0.5, rcond=None)[0]
        # Slopes are even.
        slope, curvature = 2 * round(slope / 2), round(curvature)
        constant = part - slope * x - curvature * squares
        low, high = constant.max(), (constant + 1).min()
        if low >= high:
            sys.exit(f"no constant fits parabola {len(rows)}: at least {low} and below {high}")
        rows.append([int(high * 4), slope, curvature])
        least, most = max(least, low % 0.25), min(most, high % 0.25)
    return rows, range(int(np.ceil(least * 2**17)), int(np.ceil(most * 2**17)))


def main() -> None:
    folder = Path(sys.argv[1])
    for name, parabolas, exponent in [("ex2", 64, 128), ("rcp", 128, 126)]:
        bits = np.fromfile(folder / f"{name}.bin", np.uint32).astype(np.int64)
        rows, addends = table(bits - (exponent << FRACTION_BITS) + (1 << FRACTION_BITS), parabolas)
        print(f"{name}: addends from {addends[0]} to {addends[-1]}", *rows, sep="\n")


if __name__ == "__main__":
    main()
