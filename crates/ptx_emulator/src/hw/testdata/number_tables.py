"""Generates rounding.csv, the expected results of hw/number.rs. Needs numpy and ml_dtypes.

Run: python number_tables.py > rounding.csv

The values of each format are enumerated as exact fractions from the definition of its codes, and checked against
ml_dtypes or numpy. An input is rounded by a search for its two neighbors. The Rust code shares no arithmetic with this.
"""
import bisect
import math
import random
import struct
from fractions import Fraction

import ml_dtypes
import numpy as np

# name: (exponent bits, mantissa bits, has infinity and NaN as IEEE, has NaN as the all-ones magnitude, numpy type)
FORMATS = {
    "f16": (5, 10, True, False, np.float16),
    "bf16": (8, 7, True, False, ml_dtypes.bfloat16),
    "tf32": (8, 10, True, False, None),
    "e4m3": (4, 3, False, True, ml_dtypes.float8_e4m3fn),
    "e5m2": (5, 2, True, False, ml_dtypes.float8_e5m2),
    "e2m1": (2, 1, False, False, ml_dtypes.float4_e2m1fn),
    "e2m3": (2, 3, False, False, ml_dtypes.float6_e2m3fn),
    "e3m2": (3, 2, False, False, ml_dtypes.float6_e3m2fn),
}
MODES = ["rn", "rna", "rz", "rm", "rp"]


def magnitudes(eb, mb, ieee, nan_only):
    """Returns all finite magnitudes, indexed by code."""
    bias = 2 ** (eb - 1) - 1
    values = []
    for code in range(2 ** (eb + mb)):
        exponent, mantissa = code >> mb, code & (2**mb - 1)
        if ieee and exponent == 2**eb - 1:
            break
        if nan_only and code == 2 ** (eb + mb) - 1:
            break
        if exponent == 0:
            values.append(Fraction(mantissa, 2**mb) * Fraction(2) ** (1 - bias))
        else:
            values.append((1 + Fraction(mantissa, 2**mb)) * Fraction(2) ** (exponent - bias))
    return values


def check(values, eb, mb, dtype):
    if dtype is None:
        return
    width = 1 + eb + mb
    codes = np.arange(len(values), dtype=np.uint16 if width == 16 else np.uint8)
    theirs = codes.view(dtype).astype(np.float64)
    assert [Fraction(float(v)) for v in theirs] == values


def round_code(values, x, mode, infinity, satfinite):
    """Returns the magnitude code and the sign of x (a Fraction, or ±inf)."""
    negative = x < 0
    largest = len(values) - 1
    over = largest if infinity is None or satfinite else infinity
    if x in (math.inf, -math.inf):
        return over, negative
    a = abs(x)
    low = bisect.bisect_right(values, a) - 1
    if values[low] == a:
        return low, negative
    away = {"rz": False, "rm": negative, "rp": not negative}
    # For the largest value: the next value if the exponent were unbounded.
    high_value = values[low + 1] if low < largest else 2 * values[largest] - values[largest - 1]
    if mode in away:
        up = away[mode]
    else:
        middle = (values[low] + high_value) / 2
        up = a > middle or (a == middle and (mode == "rna" or low % 2 == 1))
    if not up:
        if low == largest and a >= high_value and mode in ("rn", "rna"):
            return over, negative
        return low, negative
    return (low + 1 if low < largest else over), negative


def main():
    random.seed(1)
    print("format,mode,input_f64,bits,bits_satfinite")
    for name, (eb, mb, ieee, nan_only, dtype) in FORMATS.items():
        values = magnitudes(eb, mb, ieee, nan_only)
        check(values, eb, mb, dtype)
        infinity = (2**eb - 1) << mb if ieee else None
        largest = len(values) - 1
        picks = sorted(
            set(range(min(8, largest)))
            | {largest, largest - 1, 2**mb - 1, 2**mb, 2**mb + 1}
            | {random.randrange(largest) for _ in range(12)}
        )
        inputs = [math.inf]
        for code in picks:
            if code > largest:
                continue
            low = values[code]
            high = values[code + 1] if code < largest else 2 * low - values[code - 1]
            middle = (low + high) / 2
            nudge = (high - low) / 2**20
            inputs += [low, middle - nudge, middle, middle + nudge, low + nudge, high - nudge]
        inputs += [2 * values[largest], 1000 * values[largest], values[1] / 2**40]
        for x in inputs:
            for sign in (1, -1):
                signed = float(x) * sign
                if x != math.inf:
                    assert Fraction(signed) == x * sign, "every input must be exact in f64"
                exact = signed if x == math.inf else x * sign
                hexa = struct.pack(">d", signed).hex()
                for mode in MODES:
                    row = []
                    for sat in (False, True):
                        code, negative = round_code(values, exact, mode, infinity, sat)
                        negative = math.copysign(1, signed) < 0
                        row.append(format(code | (negative << (eb + mb)), "x"))
                    print(name, mode, hexa, *row, sep=",")


main()
