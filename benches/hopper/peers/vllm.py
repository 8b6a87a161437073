"""vLLM's operators, from a folder with its wheel: two libraries and one file with a Triton kernel.

vLLM's Python package needs some fifty other packages; its libraries need only PyTorch (0.24.0 to 0.33.0 fit 2.11). This module
loads one file of the package, with stand-ins for the two modules that the file imports.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language

from . import Unavailable

LIBRARIES = ("vllm/_C_stable_libtorch.abi3.so", "vllm/_moe_C_stable_libtorch.abi3.so")
WEIGHTED_SUM = "vllm/model_executor/layers/fused_moe/moe_fused_mul_sum.py"
# vLLM's choices for the number of rows per block.
BLOCK_ROWS = (8, 16, 32, 48, 64)

_weighted_sum: types.ModuleType | None = None


def load(folder: str | None) -> None:
    """Loads the operators from a folder into which vLLM's wheel was unpacked."""
    global _weighted_sum
    if folder is None:
        raise Unavailable("no folder: point --packages at a folder with vLLM's wheel unpacked")
    for name in (*LIBRARIES, WEIGHTED_SUM):
        if not (Path(folder) / name).exists():
            raise Unavailable(f"{folder} lacks {name}; unpack vLLM's wheel there")
    for name in LIBRARIES:
        torch.ops.load_library(str(Path(folder) / name))
    stand_ins = {
        "vllm": types.ModuleType("vllm"),
        "vllm.platforms": types.ModuleType("vllm.platforms"),
        "vllm.triton_utils": types.ModuleType("vllm.triton_utils"),
    }
    capability = 10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1]
    platform = types.SimpleNamespace(
        has_device_capability=lambda least: capability >= least,
        is_cuda=lambda: True,
        get_device_capability=torch.cuda.get_device_capability,
    )
    vars(stand_ins["vllm.platforms"])["current_platform"] = platform
    vars(stand_ins["vllm.triton_utils"]).update(tl=triton.language, triton=triton)
    before = {name: sys.modules.get(name) for name in stand_ins}
    sys.modules.update(stand_ins)
    try:
        spec = importlib.util.spec_from_file_location("vllm_moe_fused_mul_sum", Path(folder) / WEIGHTED_SUM)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        for name, module_before in before.items():
            if module_before is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module_before
    _weighted_sum = module


def loaded() -> None:
    """Raises `Unavailable` unless `load` has succeeded."""
    if _weighted_sum is None:
        raise Unavailable("vLLM's libraries are not loaded: point --packages at a folder with its wheel unpacked")


def block_rows(rows: int, experts: int) -> int:
    """Returns the number of rows per block for the mean number of rows, with the rule of `fused_marlin_moe`."""
    return next((block for block in BLOCK_ROWS if rows / experts / block < 0.9), BLOCK_ROWS[-1])


def align(ids: torch.Tensor, block: int, experts: int, expert_map: torch.Tensor | None) -> list[torch.Tensor]:
    """Returns rows in blocks of one expert each, the blocks' experts, and the number of rows with padding.

    The lists have their maximum length, as in vLLM, whatever the ids. Experts on other GPUs are left out.
    """
    most = ids.numel() + experts * (block - 1)
    if ids.numel() < experts:
        most = min(ids.numel() * block, most)
    rows, owners, length = (
        torch.empty(size, dtype=torch.int32, device=ids.device) for size in (most, -(-most // block), 1)
    )
    torch.ops._moe_C.moe_align_block_size(ids, experts, block, rows, owners, length, expert_map)
    return [rows, owners, length]


def weighted_sum(
    partial: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, expert_map: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Writes `out[T, H]` from `partial[T, k, H]` with vLLM's Triton kernel. Skips experts on other GPUs."""
    module: Any = _weighted_sum
    module.moe_fused_mul_sum(partial, weights, outputs=out, topk_ids=ids, expert_map=expert_map)
