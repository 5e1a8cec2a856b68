"""Choice of the matrix product for mixture-of-experts layers."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from staged_pool.runtime.models.kernels.linear import NO_KERNEL
from staged_pool.stages.log import get_logger

log = get_logger("staged_pool.models")


def select_experts_implementation(model: PreTrainedModel) -> None:
    """Compute experts one by one if torch lacks a grouped product for the device.

    transformers selects the grouped product if torch has that function, but torch 2.8 implements it for some GPUs only.
    """
    if getattr(model.config, "_experts_implementation", None) != "grouped_mm" or _grouped(model.device, model.dtype):
        return
    model.set_experts_implementation("eager")
    log.debug("model.experts_in_turn", reason=f"torch {torch.__version__} has no grouped product for {model.device}")


def _grouped(device: torch.device, dtype: torch.dtype) -> bool:
    """Try the grouped product; True if it works or transformers brings its own."""
    product = getattr(nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if product is None:
        return True  # transformers then uses its own implementation
    rows = torch.ones(16, 16, dtype=dtype, device=device)
    ends = torch.tensor([16], dtype=torch.int32, device=device)
    try:
        product(rows, rows.unsqueeze(0), offs=ends)
    except NO_KERNEL:
        return False
    return True
