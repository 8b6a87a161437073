"""Finds the modules of a Transformers model that a checkpoint has in NVFP4, and replaces them.

Transformers loads all other tensors as always. A module in NVFP4 is first replaced by a :class:`_Waiting`, which has a buffer of about the
size of the weights, so that Transformers plans memory and chooses a device for it. When the other tensors are loaded, its place is taken by
``nvfp4``'s layer, or by the original module with dequantized weights.
"""

import collections
import re
from typing import NamedTuple

import torch
from safetensors import safe_open
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.utils import logging

from ._linear import Linear
from ._moe import Moe
from ._native import Error
from ._operators import BLOCK, Quantized, dequantize

logger = logging.get_logger("transformers.nvfp4")


class Form(NamedTuple):
    """The names of a matrix's tensors behind the module's name."""

    values: str
    scales: str
    global_scale: str
    inverse: bool
    """Whether the global scale is stored as its inverse."""


FORMS = (
    Form(".weight", ".weight_scale", ".weight_scale_2", False),  # ModelOpt
    Form(".weight_packed", ".weight_scale", ".weight_global_scale", True),  # compressed-tensors
)
ROLES = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "fc1": "up", "down_proj": "down", "w2": "down", "fc2": "down"}
"""Names of an expert's projections in checkpoints."""


class _Checkpoint:
    """The tensors of a checkpoint's files, read one by one."""

    def __init__(self, files):
        if not files or not all(str(file).endswith(".safetensors") for file in files):
            raise ValueError(f"{files}: NVFP4 checkpoints are read from safetensors files; pass a folder with these files")
        self._files = [(file, safe_open(file, "pt")) for file in files]
        self._place = {name: index for index, (_, file) in enumerate(self._files) for name in file.keys()}
        self.modules = {}
        for name in self._place:
            for form in FORMS:
                if name.endswith(form.global_scale):
                    self.modules[name.removesuffix(form.global_scale)] = form
        self._check()

    def __contains__(self, name):
        return name in self._place

    def _check(self):
        """Refuses tensors in quantized formats that this module does not read."""
        for name in sorted(self._place):
            module, _, part = name.rpartition(".")
            is_other = part.endswith(("_scale_inv", "_scale_2", "_global_scale")) and not part.startswith("input")
            is_other |= part.endswith("weight_scale")
            if is_other and module not in self.modules:
                file = self._files[self._place[name]][0]
                raise ValueError(f"{file}: {name}: a quantized tensor that is not NVFP4 with one matrix per module; dequantize it first")
        if not self.modules:
            raise ValueError(f"{self._files[0][0]}: no tensor is in NVFP4; `nvfp4 quantize MODEL OUTPUT` quantizes a model")

    def tensor(self, name):
        """Returns a tensor, on the CPU."""
        if name not in self._place:
            raise ValueError(f"{self._files[0][0]}: {name} is missing; `nvfp4 inspect` lists what the checkpoint lacks")
        return self._files[self._place[name]][1].get_tensor(name)

    def matrix(self, module, device):
        """Returns a module's matrix on a device."""
        form = self.modules[module]
        values, scales = (self.tensor(module + part).to(device) for part in (form.values, form.scales))
        global_scale = self.tensor(module + form.global_scale).float().reshape(-1)
        if values.dtype != torch.uint8 or values.dim() != 2 or global_scale.numel() != 1:
            raise ValueError(
                f"{module}: expected uint8 values [N, K/2] and one global scale, got {values.dtype} {list(values.shape)} and"
                f" {global_scale.numel()} scales"
            )
        scale = 1.0 / global_scale if form.inverse else global_scale
        return Quantized(values, scales.view(torch.float8_e4m3fn), scale[0].to(device))

    def bytes_of(self, module):
        """Returns the number of bytes of a module's values and scales, from the header."""
        form = self.modules[module]
        rows, packed = self._files[self._place[module + form.values]][1].get_slice(module + form.values).get_shape()
        return rows * packed + rows * packed * 2 // BLOCK

    def input_scale(self, modules):
        """Returns the largest global scale of the modules' tokens; `None` if one of them has none."""
        scales = []
        for module in modules:
            name = module + (".input_global_scale" if self.modules[module].inverse else ".input_scale")
            if name not in self:
                return None
            scale = self.tensor(name).float().max().item()
            scales.append(1.0 / scale if self.modules[module].inverse else scale)
        return max(scales)


