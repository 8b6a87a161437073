#!/usr/bin/env python3
"""Tries the remedies that `nvfp4 inspect` and `nvfp4 doctor` give. Needs numpy from PyPI.

    check_remedies.py PATH/TO/nvfp4

Each case makes a model with one fault, checks that the command reports it, does what the remedy says, and checks that the command
no longer reports it.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
from tensors import F32, load, save

HIDDEN, INNER, EXPERTS = 32, 16, 2
BLOCK = "model.layers.0.mlp"
NAMES = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
MODULES = [f"{BLOCK}.experts.{expert}.{name}" for expert in range(EXPERTS) for name in NAMES]
CONFIG = {"model_type": "qwen3_moe", "num_experts_per_tok": 1, "norm_topk_prob": True, "hidden_act": "silu", "num_experts": EXPERTS,
          "num_hidden_layers": 1, "hidden_size": HIDDEN, "vocab_size": 64}  # fmt: skip
DESCRIBED = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "group_size": 16}


class Case:
    """A folder with a source model and its NVFP4 form, and commands on them."""

    def __init__(self, command, folder):
        self.command, self.folder = command, folder
        rng = np.random.default_rng(0)
        tensors = {f"{BLOCK}.gate.weight": ("F32", rng.standard_normal((EXPERTS, HIDDEN)).astype(F32))}
        for module in MODULES:
            tensors[f"{module}.weight"] = ("F32", rng.standard_normal(NAMES[module.rsplit(".", 1)[1]]).astype(F32))
        self.write("source", tensors, CONFIG)
        self.run("quantize", "source", "model")

    def write(self, name, tensors, config=None):
        (self.folder / name).mkdir(exist_ok=True)
        save(self.folder / name / "model.safetensors", tensors)
        if config is not None:
            (self.folder / name / "config.json").write_text(json.dumps(config))
        (self.folder / name / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 63}}}))

    def run(self, *line):
        done = subprocess.run([self.command, *line], cwd=self.folder, capture_output=True, text=True)
        assert done.returncode == 0, (line, done.stderr)
        return done.stdout

    def tensors(self, name="model"):
        """Returns the tensors of a model with their types."""
        arrays = load(self.folder / name / "model.safetensors")
        types = {"float32": "F32", "uint16": "BF16", "float16": "F16"}
        kind = lambda key, array: types.get(array.dtype.name) or ("F8_E4M3" if key.endswith("weight_scale") else "U8")
        return {key: (kind(key, array), array) for key, array in arrays.items()}

    def change(self, change, name="model"):
        """Changes the tensors of a model."""
        tensors = self.tensors(name)
        change(tensors)
        save(self.folder / name / "model.safetensors", tensors)

    def configure(self, name="model", **quantization):
        """Changes the description of the quantization; without arguments, removes it."""
        config = json.loads((self.folder / name / "config.json").read_text())
        described = config.pop("quantization_config", {})
        if quantization:
            config["quantization_config"] = described | quantization
        else:
            (self.folder / name / "hf_quant_config.json").unlink(missing_ok=True)
        (self.folder / name / "config.json").write_text(json.dumps(config))

    def codes(self, name="model"):
        """Returns the codes of what `inspect` and `doctor` report."""
        run = lambda *line: subprocess.run([self.command, *line, "--json"], cwd=self.folder, capture_output=True)
        report = lambda *line: json.loads(run(*line).stdout)
        problems = {problem["code"] for problem in report("inspect", name)["problems"]}
        return problems | {finding["code"] for finding in report("doctor", name)["findings"]}


def scales(value):
    return lambda tensors: tensors.update({f"{module}.input_scale": ("F32", F32(value)) for module in MODULES})


def drop(*endings):
    def change(tensors):
        for name in [name for name in tensors if name.endswith(endings)]:
            del tensors[name]

    return change


def without_description(case):
    case.configure()
    yield "config-without-quantisation"
    case.run("convert", "model", "mended", "--to", "modelopt")
    yield "mended"


def excluded(case):
    case.configure(ignore=["*experts*"])
    yield "config-exclusion"
    case.run("convert", "model", "mended", "--to", "modelopt")
    yield "mended"


def no_input_scales(case):
    case.configure(quant_algo="NVFP4")
    yield "config-input-scales"
    case.configure(quant_algo="W4A16_NVFP4")
    yield "model"


def no_input_scales_calibrated(case):
    case.configure(quant_algo="NVFP4")
    yield "config-input-scales"
    (case.folder / "amax.json").write_text(json.dumps(dict.fromkeys(MODULES, 3.0)))
    case.run("quantize", "source", "mended", "--calibrate", "amax.json")
    yield "mended"


def some_input_scales(case):
    case.change(scales(0.01))
    case.change(drop("1.up_proj.input_scale"))
    yield "input-scales-partly-missing"
    case.change(drop("input_scale"))
    yield "model"


def strange_input_scale(case):
    case.change(scales(0.0))
    yield "input-scale"
    case.change(drop("input_scale"))
    yield "model"


def unequal_scales(case):
    case.run("quantize", "source", "unequal", "--separate-scales")
    (case.folder / "model").rename(case.folder / "before")
    (case.folder / "unequal").rename(case.folder / "model")
    yield "unequal-global-scales"
    case.run("quantize", "source", "mended")
    yield "mended"


def awq(case):
    column = ("F32", np.full(HIDDEN, 0.5, F32))
    factors = {f"{BLOCK}.experts.0.{name}.pre_quant_scale": column for name in ("gate_proj", "up_proj")}
    case.change(lambda tensors: tensors.update(factors))
    yield "not-computed"
    case.run("dequantize", "model", "large")
    case.run("quantize", "large", "mended")
    yield "mended"


def inverted(case):
    def invert(tensors):
        for name in [name for name in tensors if name.endswith("scale_2")]:
            tensors[name] = ("F32", 1 / tensors[name][1])

    case.change(invert)
    yield "global-scale-size"
    case.run("quantize", "source", "mended")
    yield "mended"


def no_tokenizer(case):
    (case.folder / "model/tokenizer.json").unlink()
    yield "tokenizer"
    (case.folder / "model/tokenizer.json").write_bytes((case.folder / "source/tokenizer.json").read_bytes())
    yield "model"


def tokenizer_of_another_model(case):
    (case.folder / "model/tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 64}}}))
    yield "tokenizer-size"
    (case.folder / "model/tokenizer.json").write_bytes((case.folder / "source/tokenizer.json").read_bytes())
    yield "model"


def no_config(case):
    (case.folder / "model/config.json").unlink()
    yield "config"
    (case.folder / "model/config.json").write_bytes((case.folder / "source/config.json").read_bytes())
    case.run("convert", "model", "mended", "--to", "modelopt")
    yield "mended"


CASES = [without_description, excluded, no_input_scales, no_input_scales_calibrated, some_input_scales, strange_input_scale,
         unequal_scales, awq, inverted, no_tokenizer, tokenizer_of_another_model, no_config]  # fmt: skip


def main():
    command = str(pathlib.Path(sys.argv[1]).resolve())
    for make in CASES:
        with tempfile.TemporaryDirectory() as folder:
            case = Case(command, pathlib.Path(folder))
            sound = case.codes()
            steps = make(case)
            code = next(steps)
            assert code not in sound and code in case.codes(), (make.__name__, code, sound, case.codes())
            mended = next(steps)
            # A remedy must not cause another fault.
            assert case.codes(mended) <= sound, (make.__name__, sound, case.codes(mended))
    print(f"{len(CASES)} remedies work")


if __name__ == "__main__":
    main()
