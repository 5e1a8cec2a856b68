"""One vector for each sequence: a pooling of its token vectors, and the modules that follow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from staged_pool.runtime.model import Values
from staged_pool.runtime.models.heads.head import on_host
from staged_pool.runtime.models.heads.modules import build_modules
from staged_pool.runtime.models.packing import PackedBatch
from staged_pool.runtime.models.pooling import pool
from staged_pool.runtime.models.specs import DenseSpec


class DenseHead:
    """Rows are views of one [sequences, width] array, before the normalisation at the end of the chain.

    Args:
        spec: See `DenseSpec`.
        token_width: Values of a token vector.
        device: Where it computes.

    Raises:
        ConfigError: Weights of the modules are missing or do not fit.
    """

    width: int
    """Values of one row."""

    def __init__(self, spec: DenseSpec, token_width: int, device: torch.device) -> None:
        modules, width = build_modules(spec.modules, token_width * len(spec.pooling))
        self._modules = modules.to(device)
        self._pooling = spec.pooling
        self.width = min(width, spec.truncate_dim or width)

    def parameters(self) -> int:
        return sum(p.numel() for p in self._modules.parameters())

    def __call__(self, hidden: Tensor, batch: PackedBatch) -> Sequence[Values]:
        pooled = self._modules(pool(hidden, batch.lengths, self._pooling, skip=batch.prompt_lengths))
        return list(on_host(pooled[:, : self.width]))
