"""Attention over a packed batch: sequences lie one after the other, and each attends to itself only.

Two kernels compute it. `scaled_dot_product_attention` takes neighbours of equal length together, on every device and in
every dtype. On a GPU, `varlen_attn` takes all sequences in one call, by their start offsets.

The function is registered with transformers under one name. So every architecture that looks its attention function up
there can run packed batches. Nothing is computed for padding, and other texts of a batch change a text's vector only by
rounding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from staged_pool.runtime.models.kernels.encoder_layers import Group
from staged_pool.runtime.models.kernels.optional_torch import optional_torch

varlen_attn: Callable[..., Any] | None = optional_torch(
    "torch.nn.attention.varlen.varlen_attn", instead="on GPUs, sequences attend in groups of equal length"
)

PACKED: Final = "staged_packed"
"""Name of this attention function in transformers."""


class Bounds(NamedTuple):
    """Offsets of the sequences in a packed batch."""

    starts: Tensor
    """[sequences + 1], int32: the start of each in tokens, then the end of the last."""
    longest: int
    """Tokens of the longest sequence, or more."""


_BIASED_SCORES: Final = 2**24
"""Scores that one kernel call computes where they have a bias: the bias of each takes memory."""

_UNSUPPORTED: Final = ("position_bias", "softcap", "s_aux")
"""Arguments of some architectures that change the scores."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_groups: Sequence[Group],
    packed_bounds: Bounds | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    distance_slopes: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend within each sequence: softmax(Q K^T * scaling) V. Neighbours of equal length share one call.

    Args:
        module: The attention layer. Its `is_causal` counts if the argument is None.
        query: [1, heads, tokens, head width].
        key: [1, key heads, tokens, head width]; fewer heads than `query` under grouped-query attention.
        value: Same shape as `key`.
        attention_mask: Ignored: a packed batch has nothing to mask.
        packed_groups: Groups of the batch, which the model passes through. Their tokens sum to those of `query`.
        packed_bounds: Offsets of the same sequences, to compute all in one call. Each token then attends to its whole
            sequence: `Group.key_tokens` is ignored.
        scaling: Factor of the scores. None: 1 / sqrt(head width).
        sliding_window: A token attends to tokens less than this distance away. None: to all.
        is_causal: A token attends to itself and earlier tokens only.
        distance_slopes: [heads], float32: factor of the distance of two tokens, which is subtracted from their score.
            Only for attention in both directions. None: distances do not count.
        others: Unused arguments.

    Returns:
        [1, tokens, heads, head width], and no attention weights.

    Raises:
        NotImplementedError: The architecture changes the scores in an unsupported way.
    """
    del attention_mask
    if unsupported := [name for name in _UNSUPPORTED if others.get(name) is not None]:
        raise NotImplementedError(f"packed attention does not support {', '.join(unsupported)}")
    causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    if distance_slopes is not None and (causal or sliding_window is not None or packed_bounds is not None):
        raise NotImplementedError("packed attention has no slopes with a window, a direction or a single call")
    if packed_bounds is not None:
        one_call = _attend_in_one_call(
            (query, key, value), packed_bounds, scaling=scaling, window=sliding_window, causal=causal
        )
        return one_call, None
    sizes = [group.sequences * group.tokens for group in packed_groups]
    parts = [(query, key, value)]
    if len(sizes) > 1:
        parts = list(zip(*(x.split_with_sizes(sizes, dim=2) for x in (query, key, value)), strict=True))
    attended = []
    for group, part in zip(packed_groups, parts, strict=True):
        # [1, heads, tokens, width] -> [sequences, heads, length, width], without a copy
        q, k, v = (x.view(x.shape[1], group.sequences, group.tokens, -1).transpose(0, 1) for x in part)
        if distance_slopes is None:
            one = _attend(q, k, v, group.key_tokens, scaling=scaling, window=sliding_window, causal=causal)
        else:
            keys = group.key_tokens
            one = _attend_by_distance(q, k[:, :, :keys], v[:, :, :keys], distance_slopes, scaling=scaling)
        attended.append(one.reshape(1, -1, *one.shape[2:]))
    return (attended[0] if len(attended) == 1 else torch.cat(attended, dim=1)), None


def attend_by(model: PreTrainedModel, name: str) -> None:
    """Select an attention function by name, if the model's class looks it up in transformers."""
    model.set_attn_implementation(name)
    # transformers before 5.7 searches the source text, and believes that ModernBERT does not look it up.
    if model.config._attn_implementation != name and hasattr(inspect.getmodule(type(model)), "ALL_ATTENTION_FUNCTIONS"):
        model.config._attn_implementation = name


