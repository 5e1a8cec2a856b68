"""Attention over a packed batch: sequences lie one after the other in one row, and none sees another.

Registered with transformers under one name, so that every architecture which takes its attention function from
there runs packed without code of its own. Nothing is computed for padding, and a text's vector depends on the
texts beside it only by rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from staged_pool.runtime.models.stack import Group

PACKED: Final = "staged_packed"
"""The name of this attention in transformers."""


_UNSUPPORTED: Final = ("position_bias", "softcap", "s_aux")
"""Arguments that some architectures pass and that change what attention is."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_groups: Sequence[Group],
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend within each sequence: softmax(Q K^T * scaling) V. Neighbours of equal length share one call.

    Args:
        module: The attention layer; says whether it is causal where `is_causal` is None.
        query: [1, heads, tokens, head width].
        key: [1, key heads, tokens, head width]; fewer heads than `query` under grouped-query attention.
        value: As `key`.
        attention_mask: None; a packed batch has nothing to mask.
        packed_groups: Passed through by the model; its tokens sum to those of `query`.
        scaling: Of the scores. None: 1 / sqrt(head width).
        sliding_window: A token sees others less than this many places away. None: all.
        is_causal: Whether a token sees only what stands before it.
        others: What this form of attention has no use for.

    Returns:
        [1, tokens, heads, head width], and no attention weights.

    Raises:
        NotImplementedError: The architecture adds to the scores in a way that is not done here.
    """
    del attention_mask
    if unsupported := [name for name in _UNSUPPORTED if others.get(name) is not None]:
        raise NotImplementedError(f"packed attention does not do {', '.join(unsupported)}")
    causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    sizes = [group.sequences * group.tokens for group in packed_groups]
    parts = [(query, key, value)]
    if len(sizes) > 1:
        parts = list(zip(*(x.split_with_sizes(sizes, dim=2) for x in (query, key, value)), strict=True))
    attended = []
    for group, part in zip(packed_groups, parts, strict=True):
        # [1, heads, tokens, width] -> [sequences, heads, length, width], without a copy
        q, k, v = (x.view(x.shape[1], group.sequences, group.tokens, -1).transpose(0, 1) for x in part)
        one = _attend(q, k, v, group.seen, scaling=scaling, window=sliding_window, causal=causal)
        attended.append(one.reshape(1, -1, *one.shape[2:]))
    return (attended[0] if len(attended) == 1 else torch.cat(attended, dim=1)), None


def _attend(
    q: Tensor, k: Tensor, v: Tensor, seen: int, *, scaling: float | None, window: int | None, causal: bool
) -> Tensor:
    """Sequences of equal length, [sequences, heads, length, width] -> [sequences, length, heads, width].

    Nothing is moved by that: it is how the kernel lays out what it gives.
    """
    heads, length = q.shape[1:3]
    mask = _window_mask(length, window, causal=causal, device=q.device)
    if seen < length:
        k, v = k[:, :, :seen], v[:, :, :seen]
        mask = _seen_mask(mask, length, seen, causal=causal, device=q.device)
    attended = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scaling, is_causal=causal and mask is None, enable_gqa=heads != k.shape[1]
    )
    return attended.transpose(1, 2)


def _window_mask(length: int, window: int | None, *, causal: bool, device: torch.device) -> Tensor | None:
    """[length, length], True where a token sees another. None: the window is as long as the sequence."""
    if window is None or length <= window:
        return None
    places = torch.arange(length, device=device)
    distance = places.unsqueeze(1) - places
    return (distance >= 0) & (distance < window) if causal else distance.abs() < window


def _seen_mask(mask: Tensor | None, length: int, seen: int, *, causal: bool, device: torch.device) -> Tensor | None:
    """What is left of a mask where only the first `seen` tokens are attended to: [length, seen]."""
    if mask is not None:
        return mask[:, :seen]
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()[:, :seen] if causal else None


AttentionInterface.register(PACKED, packed_attention)
