"""Files and number formats for the checks in this folder: safetensors without a library, E2M1 and E4M3 as tables."""

import json
import struct

import numpy as np

F32 = np.float32
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], F32)
E4M3 = np.array([m / 512 if e == 0 else (8 + m) / 8 * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:127], F32)
DTYPES = {
    "F32": F32,
    "F16": np.float16,
    "BF16": np.uint16,
    "U8": np.uint8,
    "I8": np.uint8,
    "F8_E4M3": np.uint8,
    "F8_E8M0": np.uint8,
    "I64": np.int64,
}


def write(path, tensors):
    """Writes tensors, each a type, a shape and bytes."""
    header, blobs, end = {}, [], 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + len(data)]}
        blobs.append(data)
        end += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def read(path):
    """Returns the tensors of a file, each a type, a shape and bytes."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    start = 8 + length
    return {
        name: (entry["dtype"], entry["shape"], data[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]])
        for name, entry in header.items()
    }


def save(path, tensors):
    """Writes tensors, each a type and an array; bf16 is an array of bits."""
    arrays = {name: (dtype, np.ascontiguousarray(array, DTYPES[dtype])) for name, (dtype, array) in tensors.items()}
    # ascontiguousarray gives a scalar a dimension.
    write(path, {name: (dtype, np.shape(tensors[name][1]), array.tobytes()) for name, (dtype, array) in arrays.items()})


def load(path):
    """Returns the tensors of a file as arrays; bf16 is an array of bits."""
    return {name: np.frombuffer(data, DTYPES[dtype]).reshape(shape) for name, (dtype, shape, data) in read(path).items()}


def bf16(numbers):
    """Rounds to bf16, to nearest, ties to even, and returns the bits."""
    bits = np.ascontiguousarray(numbers, F32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def stored(numbers, dtype):
    """Returns a tensor for `save`, and the numbers that it has."""
    if dtype == "BF16":
        bits = bf16(numbers)
        return (dtype, bits), (bits.astype(np.uint32) << 16).view(F32).astype(np.float64)
    numbers = np.asarray(numbers).astype(DTYPES[dtype])
    return (dtype, numbers), numbers.astype(np.float64)


def nvfp4(rng, n, k):
    """Returns random codes and scale codes of a matrix, and the values of the codes."""
    codes = rng.integers(0, 256, (n, k // 2), np.uint8)
    scales = rng.integers(0, 0x7F, (n, k // 16), np.uint8)
    return codes, scales, values_of(codes)


def values_of(codes):
    """Returns the values of packed codes."""
    return np.stack([E2M1[codes & 15], E2M1[codes >> 4]], -1).reshape(*codes.shape[:-1], -1)


def numbers(values, scales, factor):
    """Returns the numbers of an NVFP4 matrix."""
    return values * np.repeat(E4M3[scales] * F32(factor), 16, -1)
