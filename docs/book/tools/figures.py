"""Draws the book's pictures, and writes the tables of src/performance/figures.md and of src/guides/emulator-python.md, from records.

    figures.py [--check]

With --check, nothing is written, and a file that would change is an error. `benches/hopper/layer_plot.py` draws
images/layer.svg, and `cargo xtask picture` images/run.svg.
"""

import json
import math
import pathlib
import statistics
import sys

from drawings import DRAWINGS, bars
from pages import ROOT, SRC, with_sections

sys.path.insert(0, str(ROOT / "benches/hopper"))
import field  # noqa: E402
import field_report  # noqa: E402
import layer_report  # noqa: E402

sys.path.insert(0, str(ROOT / "benches/blackwell"))
import predicted_layers  # noqa: E402

sys.path.insert(0, str(ROOT / "python/nvfp4_vllm/benches"))
import record  # noqa: E402

sys.path.insert(0, str(ROOT / "python/ptx_emulator/foreign"))
import foreign_report  # noqa: E402

IMAGES, PAGE, EMULATOR_PAGE = SRC / "images", SRC / "performance/figures.md", SRC / "guides/emulator-python.md"
EMULATOR_README = ROOT / "crates/ptx_emulator/README.md"
LAB = ROOT / "benches/lab"


def read(name: str) -> dict:
    """Returns a recorded measurement."""
    return json.loads((LAB / name).read_text())


def where(conditions: dict, name: str) -> str:
    """Returns the line that says when and on which GPU a table was measured."""
    card = conditions["gpu"].split(",")[0].removeprefix("NVIDIA ")
    driver = conditions["gpu"].split(",")[1].strip()
    link = f"[benches/lab/{name}](../../../../benches/lab/{name})"
    return f"{card}, driver {driver}, PyTorch {conditions['torch']}, {conditions['date']}: {link}\n\n"


