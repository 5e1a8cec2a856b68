"""Attention that weakens with distance: ALiBi, symmetric for encoders.

Each head subtracts its slope times the distance of two tokens from their score (Press et al., 2021,
https://arxiv.org/abs/2108.12409; symmetric in section 2.1 of https://arxiv.org/abs/2310.19923).
"""

from __future__ import annotations

import torch
from torch import Tensor


def head_slopes(heads: int, device: torch.device) -> Tensor:
    """Slope of each head: [heads], float32.

    For a power of two it is 2 ** (-8 / heads), and each next head has that factor. Other counts take the slopes of the
    power of two below, then every other slope of the power of two above.
    """
    whole = 1 << (heads.bit_length() - 1)
    exponents = torch.arange(1, whole + 1, device=device) * (8 / whole)
    between = (2 * torch.arange(heads - whole, device=device) + 1) * (4 / whole)
    return torch.exp2(-torch.cat([exponents, between]).float())


def biased_mask(slopes: Tensor, attention_mask: Tensor | None, tokens: int, dtype: torch.dtype) -> Tensor:
    """Values to add to the scores of padded rows: [rows or 1, heads, tokens, tokens].

    Args:
        slopes: [heads].
        attention_mask: [rows, tokens]: 1 at a token, 0 at padding. None: there is no padding.
        tokens: Tokens of a row.
        dtype: Data type of the result.
    """
    places = torch.arange(tokens, device=slopes.device)
    distance = (places.unsqueeze(1) - places).abs()
    bias = (-slopes.view(-1, 1, 1) * distance).to(dtype).unsqueeze(0)
    if attention_mask is None:
        return bias
    return bias.masked_fill(attention_mask[:, None, None, :] == 0, torch.finfo(dtype).min)
