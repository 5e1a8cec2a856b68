"""Mixtures of experts: how transformers multiplies tokens with the weights of the experts that are chosen for them."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from staged_pool.runtime.models.kernels.linear import NO_KERNEL
from staged_pool.stages.log import get_logger

log = get_logger("staged_pool.models")


def run_experts_where_they_can(model: PreTrainedModel) -> None:
    """Have experts computed one after the other where torch cannot multiply by those of all tokens in one call.

    transformers takes the one call wherever torch has it; torch 2.8 has it for some GPUs only.
    """
    if getattr(model.config, "_experts_implementation", None) != "grouped_mm" or _grouped(model.device, model.dtype):
        return
    model.set_experts_implementation("eager")
    log.info("model.experts_in_turn", reason=f"torch {torch.__version__} has no grouped product for {model.device}")


def _grouped(device: torch.device, dtype: torch.dtype) -> bool:
    """Try the product that transformers would take."""
    product = getattr(nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if product is None:
        return True  # transformers has a way of its own then
    rows = torch.ones(16, 16, dtype=dtype, device=device)
    ends = torch.tensor([16], dtype=torch.int32, device=device)
    try:
        product(rows, rows.unsqueeze(0), offs=ends)
    except NO_KERNEL:
        return False
    return True
