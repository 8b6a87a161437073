"""NVFP4 checkpoints in Transformers 5. Importing this module is enough: ``from_pretrained`` then loads them, with ``nvfp4``'s layers in
place of linear layers and of layers of experts, on the CPU and on NVIDIA GPUs.

    import nvfp4.transformers
    model = AutoModelForCausalLM.from_pretrained("model-nvfp4")

The checkpoint is in ModelOpt's form or in compressed-tensors' ``nvfp4-pack-quantized``; ``nvfp4 quantize`` writes both. Its tensors decide
which modules are NVFP4. A module that ``nvfp4`` does not compute is dequantized, and a warning names it with the reason.

Transformers' registry of quantizers has no entry for ModelOpt, so this module adds one. The entry for compressed-tensors is replaced by
one that leaves every other format to Transformers.
"""

import torch

try:
    import transformers
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ImportError('nvfp4.transformers needs Transformers, which is not installed: pip install "transformers>=5.20"') from None
if [int(number) for number in transformers.__version__.split(".")[:2]] < [5, 20]:
    raise ImportError(
        f'nvfp4.transformers needs Transformers 5.20 or later, found {transformers.__version__}: pip install "transformers>=5.20"'
    )

from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from . import _transformers
from ._transformers import Nvfp4Experts, Nvfp4Linear

__all__ = ["Nvfp4Config", "Nvfp4Experts", "Nvfp4Linear", "Nvfp4Quantizer", "lora"]

METHOD = "nvfp4-checkpoint"
"""The quantizer's name in Transformers' registry."""


class Nvfp4Config(QuantizationConfigMixin):
    """Options for ``from_pretrained(..., quantization_config=Nvfp4Config(...))``.

    :param experts: the format in which experts multiply tokens: ``16-bit``, ``fp8`` or ``nvfp4``; see :func:`nvfp4.moe`.
    :param linear: the same for linear layers.
    :param differentiable: keep the checkpoint's tensors too, from which gradients are computed: for training adapters.
    :param dequantize: load plain weights in the model's type instead, for comparisons and for training.
    :param described: the checkpoint's own description, which is kept for ``config.json``.
    """

    def __init__(
        self,
        experts: str = "16-bit",
        linear: str = "16-bit",
        differentiable: bool = False,
        dequantize: bool = False,
        **described,
    ) -> None:
        for option, value in (("experts", experts), ("linear", linear)):
            if value not in ("16-bit", "fp8", "nvfp4"):
                raise ValueError(f"{option}: expected 16-bit, fp8 or nvfp4, got {value!r}")
        self.quant_method = METHOD
        self.experts, self.linear, self.differentiable, self.dequantize = experts, linear, differentiable, dequantize
        self.described = described

    def to_dict(self):
        """Returns the checkpoint's description with the options, as for ``config.json``."""
        return {"quant_method": METHOD} | self.described | self.get_loading_attributes()

    def get_loading_attributes(self):
        """Returns the options that a user's configuration overwrites in the checkpoint's."""
        return {name: getattr(self, name) for name in ("experts", "linear", "differentiable", "dequantize")}


def _is_modelopt(description):
    algorithm = (description.get("quantization") or description).get("quant_algo") or ""
    return "NVFP4" in algorithm or algorithm == "MIXED_PRECISION"


def _is_compressed_tensors(description):
    ours = "nvfp4-pack-quantized"
    groups = [group.get("format") for group in (description.get("config_groups") or {}).values() if isinstance(group, dict)]
    return description.get("format") == ours or bool(groups) and all(found == ours for found in groups)


def _entry(theirs, is_ours):
    """Returns an entry of the registry of configurations that leaves other formats to Transformers' entry, if there is one."""

    class Entry(theirs or Nvfp4Config):
        @classmethod
        def from_dict(cls, config_dict, return_unused_kwargs=False, **kwargs):
            chosen = Nvfp4Config if theirs is None or is_ours(config_dict) else theirs
            return chosen.from_dict(config_dict, return_unused_kwargs, **kwargs)

    return Entry


class Nvfp4Quantizer(HfQuantizer):
    """Loads an NVFP4 checkpoint. Transformers creates it from an :class:`Nvfp4Config`."""

    def __init__(self, quantization_config: Nvfp4Config, **kwargs) -> None:
        # A checkpoint of ModelOpt can have its description beside `config.json` only. Its tensors are NVFP4 all the same.
        super().__init__(quantization_config, **{**kwargs, "pre_quantized": True})

    def update_dtype(self, dtype):
        if dtype not in (torch.bfloat16, torch.float16) and not self.quantization_config.dequantize:
            raise ValueError(f"nvfp4 computes in bfloat16 or float16, and the model's type is {dtype}; pass dtype=torch.bfloat16")
        return dtype

    def _process_model_before_weight_loading(self, model, dtype=None, checkpoint_files=None, **_):
        self._loader = _transformers.Loader(model, checkpoint_files, dtype or model.dtype)
        self._loader.make_room(model)

    def _process_model_after_weight_loading(self, model, **_):
        self._loader.fill(model, self.quantization_config)
        del self._loader
        return model

    def is_serializable(self) -> bool:
        """Packed weights depend on the device; the checkpoint is their only portable form."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Whether gradients pass through the layers to the tokens, so that adapters can be trained. The weights stay as they are."""
        return self.quantization_config.differentiable or self.quantization_config.dequantize

    @property
    def is_compileable(self) -> bool:
        return True


def lora(config):
    """Makes PEFT put LoRA adapters on this package's linear layers. The model is loaded with ``differentiable=True``.

    :param config: a ``peft.LoraConfig``.
    :returns: the same object, for ``peft.get_peft_model(model, lora(config))``.
    """
    from peft.tuners.lora import Linear

    config._register_custom_module({Nvfp4Linear: Linear})
    return config


def _register():
    if METHOD in auto.AUTO_QUANTIZER_MAPPING:
        return
    auto.register_quantizer(METHOD)(Nvfp4Quantizer)
    auto.register_quantization_config(METHOD)(Nvfp4Config)
    configurations = auto.AUTO_QUANTIZATION_CONFIG_MAPPING
    for name, is_ours in (("modelopt", _is_modelopt), ("compressed-tensors", _is_compressed_tensors)):
        configurations[name] = _entry(configurations.get(name), is_ours)
    auto.LOADING_ATTRIBUTES_CONFIG_TYPES += (Nvfp4Config,)


_register()