def takes_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    """True: `varlen_attn`, a kernel of FlashAttention 2, can run here.

    It needs a GPU from Ampere on, a dtype of 16 bits, and a torch whose `varlen_attn` takes a scale and a window. It
    does not take every head width: a trial call shows that.
    """
    return (
        {"scale", "window_size"} <= _varlen_parameters().keys()
        and device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def _varlen_parameters() -> Mapping[str, object]:
    """Return the parameters of `varlen_attn`, which differ between versions of torch. Empty: unknown."""
    try:
        return {} if varlen_attn is None else inspect.signature(varlen_attn).parameters
    except (TypeError, ValueError):  # it is not a Python function
        return {}


def _attend_in_one_call(
    qkv: Sequence[Tensor], bounds: Bounds, *, scaling: float | None, window: int | None, causal: bool
) -> Tensor:
    """Attend by `varlen_attn`: three of [1, heads, tokens, head width] -> [1, tokens, heads, head width]."""
    before = -1 if window is None else window - 1  # a window counts the token itself as well
    q, k, v = (x[0].transpose(0, 1) for x in qkv)
    grouped: dict[str, bool] = {}
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" in _varlen_parameters():
            grouped = {"enable_gqa": True}
        else:  # torch 2.11 needs as many key heads as query heads
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    assert varlen_attn is not None
    attended = varlen_attn(
        q,
        k,
        v,
        bounds.starts,
        bounds.starts,
        bounds.longest,
        bounds.longest,
        scale=scaling,
        window_size=(before, 0 if causal else before),
        **grouped,
    )
    assert isinstance(attended, Tensor)
    return attended.unsqueeze(0)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, key_tokens: int, *, scaling: float | None, window: int | None, causal: bool
) -> Tensor:
    """Attend in sequences of equal length: [sequences, heads, length, width] -> [sequences, length, heads, width].

    The transposition copies nothing: the kernel writes its result in that order.
    """
    heads, length = q.shape[1:3]
    mask = _window_mask(length, window, causal=causal, device=q.device)
    if key_tokens < length:
        k, v = k[:, :, :key_tokens], v[:, :, :key_tokens]
        mask = _key_mask(mask, length, key_tokens, causal=causal, device=q.device)
    attended = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scaling, is_causal=causal and mask is None, enable_gqa=heads != k.shape[1]
    )
    return attended.transpose(1, 2)


def _attend_by_distance(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, *, scaling: float | None) -> Tensor:
    """Attend with a bias: [sequences, heads, length, width] -> [sequences, length, heads, width].

    Long sequences are computed in parts, each with a few of the queries.
    """
    heads, length = q.shape[1:3]
    keys = torch.arange(k.shape[2], device=q.device)
    rows = max(1, _BIASED_SCORES // (heads * len(keys)))
    parts = []
    for start in range(0, length, rows):
        part = q[:, :, start : start + rows]
        places = torch.arange(start, start + part.shape[2], device=q.device)
        bias = (-slopes.view(-1, 1, 1) * (places.unsqueeze(1) - keys).abs()).to(q.dtype)
        parts.append(F.scaled_dot_product_attention(part, k, v, attn_mask=bias.unsqueeze(0), scale=scaling))
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)).transpose(1, 2)


def _window_mask(length: int, window: int | None, *, causal: bool, device: torch.device) -> Tensor | None:
    """Return a mask, [length, length]: True where a token attends to another. None: the window covers all."""
    if window is None or length <= window:
        return None
    places = torch.arange(length, device=device)
    distance = places.unsqueeze(1) - places
    return (distance >= 0) & (distance < window) if causal else distance.abs() < window


def _key_mask(
    mask: Tensor | None, length: int, key_tokens: int, *, causal: bool, device: torch.device
) -> Tensor | None:
    """Return a mask for attention to the first `key_tokens` tokens: [length, key_tokens]. None: no mask is needed."""
    if mask is not None:
        return mask[:, :key_tokens]
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()[:, :key_tokens] if causal else None


AttentionInterface.register(PACKED, packed_attention)
