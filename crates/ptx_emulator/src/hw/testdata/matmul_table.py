"""Generates matmul.csv, the expected results of hw/matmul.rs, from sums of fractions. Needs only Python.

Run: python matmul_table.py > matmul.csv

Every row is an M = 3, N = 2 product with one MMA's K. Bytes are in hex, A and B row by row along K. The accumulator
and the result are f32, little endian, row by row.
"""
import random
import struct
from fractions import Fraction

M, N = 3, 2
# exponent bits, mantissa bits, width in memory, has infinity, has NaN as the all-ones magnitude
FORMATS = {
    "f16": (5, 10, 16, True, False),
    "bf16": (8, 7, 16, True, False),
    "tf32": (8, 10, 32, True, False),
    "e4m3": (4, 3, 8, False, True),
    "e5m2": (5, 2, 8, True, False),
    "e2m3": (2, 3, 6, False, False),
    "e3m2": (3, 2, 6, False, False),
    "e2m1": (2, 1, 4, False, False),
}


def value(name, code):
    """The exact value of a code, or None if it is not finite."""
    eb, mb, _, ieee, nan = FORMATS[name]
    sign = -1 if code >> (eb + mb) else 1
    magnitude = code & (2 ** (eb + mb) - 1)
    exponent, mantissa = magnitude >> mb, magnitude & (2**mb - 1)
    if (ieee and exponent == 2**eb - 1) or (nan and magnitude == 2 ** (eb + mb) - 1):
        return None
    bias = 2 ** (eb - 1) - 1
    if exponent == 0:
        return sign * Fraction(mantissa, 2**mb) * Fraction(2) ** (1 - bias)
    return sign * (1 + Fraction(mantissa, 2**mb)) * Fraction(2) ** (exponent - bias)


def extreme_codes(name, count):
    """One huge value, then tiny values: f64 cannot hold their sum."""
    eb, mb, *_ = FORMATS[name]
    top = 180 if eb == 8 else 2**eb - 2
    code = lambda low, high: (
        random.getrandbits(1) << (eb + mb) | random.randrange(low, high) << mb | random.getrandbits(mb)
    )
    return [code(top - 2, top)] + [code(1, 80 if eb == 8 else 4) for _ in range(count - 1)]


def random_codes(name, count, moderate):
    eb, mb, *_ = FORMATS[name]
    bias = 2 ** (eb - 1) - 1
    codes = []
    while len(codes) < count:
        code = random.getrandbits(1 + eb + mb)
        if moderate and eb > 4 and abs((code >> mb) % 2**eb - bias) > 6:
            continue
        # Keep the sums of the widest formats within f32.
        if eb == 8 and (code >> mb) % 256 > 180:
            continue
        if value(name, code) is not None:
            codes.append(code)
    return codes


