"""Rotary positions (Su et al., 2021, https://arxiv.org/abs/2104.09864), with the halves of a head turned together."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Angles(NamedTuple):
    """Cosines and sines of each token: [rows, 1, tokens, head width] each."""

    cosine: Tensor
    sine: Tensor

    @classmethod
    def of(cls, positions: Tensor, base: float, width: int, dtype: torch.dtype) -> Angles:
        """Compute the angles of positions, [rows, tokens], for heads of `width` values."""
        exponents = torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width
        angles = positions[:, None, :, None].float() / base**exponents
        angles = torch.cat([angles, angles], dim=-1)
        return cls(angles.cos().to(dtype), angles.sin().to(dtype))

    def turn(self, x: Tensor) -> Tensor:
        """Turn queries or keys, [rows, heads, tokens, head width]."""
        first, second = x.chunk(2, dim=-1)
        return x * self.cosine + torch.cat([-second, first], dim=-1) * self.sine
