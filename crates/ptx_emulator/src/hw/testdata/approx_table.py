"""Generates approx.csv, the reference for the f32 functions of hw/approx.rs. Needs mpmath.

Run: python approx_table.py > approx.csv

Each row: function, f32 input bits, the exact result (60 digits) rounded to f64, as bits.
"""
import random
import struct

import mpmath

mpmath.mp.dps = 60
FUNCTIONS = {
    "ex2": (lambda x: mpmath.mpf(2) ** x, -120, 127),
    "lg2": (lambda x: mpmath.log(x, 2), 1e-30, 1e30),
    "rcp": (lambda x: 1 / x, -1e30, 1e30),
    "rsqrt": (lambda x: 1 / mpmath.sqrt(x), 1e-30, 1e30),
    "sqrt": (mpmath.sqrt, 1e-30, 1e30),
    "sin": (mpmath.sin, -6.28, 6.28),
    "cos": (mpmath.cos, -6.28, 6.28),
    "tanh": (mpmath.tanh, -9, 9),
}


def f32(x):
    return struct.unpack(">f", struct.pack(">f", x))[0]


random.seed(1)
print("function,input_f32,exact_f64")
for name, (function, low, high) in FUNCTIONS.items():
    inputs = [random.uniform(low, high) for _ in range(12)]
    inputs += [random.uniform(max(low, -3), min(high, 3)) for _ in range(8)]
    inputs += [2.0 ** random.uniform(-20, 3) for _ in range(8)]
    for x in map(f32, inputs):
        y = float(function(mpmath.mpf(x)))
        print(name, struct.pack(">f", x).hex(), struct.pack(">d", y).hex(), sep=",")