def pack(name, packing, codes):
    """Bytes of one row."""
    width = FORMATS[name][2]
    if name == "tf32":
        # The low 13 bits are ignored, so they hold random bits.
        return b"".join(struct.pack("<I", code << 13 | random.getrandbits(13)) for code in codes)
    if packing == "container" and width < 8:
        shift = 2 if width == 4 else 0
        return bytes(code << shift for code in codes)
    if packing == "padded" and width < 8:
        out = b""
        for at in range(0, len(codes), 16):
            bits = sum(code << (width * i) for i, code in enumerate(codes[at : at + 16]))
            out += bits.to_bytes(2 * width, "little") + random.randbytes(16 - 2 * width)
        return out
    bits = sum(code << (width * i) for i, code in enumerate(codes))
    return bits.to_bytes(len(codes) * width // 8, "little")


def f32_value(bits):
    return Fraction(struct.unpack("<f", struct.pack("<I", bits))[0])


def round_f32(x):
    """Rounds to nearest even, by bisection over the ordered bit patterns of f32 magnitudes."""
    a = abs(x)
    low, high = 0, 0x7F7FFFFF
    assert a < f32_value(high), "this table must not overflow"
    while high - low > 1:
        middle = (low + high) // 2
        if f32_value(middle) <= a:
            low = middle
        else:
            high = middle
    below, above = a - f32_value(low), f32_value(high) - a
    bits = low if below < above or (below == above and low % 2 == 0) else high
    return bits | (0x80000000 if x < 0 else 0)


def scale_value(kind, code):
    if kind == "ue8m0":
        return Fraction(2) ** (code - 127)
    return value("e4m3", code)


def row(kind, a_name, b_name, packing, k, blocks=0, scale=None, moderate=True, cancel=False):
    a = [random_codes(a_name, k, moderate) for _ in range(M)]
    b = [random_codes(b_name, k, moderate) for _ in range(N)]
    if cancel and not kind.startswith("fours"):
        a = [extreme_codes(a_name, k) for _ in range(M)]
        b = [extreme_codes(b_name, k) for _ in range(N)]
    low, high = (0, 0x7F) if scale == "ue4m3" else (107, 147) if moderate else (80, 160)
    sa = [[random.randrange(low, high) for _ in range(blocks)] for _ in range(M)]
    sb = [[random.randrange(low, high) for _ in range(blocks)] for _ in range(N)]
    if cancel and kind.startswith("fours"):
        # The first block is far larger than the others.
        sa, sb = ([[150] + [random.randrange(110, 114) for _ in s[1:]] for s in ss] for ss in (sa, sb))
    dominant = k // blocks if kind.startswith("fours") else 1
    c, d = [], []
    for i in range(M):
        for j in range(N):
            total = largest = Fraction(0)
            for at in range(k):
                term = value(a_name, a[i][at]) * value(b_name, b[j][at])
                if blocks:
                    block = at * blocks // k
                    term *= scale_value(scale, sa[i][block]) * scale_value(scale, sb[j][block])
                total += term
                largest += term if at < dominant else 0
            # An accumulator near the sum, near its negative, or far from both.
            near = float(total) * random.choice([1, -1, 0.001, 1e-7, 300]) * random.uniform(0.9, 1.1)
            if cancel:
                # Cancels the dominant terms exactly, and leaves the terms that a rounded sum loses.
                near = -float(largest)
                assert f32_value(struct.unpack("<I", struct.pack("<f", near))[0]) == -largest
            bits = struct.unpack("<I", struct.pack("<f", near))[0]
            c.append(bits)
            result = total + f32_value(bits)
            d.append(round_f32(result) if result else 0)
    words = lambda values: b"".join(struct.pack("<I", v) for v in values).hex()
    rows = lambda name, all_codes: b"".join(pack(name, packing, codes) for codes in all_codes).hex()
    flat = lambda all_codes: b"".join(bytes(codes) for codes in all_codes).hex()
    print(kind, a_name, b_name, packing, k, rows(a_name, a), rows(b_name, b), flat(sa), flat(sb), words(c), words(d), sep=",")


random.seed(2)
print("kind,a,b,packing,k,a_bytes,b_bytes,scale_a,scale_b,c,d")
for _ in range(6):
    for name, k in (("f16", 16), ("bf16", 16), ("tf32", 8), ("e5m2", 32)):
        row("plain", name, name, "dense", k, cancel=True)
    row("fours32_ue8m0", "e2m1", "e2m1", "dense", 64, 2, "ue8m0", cancel=True)
    row("fours16_ue8m0", "e2m1", "e2m1", "dense", 64, 4, "ue8m0", cancel=True)
for moderate in (True, False):
    for _ in range(6):
        for name, k in (("f16", 16), ("bf16", 16), ("tf32", 8)):
            row("plain", name, name, "dense", k, moderate=moderate)
        for packing in ("padded", "container"):
            small = ["e4m3", "e5m2", "e2m3", "e3m2", "e2m1"]
            for i, name in enumerate(small):
                other = random.choice(small)
                row("plain", name, other, packing, 32, moderate=moderate)
                row("scaled_ue8m0", name, other, packing, 32, 1, "ue8m0", moderate=moderate)
        row("fours32_ue8m0", "e2m1", "e2m1", "dense", 64, 2, "ue8m0", moderate=moderate)
        row("fours16_ue8m0", "e2m1", "e2m1", "dense", 64, 4, "ue8m0", moderate=moderate)
        row("fours16_ue4m3", "e2m1", "e2m1", "dense", 64, 4, "ue4m3", moderate=moderate)
