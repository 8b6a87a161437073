"""The native module. Of the package's own use alone: `nvfp4` says what each is for."""

from collections.abc import Sequence

import torch

MOE_HEAD_BYTES: int

class Error(RuntimeError):
    """A device is missing, failed, or computes no such layer."""

_Projection = tuple[torch.Tensor, torch.Tensor, Sequence[float]]

def moe(
    out: torch.Tensor,
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    weights: torch.Tensor,
    experts: int,
    intermediate: int,
    *,
    shared_intermediate: int | None = None,
    expert_map: torch.Tensor | None = None,
    shared_weights: torch.Tensor | None = None,
    weights_on_input: bool = False,
    workspace: torch.Tensor | None = None,
) -> None: ...
def pack_moe(
    weights: torch.Tensor,
    dtype: torch.dtype,
    projections: Sequence[_Projection],
    shared: Sequence[_Projection] | None,
) -> None: ...
def check_packed_moe(
    head: bytes,
    hidden: int,
    intermediate: int,
    experts: int,
    shared_intermediate: int | None,
    dtype: torch.dtype,
) -> None: ...
def moe_weight_bytes(
    hidden: int,
    intermediate: int,
    experts: int,
    shared_intermediate: int | None,
    dtype: torch.dtype,
    is_cuda: bool,
) -> int: ...
def moe_workspace_bytes(
    tokens: int,
    top_k: int,
    hidden: int,
    intermediate: int,
    experts: int,
    shared_intermediate: int | None,
) -> int: ...
def quantize(
    x: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor,
    is_given: bool,
) -> None: ...
def dequantize(
    values: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor,
    out: torch.Tensor,
) -> None: ...
