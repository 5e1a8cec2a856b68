"""Attention over a packed batch: sequences lie one after the other in one row, and none sees another.

Registered with transformers under one name, so that every architecture which takes its attention function from
there runs packed without code of its own. Nothing is computed for padding, and a text's vector depends on the
texts beside it only by rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

PACKED: Final = "staged_packed"
"""The name of this attention in transformers."""


class Group(NamedTuple):
    """Neighbours of equal length in a batch, which share a call of the kernel."""

    sequences: int
    tokens: int
    """Of each."""
    seen: int
    """Leading tokens of each that its tokens attend to: all, unless it ends in a query's expansion."""


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
    heads, tokens = query.shape[1:3]
    out = query.new_empty(tokens, heads, value.shape[-1])
    start = 0
    for sequences, length, seen in packed_groups:
        end = start + sequences * length
        # [1, heads, tokens, width] -> [sequences, heads, length, width], without a copy
        q, k, v = (
            x[0, :, start:end].reshape(x.shape[1], sequences, length, -1).transpose(0, 1) for x in (query, key, value)
        )
        mask = _window_mask(length, sliding_window, causal=causal, device=query.device)
        if seen < length:
            k, v = k[:, :, :seen], v[:, :, :seen]
            mask = _seen_mask(mask, length, seen, causal=causal, device=query.device)
        attended = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scaling, is_causal=causal and mask is None, enable_gqa=heads != k.shape[1]
        )
        out[start:end].view(sequences, length, heads, -1).copy_(attended.transpose(1, 2))
        start = end
    return out.unsqueeze(0), None


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
