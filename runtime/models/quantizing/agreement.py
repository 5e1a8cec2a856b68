"""Agreement of the vectors of an int8 model with those of float32."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch.nn.functional as F
from torch import Tensor

LEAST_MEAN: Final = 0.995
"""Least accepted mean of the cosines. docs/int8.md has what retrieval loses at it."""


class Agreement(NamedTuple):
    """Cosines between vectors of the same texts."""

    mean: float
    least: float

    @classmethod
    def of(cls, found: Tensor, reference: Tensor) -> Agreement:
        """Compare vectors, [texts, width] each."""
        cosines = F.cosine_similarity(found, reference, dim=1)
        return cls(float(cosines.mean()), float(cosines.min()))

    def __str__(self) -> str:
        return f"{self.mean:.4f} in the mean, {self.least:.4f} at least"