class _Waiting(torch.nn.Module):
    """Takes the place of a module until its weights are read."""

    def __init__(self, original, modules, size):
        super().__init__()
        # A tuple, because a module would become part of the model.
        self.original, self.modules_of_checkpoint = (original,), modules
        self.register_buffer("weights", torch.empty(size, dtype=torch.uint8, device="meta"), persistent=False)
        if isinstance(getattr(original, "bias", None), torch.nn.Parameter):
            self.bias = original.bias


class Nvfp4Linear(Linear):
    """A linear layer in a Transformers model."""

    @property
    def weight(self) -> torch.Tensor:
        """An empty tensor. Models and libraries of adapters ask a layer's ``weight`` for the type of its tokens and for its device."""
        return self.weights.new_empty(0, dtype=self.dtype)


class Nvfp4Experts(torch.nn.Module):
    """A layer of experts, with the interface of Transformers' layers of experts."""

    def __init__(self, moe: Moe) -> None:
        super().__init__()
        self.moe, self.num_experts = moe, moe.experts

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Returns the weighted sum of each token's experts for ``hidden_states`` ``[T, H]``, ids and weights ``[T, k]``."""
        out = self.moe(hidden_states.to(self.moe.dtype), top_k_index.to(torch.int32), top_k_weights.to(torch.float32))
        return out.to(hidden_states.dtype)


