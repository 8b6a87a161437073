"""Draws the book's pictures as SVG, in one look for light and dark pages. A picture follows the reader's system, and has its own ground."""

from xml.sax.saxutils import escape

STYLE = """
  .ground { fill: #ffffff } text { fill: #24292f; font: 13px system-ui, sans-serif } .small { font-size: 11.5px } .strong { font-weight: 600 }
  .mono { font-family: ui-monospace, monospace } .pale { fill: #57606a } .line { fill: none; stroke: #57606a; stroke-width: 1.5 }
  .arrow { fill: #57606a } .box { fill: #f6f8fa; stroke: #8c959f; stroke-width: 1 } .a { fill: #b6dbff; stroke: #3d8fd1 }
  .b { fill: #ffd8b5; stroke: #d9662b } .c { fill: #c9efdc; stroke: #2f9e77 } .ours { fill: #3d8fd1 } .theirs { fill: #a8b1bb }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #0d1117 } text { fill: #e6edf3 } .pale { fill: #9da7b3 } .line { stroke: #9da7b3 } .arrow { fill: #9da7b3 }
    .box { fill: #161b22; stroke: #6e7681 } .a { fill: #123b5e } .b { fill: #5c2f12 } .c { fill: #11442f } .theirs { fill: #6e7681 }
  }
"""


class Picture:
    """An SVG picture, built from the top left."""

    def __init__(self, title: str, width: int, height: int):
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">\n<title>{escape(title)}</title>\n'
            f'<style>{STYLE}</style>\n<rect class="ground" width="{width}" height="{height}" rx="6"/>\n'
        ]

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        """Writes a line whose baseline is at `y`."""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>\n')

    def box(self, x: float, y: float, width: float, height: float, kind: str = "box", words: str = "", style: str = "small") -> None:
        """Draws a rectangle with a line of text in its middle."""
        self.parts.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3"/>\n')
        if words:
            self.text(x + width / 2, y + height / 2 + 4, words, style, "middle")

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """Draws a straight arrow, to the right or downwards."""
        right = to_x - x > 1.9 * abs(to_y - y)
        end = (to_x - 7, to_y) if right else (to_x, to_y - 7)
        self.parts.append(f'<path class="line" d="M{x:g} {y:g}L{end[0]:g} {end[1]:g}"/>\n')
        head = f"M{to_x:g} {to_y:g}l-8 -4v8z" if right else f"M{to_x:g} {to_y:g}l-4 -8h8z"
        self.parts.append(f'<path class="arrow" d="{head}"/>\n')

    def line(self, path: str) -> None:
        """Draws a path."""
        self.parts.append(f'<path class="line" d="{path}"/>\n')

    def done(self) -> str:
        """Returns the file's text."""
        return "".join(self.parts) + "</svg>\n"


def bars(title: str, names: tuple[str, str], rows: list[tuple[str, float, float]], unit: str) -> str:
    """Draws two bars per row: each row's second value has the same length, and the first is relative to it."""
    width, left, step = 720, 130, 56
    picture = Picture(title, width, 70 + step * len(rows))
    picture.text(16, 26, title, "strong")
    picture.box(left, 38, 12, 12, "ours")
    picture.text(left + 18, 49, names[0], "small")
    picture.box(left + 90, 38, 12, 12, "theirs")
    picture.text(left + 108, 49, f"{names[1]} of vLLM's own kernels", "small")
    scale = (width - left - 190) / max(ours / theirs for _, ours, theirs in rows)
    for index, (name, ours, theirs) in enumerate(rows):
        top = 62 + index * step
        picture.text(left - 10, top + 26, name, "", "end")
        picture.box(left, top, ours / theirs * scale, 18, "ours")
        picture.text(left + ours / theirs * scale + 8, top + 14, f"{ours:,.0f} {unit}  ({ours / theirs:.2f}×)")
        picture.box(left, top + 21, scale, 18, "theirs")
        picture.text(left + scale + 8, top + 35, f"{theirs:,.0f} {unit}", "pale")
    return picture.done()


def block() -> str:
    """Draws a block of 16 values with its scale and the tensor's global scale."""
    picture = Picture("A block of NVFP4: 16 values of 4 bits, one scale of 8 bits, one global scale per tensor", 720, 236)
    picture.text(16, 26, "One row of a matrix, 16 columns at a time", "strong")
    codes = ["1.5", "−0.5", "6", "0", "2", "−3", "1", "0.5", "−6", "4", "0", "−1", "3", "−2", "0.5", "1"]
    for index, code in enumerate(codes):
        picture.box(16 + 34 * index, 66, 34, 30, "a", code, "small mono")
    picture.text(16, 58, "16 values, e2m1: sign, 2 bits of exponent, 1 bit of mantissa", "small pale")
    picture.line("M16 102v8h544v-8")
    picture.arrow(288, 110, 288, 136)
    picture.box(236, 136, 104, 30, "b", "scale, e4m3", "small")
    picture.text(352, 156, "one byte per 16 values, never negative", "small pale")
    picture.box(596, 66, 108, 30, "box", "next block …")
    picture.box(236, 184, 104, 30, "c", "global, f32", "small")
    picture.text(352, 204, "one number per tensor", "small pale")
    picture.text(16, 156, "number = value", "small")
    picture.text(16, 174, "× scale × global", "small")
    return picture.done()


