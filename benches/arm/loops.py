"""Counts the instructions of the CPU backend's inner loops for AArch64, from a disassembly.

Times under qemu do not predict a processor's speed, so the counts are used instead. The program prints one line per innermost loop of the
kernels that has dot products (`sdot`), matrix products (`smmla`) or multiply-adds (`fmla`):

    cargo rustc -p nvfp4 --lib --release --target aarch64-unknown-linux-gnu -- --emit=obj
    aarch64-linux-gnu-objdump -d --no-show-raw-insn target/aarch64-unknown-linux-gnu/release/deps/nvfp4-*.o | python3 benches/arm/loops.py
"""

import re
import sys
from collections import Counter

FUNCTION = re.compile(r"^[0-9a-f]+ <(.*)>:$")
INSTRUCTION = re.compile(r"^\s*([0-9a-f]+):\s+(\S+)(.*)$")
BRANCH = re.compile(r"^(b|b\.\w+|cbn?z|tbn?z)$")
TARGET = re.compile(r"([0-9a-f]+) <")
PRODUCTS = ("sdot", "smmla", "fmla")


def functions(lines):
    """Yields name and instructions (address, mnemonic, operands) of each kernel function."""
    name, body = None, []
    for line in lines:
        if match := FUNCTION.match(line):
            if name:
                yield name, body
            inside = "cpu" in match[1] and "compute" in match[1] and re.search("neon", match[1])
            name, body = (match[1], []) if inside else (None, [])
        elif name and (match := INSTRUCTION.match(line)):
            body.append((int(match[1], 16), match[2], match[3]))
    if name:
        yield name, body


def innermost_loops(body):
    """Returns the address ranges that end in a branch back to their start and contain no smaller range of this kind."""
    ranges = []
    for address, mnemonic, operands in body:
        target = TARGET.search(operands)
        if BRANCH.match(mnemonic) and target and int(target[1], 16) <= address:
            ranges.append((int(target[1], 16), address))
    return [(a, b) for a, b in ranges if not any((c, d) != (a, b) and a <= c and d <= b for c, d in ranges)]


def main():
    for name, body in functions(sys.stdin):
        kind = "16-bit tokens" if "Bits16" in name else "NVFP4 tokens"
        for start, end in sorted(set(innermost_loops(body))):
            count = Counter(mnemonic for address, mnemonic, _ in body if start <= address <= end)
            products = {mnemonic: count[mnemonic] for mnemonic in PRODUCTS if count[mnemonic]}
            if sum(products.values()) >= 4:
                rest = ", ".join(f"{number} {mnemonic}" for mnemonic, number in count.most_common(9))
                print(f"{kind}: {sum(count.values())} instructions per iteration: {rest}")


if __name__ == "__main__":
    main()