def table(head: list[str], rows: list[list[str]]) -> str:
    """Returns a Markdown table whose first column is text."""
    lines = [head, ["---"] + ["--:"] * (len(head) - 1), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


VLLM = "0.33.0"
CONTENDERS = {"nvfp4": "this library", "humming": "Humming", "marlin": "Marlin", "nvfp4-fp8": "this library, FP8 tokens"}


def served(version: str, model: str) -> dict[str, dict[str, float]]:
    """Returns the tokens per second in a version of vLLM: by contender, then by load."""
    runs = read("h200-vllm.json")[version]["generate"][model]
    return {name: record.speeds(runs[name]) for name in CONTENDERS if name in runs}


def serving() -> list[tuple[str, float, float]]:
    """Returns, for each load of vLLM, the tokens per second of this library and of the best of vLLM's own kernels."""
    runs = served(VLLM, "qwen3-30b-a3b")
    return [(load, ours, max(runs["humming"][load], runs["marlin"][load])) for load, ours in runs["nvfp4"].items()]


def vllm_table(version: str, model: str) -> str:
    """Returns the table of a model. The ratio is this library's to the best of vLLM's own kernels."""
    runs = served(version, model)
    rivals = [runs[name] for name in ("humming", "marlin") if name in runs]
    rows = [
        [load, *(f"{of[load]:,.0f}" if load in of else "–" for of in runs.values()), f"{ours / max(of[load] for of in rivals):.2f}"]
        for load, ours in runs["nvfp4"].items()
    ]
    link = "[benches/lab/h200-vllm.json](../../../../benches/lab/h200-vllm.json)"
    head = ["tokens per second", *(CONTENDERS[name] for name in runs), "ratio"]
    return f"H200, vLLM {version}: {link}\n\n" + table(head, rows)


def times_table() -> str:
    """Returns the times of each contender from its start on, and of prefills beside the times of their kernels."""
    runs = read("h200-vllm.json")[VLLM]["generate"]["qwen3-30b-a3b"]
    runs = {name: runs[name] for name in CONTENDERS if name in runs}
    kernels = [(f"{batch} × {prompt}", f"{batch}x{prompt}") for batch, prompt in ((1, 32), (16, 32), (128, 32))]
    rows = [
        ["ready, s", *(f"{run['ready_seconds']:.0f}" for run in runs.values())],
        ["first token of the first request, ms", *(f"{run['first_token_ms'][0]:.1f}" for run in runs.values())],
        ["first token of the second request, ms", *(f"{run['first_token_ms'][1]:.1f}" for run in runs.values())],
        ["a prefill of 512, ms", *(f"{run['prefill']['512']['ms']:.1f}" for run in runs.values())],
        ["a prefill of 2048, ms", *(f"{run['prefill']['2048']['ms']:.1f}" for run in runs.values())],
        ["kernels of a prefill of 2048, ms", *(f"{run['profile']['1x2048']['gpu_ms']:.1f}" for run in runs.values())],
    ] + [
        [f"kernels of {words} tokens and 16 steps, ms", *(f"{run['profile'][key]['gpu_ms']:.1f}" for run in runs.values())]
        for words, key in kernels
    ]
    return table(["Qwen3-30B-A3B's shape", *(CONTENDERS[name] for name in runs)], rows)


def saved_table() -> str:
    """Returns the time that each load saves beside vLLM's best kernels, and the part that the layers' own times explain."""
    runs = read("h200-vllm.json")[VLLM]["generate"]["qwen3-30b-a3b"]
    points = read("h200-layer.json")["points"].values()
    points = {point["tokens"]: point for point in points if point["model"] == "qwen3-30b" and point["routing"] == "uniform"}
    loads = [(f"a step of batch {n}", n, lambda run, n=n: run["generate"][str(n)]["step_ms"]) for n in (1, 128)]
    loads += [(f"a prefill of {n}", n, lambda run, n=n: run["prefill"][str(n)]["ms"]) for n in (512, 2048, 8192)]
    rows = []
    for words, tokens, time in loads:
        ours, best = time(runs["nvfp4"]), min(time(runs["humming"]), time(runs["marlin"]))
        point = points[tokens]
        layers = runs["nvfp4"]["layers"] * (min(layer_report.rivals(point).values()) - layer_report.own(point)) / 1e3
        rows.append([words, *(f"{ms:.1f}" for ms in (ours, best, best - ours, layers))])
    return table(["ms", "this library", "best of vLLM's own", "difference", "of 48 MoE layers"], rows)


def groups_table(name: str) -> str:
    recorded = read(name)
    contenders = ["gated_sm90", "gated_simt", "torch bf16", "triton", "marlin", "humming"]
    contenders = [one for one in contenders if one in recorded["shapes"]["moe-1"]["us"]]
    rows = []
    for shape, point in recorded["shapes"].items():
        us = {one: point["us"][one]["median"] for one in contenders if one in point["us"]}
        rate = f"{point['operations'] / us['gated_sm90'] / 1e6:,.0f}", f"{point['bytes'] / us['gated_sm90'] / 1e6:.2f}"
        rows.append([f"`{shape}`", *(f"{us[one]:,.0f}" if one in us else "–" for one in contenders), *rate])
    heads = [f"`{one}`" if one.startswith("gated") else one for one in contenders]
    return where(recorded["conditions"], name) + table(["shape, µs", *heads, "TFLOP/s", "TB/s"], rows)


def layer_table(name: str) -> str:
    recorded = read(name)
    rows = []
    for point in recorded["points"].values():
        ours, rivals = layer_report.own(point), layer_report.rivals(point)
        if point["routing"] == "uniform" and ours:
            best = min(rivals, key=rivals.get, default=None)
            rival = [f"{rivals[best]:,.0f} ({best})", f"{rivals[best] / ours:.2f}"] if best else ["–", "–"]
            rows.append([point["model"], str(point["tokens"]), f"{ours:,.1f}", *rival])
    return where(recorded["conditions"][0], name) + table(["layer", "tokens", "this library, µs", "best rival, µs", "ratio"], rows)


def means() -> str:
    """Returns the geometric means of the ratios of MoE layers."""
    points = read("h200-layer.json")["points"].values()
    rows = []
    for words, chosen in (("up to 512", lambda n: n <= 512), ("2048 and 8192", lambda n: n >= 2048)):
        ratios = [ratio for p in points if p["hit"] and chosen(p["tokens"]) and (ratio := layer_report.ratio(p))]
        rows.append([words, str(len(ratios)), f"{math.exp(statistics.fmean(map(math.log, ratios))):.2f}", f"{min(ratios):.2f}"])
    return table(["tokens", "points", "best rival / layer, geometric mean", "least"], rows)


def fp8_table() -> str:
    recorded = read("h200-layer-fp8.json")
    rows, ratios = [], []
    for point in recorded["points"].values():
        wide, narrow = layer_report.own(point), layer_report.own(point, "fp8")
        ratios.append(wide / narrow)
        rows.append([point["model"], point["routing"], str(point["tokens"]), f"{wide:,.0f}", f"{narrow:,.0f}", f"{ratios[-1]:.2f}"])
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    rows.append(["geometric mean", "", "", "", "", f"{mean:.2f}"])
    head = ["layer", "routing", "tokens", "16-bit tokens, µs", "FP8 tokens, µs", "ratio"]
    return where(recorded["conditions"][-1], "h200-layer-fp8.json") + table(head, rows)


def linear_table(name: str) -> str:
    recorded = read(name)
    contenders = [one for one in ("linear", "torch bf16", "marlin", "humming") if one in recorded["points"]["4096x7168 1"]["us"]]
    rows = [
        [f"{p['n']}×{p['k']}", str(p["tokens"]), *(f"{p['us'][one]['median']:,.1f}" if one in p["us"] else "–" for one in contenders)]
        for p in recorded["points"].values()
    ]
    titles = {"linear": "this library", "torch bf16": "cuBLAS, bf16", "marlin": "Marlin", "humming": "Humming"}
    return where(recorded["conditions"], name) + table(["N×K", "tokens", *(f"{titles[one]}, µs" for one in contenders)], rows)


FIELD = "h100-field.json"
KINDS = ((True, "MoE layers"), (False, "matrices"))


def field_points(is_layer: bool, half: str) -> list[dict]:
    """Returns the points of a half of the field that have a rival."""
    points = read(FIELD)["points"].values()
    of = [p for p in points if field_report.is_layer(p) == is_layer and field.half(field_report.subject(p)) == half]
    return [point for point in of if field_report.ratio(point)]


def field_table() -> str:
    """Returns the goals of the field, by kind and half."""
    rows = []
    for is_layer, words in KINDS:
        for half in field.LAYERS:
            points = field_points(is_layer, half)
            ratios = [field_report.ratio(point) for point in points]
            below = sum(ratio < field_report.least_ratio(point) for ratio, point in zip(ratios, points))
            mean = math.exp(statistics.fmean(map(math.log, ratios)))
            rows.append([f"{words}, {half}", str(len(points)), f"{mean:.2f}", f"{min(ratios):.2f}", str(below)])
    return where(read(FIELD)["conditions"][0], FIELD) + table(["half of the field", "points", "mean", "least", "below the goal"], rows)


def missed_table() -> str:
    """Returns the points of the field that miss the goal of their ratio."""
    rows = []
    for is_layer, _ in KINDS:
        for point in (point for half in field.LAYERS for point in field_points(is_layer, half)):
            ratio, times = field_report.ratio(point), field_report.rivals(point)
            if ratio < field_report.least_ratio(point):
                best = min(times, key=times.get)
                name = field_report.subject(point).replace("x", "×") if not is_layer else field_report.subject(point)
                ours, limit = field_report.own(point), field_report.limit_us(point)
                rows.append(
                    [name, str(point["tokens"]), f"{limit:,.1f}", f"{ours:,.1f}", f"{times[best]:,.1f} ({best})", f"{ratio:.2f}"]
                )
    return table(["layer or N×K", "tokens", "limit, µs", "this library, µs", "best rival, µs", "ratio"], rows)


def predicted_table() -> str:
    """Returns predicted times of MoE layers on a B200 beside their limits, goals and published times."""
    record, rows = read("predicted-layers.json"), []
    for name, layer in record["layers"].items():
        for tokens, point in layer["points"].items():
            limit, goal = predicted_layers.limit_us(layer, point), predicted_layers.goal_us(layer, point)
            published = predicted_layers.PUBLISHED.get(name, {}).get(tokens)
            row = [name, tokens, str(point["hit_experts"]), f"{limit:.1f}", f"{goal:.1f}", f"{point['us']:.1f}", f"{point['us'] / goal:.2f}"]
            rows.append([*row, f"{published:.1f}" if published else "–"])
    head = ["layer", "tokens", "experts", "limit, µs", "goal, µs", "predicted, µs", "predicted / goal", "published, µs"]
    origin = f"Commit {record['commit']}, {record['date']}: [benches/lab/predicted-layers.json](../../../../benches/lab/predicted-layers.json)"
    return f"{origin}\n\n" + table(head, rows)


def predicted_rtx_table() -> str:
    """Returns predicted times of a layer on an RTX PRO 6000 beside published ones."""
    rows = []
    for token_format, points in read("predicted-layers.json")["rtx-pro-6000"].items():
        for tokens, point in points.items():
            name, published = predicted_layers.RTX_PUBLISHED[token_format].get(tokens, ("–", None))
            rows.append([tokens, token_format, f"{point['us']:.1f}", f"{published:.1f} ({name})" if published else name])
    return table(["tokens", "token format", "predicted, µs", "published, µs"], rows)


SECTIONS = {
    "vllm": lambda: vllm_table(VLLM, "qwen3-30b-a3b"),
    "vllm-times": times_table,
    "vllm-saved": saved_table,
    "vllm-gpt-oss": lambda: vllm_table(VLLM, "gpt-oss-120b"),
    "vllm-0.24": lambda: vllm_table("0.24.0", "qwen3-30b-a3b"),
    "layer-means": means,
    "layer": lambda: layer_table("h200-layer.json"),
    "layer-h100": lambda: layer_table("h100-layer.json"),
    "field": field_table,
    "field-missed": missed_table,
    "b200-layers": predicted_table,
    "rtx-layers": predicted_rtx_table,
    "fp8": fp8_table,
    "groups": lambda: groups_table("measurements/h200.json"),
    "groups-h100": lambda: groups_table("measurements/h100.json"),
    "linear": lambda: linear_table("h200-linear.json"),
    "linear-h100": lambda: linear_table("h100-linear.json"),
}


def page() -> str:
    """Returns the page of figures with its tables renewed."""
    return with_sections(PAGE.read_text(), {name: make() for name, make in SECTIONS.items()})


def emulator_page() -> str:
    """Returns the guide to the emulator's Python package with its table renewed."""
    return with_sections(EMULATOR_PAGE.read_text(), {"foreign-tests": foreign_report.table(read("emulator-foreign-tests.json"))})


def card_bits_table() -> str:
    """Returns how many outputs of each kernel have a card's bits in the emulator."""
    record = read("card-bits.json")
    kernels = sorted({name.split(",")[0] for name in record["of_emulator"]})
    rows = []
    for kernel in kernels:
        names = [name for name in record["of_emulator"] if name.split(",")[0] == kernel]
        same = sum(record["of_emulator"][name] == record["of_card"][name] for name in names)
        rows.append([f"`{kernel}`", str(len(names)), str(same)])
    return f"{record['card'].removeprefix('NVIDIA ')}, {record['date']}:\n\n" + table(["kernel", "outputs", "same bits"], rows)


def emulator_readme() -> str:
    """Returns the emulator's README with its table of bits renewed."""
    return with_sections(EMULATOR_README.read_text(), {"card-bits": card_bits_table()})


def files() -> dict[pathlib.Path, str]:
    """Returns the text of each file that this program writes."""
    title = f"Tokens per second in vLLM {VLLM} on an H200, Qwen3-30B-A3B's shape"
    found = {IMAGES / "vllm.svg": bars(title, ("nvfp4", "the best"), serving(), "tokens/s")}
    found |= {IMAGES / f"{name}.svg": draw() for name, draw in DRAWINGS.items()}
    return found | {PAGE: page(), EMULATOR_PAGE: emulator_page(), EMULATOR_README: emulator_readme()}


def main() -> None:
    for path, text in files().items():
        if sys.argv[1:] != ["--check"]:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            sys.exit(f"{path.relative_to(ROOT)} is out of date; run `python3 docs/book/tools/figures.py`")


if __name__ == "__main__":
    main()