def sizes() -> str:
    """Draws the bits per weight of formats."""
    formats = [("bf16", 16.0, "16 bits"), ("FP8, one scale per row", 8.0, "8 bits"), ("NVFP4", 4.5, "4 + 8/16 = 4.5 bits"), ("MXFP4", 4.25, "4 + 8/32 = 4.25 bits")]
    picture = Picture("Bits per weight", 720, 190)
    picture.text(16, 26, "Bits per weight, block scales included", "strong")
    for index, (name, bits, words) in enumerate(formats):
        y = 44 + index * 34
        picture.text(170, y + 16, name, "", "end")
        picture.box(180, y, bits * 24, 22, "ours" if name == "NVFP4" else "theirs")
        picture.text(188 + bits * 24, y + 16, words)
    return picture.done()


def layer() -> str:
    """Draws the steps of an MoE layer."""
    picture = Picture("The steps of a mixture-of-experts layer", 720, 318)
    picture.text(16, 26, "A mixture-of-experts layer, for one token with two experts", "strong")
    picture.box(16, 136, 92, 40, "box", "hidden state", "small")
    picture.text(62, 194, "[H], 16-bit", "small pale", "middle")
    picture.box(140, 60, 84, 40, "b", "router", "small")
    picture.line("M108 150L124 150L124 80L133 80")
    picture.parts.append('<path class="arrow" d="M140 80l-8 -4v8z"/>\n')
    picture.text(182, 52, "logits → experts, weights", "small pale", "middle")
    for index, expert in enumerate(("expert 3", "expert 7")):
        y = 112 + 92 * index
        picture.box(248, y, 330, 80, "box")
        picture.text(258, y + 15, expert, "small strong")
        picture.box(258, y + 22, 76, 22, "a", "gate", "small")
        picture.box(258, y + 49, 76, 22, "a", "up", "small")
        picture.box(372, y + 28, 92, 36, "c", "silu(gate) ∘ up", "small")
        picture.box(492, y + 28, 76, 36, "a", "down", "small")
        picture.arrow(334, y + 33, 372, y + 42)
        picture.arrow(334, y + 60, 372, y + 50)
        picture.arrow(464, y + 46, 492, y + 46)
        picture.arrow(108, 156 + 8 * index, 248, y + 46)
        picture.arrow(578, y + 46, 612, 190 + 16 * index)
    picture.line("M224 80L650 80L650 170")
    picture.text(520, 72, "the weight of each expert", "small pale", "middle")
    picture.parts.append('<path class="arrow" d="M650 178l-4 -8h8z"/>\n')
    picture.box(612, 178, 96, 40, "c", "weighted sum", "small")
    picture.text(660, 236, "[H], 16-bit", "small pale", "middle")
    picture.box(258, 290, 16, 16, "a")
    picture.text(280, 303, "NVFP4 weights: nearly all of the layer's bytes", "small pale")
    return picture.done()


def tokens() -> str:
    """Draws what a layer multiplies in each token format."""
    picture = Picture("Token formats: what is multiplied with what", 720, 210)
    picture.text(16, 26, "The weights are the same NVFP4 in each format; the tensor core's operands differ", "strong")
    heads = ((16, "token format"), (170, "tokens become"), (356, "weights become"), (560, "GPUs"))
    for x, words in heads:
        picture.text(x, 54, words, "small pale")
    rows = (
        ("16-bit (W4A16)", "16 bits, unchanged", "16 bits, exact", "8.0 and later, CPU", "c"),
        ("FP8 (W4A8)", "e4m3, a scale per token", "e4m3, rounded", "Hopper, CPU", "b"),
        ("NVFP4 (W4A4)", "e2m1, a scale per 16", "e2m1, unchanged", "Blackwell, CPU", "a"),
    )
    for index, (name, of_tokens, of_weights, cards, kind) in enumerate(rows):
        y = 64 + index * 46
        picture.text(16, y + 24, name)
        picture.box(170, y, 172, 36, kind, of_tokens, "small")
        picture.text(349, y + 23, "×", "", "middle")
        picture.box(356, y, 172, 36, kind, of_weights, "small")
        picture.text(560, y + 24, cards)
    return picture.done()


def check() -> str:
    """Draws how a result is checked."""
    picture = Picture("How a result is checked", 720, 178)
    picture.text(16, 26, "Every element of every result is compared with the exact reference", "strong")
    picture.box(16, 74, 110, 44, "box", "weights, tokens", "small")
    for index, name in enumerate(("CPU", "GPU", "emulated GPU")):
        picture.box(196, 44 + 38 * index, 130, 30, "a", name, "small")
        picture.arrow(126, 96, 196, 59 + 38 * index)
        picture.arrow(326, 59 + 38 * index, 520, 92)
    picture.box(384, 128, 110, 36, "c", "exact reference", "small")
    picture.line("M70 118L70 170L340 170L340 146L377 146")
    picture.parts.append('<path class="arrow" d="M384 146l-8 -4v8z"/>\n')
    picture.arrow(494, 146, 540, 122)
    picture.box(520, 78, 84, 44, "box", "compare", "small")
    picture.arrow(604, 100, 626, 100)
    picture.text(632, 96, "first wrong,", "small")
    picture.text(632, 111, "worst, count", "small")
    return picture.done()


# The drawings of the book's concepts, by the name of their file.
DRAWINGS = {"block": block, "sizes": sizes, "moe-layer": layer, "token-formats": tokens, "checks": check}