class Loader:
    """Places a checkpoint's NVFP4 matrices in a model."""

    def __init__(self, model, files, dtype):
        self.checkpoint, self.dtype = _Checkpoint(files), dtype
        self.places = self._find(model)
        self.dtypes = {name: tensor.dtype for name, tensor in model.state_dict(keep_vars=True).items()}

    def _find(self, model):
        """Returns the modules of the checkpoint for each module of the model, in the order of the fused matrix's rows."""
        transforms = get_model_conversion_mapping(model)
        renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
        converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
        tensors = model.state_dict(keep_vars=True)
        known, found = dict(model.named_modules()), collections.defaultdict(list)
        for module in self.checkpoint.modules:
            renamed, pattern = rename_source_key(f"{module}.weight", renamings, converters, model.base_model_prefix, tensors)
            place = renamed.rpartition(".")[0]
            if place not in known or not _is_target(known[place]):
                # The model's own rules do not name these experts: gpt-oss's original has one tensor for all experts.
                renamed, _ = rename_source_key(f"{module}.weight", renamings, [], model.base_model_prefix, tensors)
                matched = re.match(r"(.*\bexperts)\.", renamed)
                place = matched[1] if matched else ""
            if place not in known or not _is_target(known[place]):
                raise ValueError(f"{module}: {type(model).__name__} has no module for this NVFP4 matrix (looked for {renamed})")
            order = next((converter.source_patterns.index(pattern) for converter in converters if pattern in converter.source_patterns), 0)
            found[place].append((order, module))
        return {place: [module for _, module in sorted(modules, key=lambda item: item[0])] for place, modules in found.items()}

    def make_room(self, model):
        """Replaces the modules by :class:`_Waiting`."""
        for place, modules in self.places.items():
            size = sum(self.checkpoint.bytes_of(module) for module in modules)
            _put(model, place, _Waiting(model.get_submodule(place), modules, size))
        # These tensors are read here, and not by Transformers. Scales of a quantized cache of keys and values are not used.
        ours = {re.escape(place) + r"\.(?!bias$)" for place in self.places} | {r"\.[kv]_scale$"}
        model._keys_to_ignore_on_load_unexpected = set(model._keys_to_ignore_on_load_unexpected or ()) | ours

    def fill(self, model, config):
        """Replaces each :class:`_Waiting` by a layer with weights."""
        for name, parameter in model.named_parameters():
            # Some versions of Transformers keep the checkpoint's type for tensors that they rename.
            if parameter.dtype in (torch.bfloat16, torch.float16) and self.dtypes.get(name, parameter.dtype) != parameter.dtype:
                parameter.data = parameter.data.to(self.dtypes[name])
        left = collections.defaultdict(list)
        for place in self.places:
            waiting = model.get_submodule(place)
            original, modules, device = waiting.original[0], waiting.modules_of_checkpoint, waiting.weights.device
            if device.type not in ("cpu", "cuda"):
                raise ValueError(f"{place}: its device is {device}; nvfp4's layers stay on a GPU or on the CPU: pass another device_map")
            waiting.weights = None  # the placeholder and the layer need not exist together
            bias = getattr(waiting, "bias", None)
            try:
                if config.dequantize:
                    raise _Left("")
                layer = self._layer(original, place, modules, bias, device, config)
            except (_Left, Error) as reason:
                if not config.dequantize:
                    left[str(reason)].append(place)
                layer = self._dequantized(original, place, modules, bias, device)
            layer.train(model.training)
            _put(model, place, layer)
        for reason, places in left.items():
            logger.warning(f"nvfp4: {places[0]} ({len(places)} such modules) has dequantized weights: {reason}")

    def _layer(self, original, place, modules, bias, device, config):
        """Returns `nvfp4`'s layer.

        :raises _Left: if it has none for this module.
        """
        try:
            if _is_experts(original):
                return self._experts(original, place, modules, device, config)
            if type(original) is not torch.nn.Linear:
                raise _Left(f"{type(original).__name__} is not a linear layer")
            matrices = [self.checkpoint.matrix(module, device) for module in modules]
            _check_shape(place, matrices, original.weight.shape)
            fused = Quantized(*(torch.cat([matrix[part].reshape(-1, *matrix[part].shape[1:]) for matrix in matrices]) for part in range(3)))
            scale = self.checkpoint.input_scale(modules) if config.linear == "nvfp4" else None
            rows = [len(matrix.values) for matrix in matrices]
            options = {"token_format": config.linear, "input_scale": scale, "differentiable": config.differentiable}
            return Nvfp4Linear(fused, bias, dtype=self.dtype, rows=rows, **options)
        except ValueError as error:
            raise _Left(str(error)) from error

    def _experts(self, original, place, modules, device, config):
        word, _ = activation_of(original)
        if word is None:
            raise _Left(f"the activation of {type(original).__name__} is not one of nvfp4's")
        projections = self._projections(place, modules)
        if ("gate" in projections) != (word not in WITHOUT_GATE):
            raise _Left(f"{type(original).__name__} and the checkpoint disagree about a gate")
        stacked = {role: self._stacked(names, device) for role, names in projections.items()}
        gate, up, down = (stacked.get(role) for role in ("gate", "up", "down"))
        biases = None
        if getattr(original, "has_bias", False):
            biases = tuple(self._biases(projections.get(role), device) for role in ("gate", "up", "down"))
        scales = self._input_scales(projections) if config.experts == "nvfp4" else None
        options = {"token_format": config.experts, "input_scales": scales, "differentiable": config.differentiable}
        return Nvfp4Experts(Moe(gate, up, down, dtype=self.dtype, activation=word, biases=biases, **options))

    def _projections(self, place, modules):
        """Returns the modules of each role (gate, up, down), ordered by expert."""
        found = collections.defaultdict(dict)
        for module in modules:
            parts = module.split(".")
            number = next((int(part) for part in reversed(parts) if part.isdigit()), None)
            role = next((ROLES[part] for part in reversed(parts) if part in ROLES), None)
            if number is None or role is None:
                raise ValueError(f"{module}: the name has no expert's number and projection ({', '.join(ROLES)})")
            found[role][number] = module
        experts = max(map(len, found.values()))
        for role in ("up", "down"):
            if role not in found:
                raise ValueError(f"{place}: the checkpoint has no NVFP4 matrices for {role}")
        for role, numbered in found.items():
            if missing := sorted(set(range(experts)) - set(numbered)):
                raise ValueError(f"{place}: {role} of expert {missing[0]} is not in NVFP4, and other experts are; quantize all or none")
        return {role: [numbered[expert] for expert in range(experts)] for role, numbered in found.items()}

    def _stacked(self, modules, device):
        matrices = [self.checkpoint.matrix(module, "cpu") for module in modules]
        return Quantized(*(torch.stack(parts).to(device) for parts in zip(*matrices)))

    def _biases(self, modules, device):
        return None if modules is None else torch.stack([self.checkpoint.tensor(f"{module}.bias") for module in modules]).to(self.dtype).to(device)

    def _input_scales(self, projections):
        """Returns the input scales of gate and up, and of down, one per expert; `None` if the checkpoint lacks one."""
        firsts = zip(*(projections[role] for role in ("gate", "up") if role in projections))
        scales = [self.checkpoint.input_scale(pair) for pair in firsts], [self.checkpoint.input_scale([down]) for down in projections["down"]]
        return None if None in scales[0] + scales[1] else tuple(torch.tensor(found, dtype=torch.float32) for found in scales)

    # Modules with plain weights.

    def _dequantized(self, original, place, modules, bias, device):
        if not _is_experts(original):
            matrices = [self.checkpoint.matrix(module, device) for module in modules]
            _check_shape(place, matrices, original.weight.shape)
            original.weight = torch.nn.Parameter(torch.cat([dequantize(matrix, self.dtype) for matrix in matrices]))
            if bias is not None:
                original.bias = bias
            return original
        projections = self._projections(place, modules)
        _, in_turn = activation_of(original)

        def joined(parts):
            return torch.stack(parts, dim=2).flatten(1, 2) if in_turn else torch.cat(parts, dim=1)

        def put(name, numbers):
            parameter = getattr(original, name)
            if numbers.shape != parameter.shape and numbers.dim() == 3:
                numbers = numbers.transpose(1, 2)
            elif numbers.dim() == 3 and getattr(original, "is_transposed", numbers.shape[1] == numbers.shape[2] and not hasattr(original, "config")):
                numbers = numbers.transpose(1, 2)
            if numbers.shape != parameter.shape:
                raise ValueError(f"{place}.{name}: expected {list(parameter.shape)}, got {list(numbers.shape)} from the checkpoint")
            setattr(original, name, torch.nn.Parameter(numbers.contiguous()))

        numbers = {role: torch.stack([self._numbers(module, device) for module in names]) for role, names in projections.items()}
        first = "gate_up_proj" if "gate" in projections else "up_proj"
        put(first, joined([numbers["gate"], numbers["up"]]) if "gate" in projections else numbers["up"])
        put("down_proj", numbers["down"])
        if getattr(original, "has_bias", False):
            biases = {role: self._biases(names, device) for role, names in projections.items()}
            put(f"{first}_bias", joined([biases["gate"], biases["up"]]) if "gate" in projections else biases["up"])
            put("down_proj_bias", biases["down"])
        return original

    def _numbers(self, module, device):
        return dequantize(self.checkpoint.matrix(module, device), self.dtype)


