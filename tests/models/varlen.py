"""A reference of `torch.nn.attention.varlen.varlen_attn`, which has a kernel for GPUs alone."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


def varlen_attn(  # noqa: PLR0917  # as torch has it
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """[tokens, heads, head width]; see torch. What belongs to no sequence is NaN: the kernel does not write it."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert max_q == max_k
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert all(x.stride(-1) == 1 for x in (query, key, value))
    starts = cu_seq_q.tolist()
    assert starts[0] == 0
    out = torch.full_like(query, torch.nan)
    for start, end in pairwise(starts):
        assert start <= end <= len(query)
        assert end - start <= max_q
        places = torch.arange(end - start)
        distance = places.unsqueeze(1) - places  # distance that a token looks back
        left, right = window_size
        seen = torch.ones_like(distance, dtype=torch.bool)
        if left >= 0:
            seen &= distance <= left
        if right >= 0:
            seen &= distance >= -right
        q, k, v = (x[start:end].transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=enable_gqa)
        out[start:end] = attended[0].transpose(0, 1)
    return out
