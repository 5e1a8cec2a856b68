"""Formulas of the layers that several oracles share. Tensors have the names of the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from torch import Tensor
from torch.nn import functional

Tensors: TypeAlias = Mapping[str, Tensor]
"""Tensors of a checkpoint by name."""


def linear(rows: Tensor, tensors: Tensors, name: str) -> Tensor:
    """Return x W^T + b, without b where there is none."""
    return rows @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", 0)


def norm(rows: Tensor, tensors: Tensors, name: str, epsilon: float) -> Tensor:
    """Return rows of mean 0 and variance 1, times the weights, plus the bias."""
    weight, bias = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
    return functional.layer_norm(rows, weight.shape, weight, bias, epsilon)