class _Left(Exception):
    """A module that `nvfp4` does not compute. The message is the reason."""


def _put(model, place, module):
    parent, _, name = place.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def _is_experts(module):
    """Whether a module has the weights of all experts of a layer."""
    first = getattr(module, "gate_up_proj", getattr(module, "up_proj", None))
    down = getattr(module, "down_proj", None)
    return all(isinstance(weight, torch.nn.Parameter) and weight.dim() == 3 for weight in (first, down))


def _is_target(module):
    return _is_experts(module) or isinstance(getattr(module, "weight", None), torch.nn.Parameter)


def _check_shape(place, matrices, shape):
    got = [sum(len(matrix.values) for matrix in matrices), 2 * matrices[0].values.shape[1]]
    if got != list(shape):
        raise ValueError(f"{place}: the model expects {list(shape)}, and the checkpoint has {got}")


# Activations: the module itself is asked for the values of its activation, whatever its configuration calls it.

WITHOUT_GATE = ("relu2",)


def activation_of(module):
    """Returns `nvfp4`'s word for the activation of a layer of experts (`None` if it has none), and whether rows of gate and up alternate."""
    if getattr(module, "has_post_expert_norm", False) or not hasattr(module, "has_gate"):
        return None, False
    # Beyond the limits of clamped activations.
    gate = torch.linspace(-30, 30, 241)
    up = gate.flip(0) * 0.75 + 1
    if not module.has_gate:
        return ("relu2" if _same(lambda: module.act_fn(gate), torch.relu(gate) ** 2) else None), False
    for in_turn, both in ((False, torch.cat((gate, up))), (True, torch.stack((gate, up), dim=1).flatten())):
        for word, wanted in _candidates(module, gate, up):
            if _same(lambda: module._apply_gate(both[None])[0], wanted):
                return word, in_turn
    return None, getattr(module, "is_concatenated", True) is False


def _candidates(module, gate, up):
    silu = torch.nn.functional.silu
    yield "silu", silu(gate) * up
    yield "gelu-tanh", torch.nn.functional.gelu(gate, approximate="tanh") * up
    places = (module, getattr(module, "config", None))
    limits = {getattr(place, name, None) for place in places for name in ("limit", "swiglu_limit")}
    slopes = {getattr(place, name, None) for place in places for name in ("alpha", "swiglu_alpha")} | {1.702}
    for limit in (limit for limit in limits if isinstance(limit, (int, float))):
        yield f"silu-limit={limit}", silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
        for slope in (slope for slope in slopes if isinstance(slope, (int, float))):
            x = gate.clamp(max=limit)
            yield f"gpt-oss={slope},{limit}", x * torch.sigmoid(slope * x) * (up.clamp(-limit, limit) + 1)


def _same(compute, wanted):
    try:
        with torch.device("cpu"), torch.no_grad():
            got = compute()
    except Exception:  # a module with an interface of its own
        return False
    return got.shape == wanted.shape and torch.allclose(got.float(), wanted, rtol=1e-5, atol=1e-5)
