"""Poolings: one vector of the token vectors of each sequence.

All functions take packed batches, without padding. A padded batch is packed first, so there is one implementation, and
nothing to mask. Sums are in float32, whatever the dtype of the model. The formulas are those of sentence-transformers
(`modules/pooling.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

from staged_pool.runtime.models.kernels.transfer import send_arrays
from staged_pool.runtime.models.specs.model import PoolingMode
from staged_pool.runtime.models.transformer.packing import Skip
from staged_pool.runtime.payloads import TokenSequence


def pool(hidden: Tensor, lengths: Tensor, modes: Sequence[PoolingMode], *, skip: Skip | None = None) -> Tensor:
    """Pool each sequence of a packed batch; the vectors of several modes are concatenated.

    Args:
        hidden: [tokens, width], any dtype; sequences one after the other.
        lengths: [sequences], int64, on the device of `hidden`; each at least 1, sums to `tokens`.
        modes: At least one.
        skip: Leading tokens of each sequence that are left out. None: none are.

    Returns:
        [sequences, width * modes], float32, on the device of `hidden`.
    """
    tokens = hidden.float()
    if skip is not None:
        kept, lengths = len(hidden) - skip.total, lengths - skip.tokens
        before = _each(skip.tokens.cumsum(0), lengths, kept)
        tokens = tokens[torch.arange(kept, device=hidden.device) + before]
    pooled = [
        weighted_mean_pool(tokens, lengths, skip and skip.tokens)
        if mode == "weightedmean"
        else _POOLINGS[mode](tokens, lengths)
        for mode in modes
    ]
    return pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1)


def mean_pool(hidden: Tensor, lengths: Tensor) -> Tensor:
    """Average of the token vectors, [sequences, width]: sum(h_t) / n."""
    return _reduced(hidden, "mean", lengths)


def mean_sqrt_len_pool(hidden: Tensor, lengths: Tensor) -> Tensor:
    """Sum of the token vectors over the root of their number, [sequences, width]: sum(h_t) / sqrt(n)."""
    return _reduced(hidden, "sum", lengths) / lengths.sqrt().unsqueeze(1)


def weighted_mean_pool(hidden: Tensor, lengths: Tensor, before: Tensor | None = None) -> Tensor:
    """Average that weights later tokens more, [sequences, width]: sum(t * h_t) / sum(t), t from 1 to n.

    If `before` [sequences] leading tokens of each were left out, t counts from before + 1.
    """
    starts = lengths.cumsum(0) - lengths
    weights = torch.arange(1, len(hidden) + 1, device=hidden.device) - _each(starts, lengths, len(hidden))
    total = lengths * (lengths + 1) / 2
    if before is not None:
        weights = weights + _each(before, lengths, len(hidden))
        total = total + before * lengths
    return _reduced(hidden * weights.unsqueeze(1), "sum", lengths) / total.unsqueeze(1)


def max_pool(hidden: Tensor, lengths: Tensor) -> Tensor:
    """Largest value of each dimension over the tokens, [sequences, width]."""
    return _reduced(hidden, "max", lengths)


def cls_pool(hidden: Tensor, lengths: Tensor) -> Tensor:
    """The first token's vector, [sequences, width]."""
    return hidden[lengths.cumsum(0) - lengths]


def end_pool(hidden: Tensor, sequences: Sequence[TokenSequence], lengths: Tensor, end_token: int | None) -> Tensor:
    """Vector of each sequence's first `end_token`, or of its first token if it has none: [sequences, width].

    With `end_token` None it is the token with the highest id: the end token, if the config of CLIP has a wrong id for
    it. Both rules are those of `CLIPTextModel` in transformers.
    """
    places = [
        s.ids.index(max(s.ids)) if end_token is None else s.ids.index(end_token) if end_token in s.ids else 0
        for s in sequences
    ]
    found = send_arrays([np.array(places)], hidden.device)
    return hidden[lengths.cumsum(0) - lengths + found]


def last_token_pool(hidden: Tensor, lengths: Tensor) -> Tensor:
    """The last token's vector, [sequences, width]."""
    return hidden[lengths.cumsum(0) - 1]


def _reduced(hidden: Tensor, how: str, lengths: Tensor) -> Tensor:
    # unsafe: to check the lengths, the host would have to wait for the device.
    return torch.segment_reduce(hidden, how, lengths=lengths, unsafe=True)


def _each(values: Tensor, lengths: Tensor, tokens: int) -> Tensor:
    """Repeat the value of each sequence for its tokens: [tokens].

    The number of tokens is passed, so that the host does not wait for the device.
    """
    return values.repeat_interleave(lengths, output_size=tokens)


_Pooling: TypeAlias = Callable[[Tensor, Tensor], Tensor]

_POOLINGS: Final[Mapping[PoolingMode, _Pooling]] = {
    "cls": cls_pool,
    "max": max_pool,
    "mean": mean_pool,
    "mean_sqrt_len_tokens": mean_sqrt_len_pool,
    "lasttoken": last_token_pool,
}
