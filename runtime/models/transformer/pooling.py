"""Make one vector of the token vectors of each sequence.

All of it works on a packed batch: the token vectors of all sequences one after the other, no padding. A padded
batch is brought to that layout first, so that there is one implementation and nothing to mask. Sums are made in
float32 whatever the model computes in. The formulas are those of sentence-transformers (`modules/pooling.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

from staged_pool.runtime.model import TokenSequence
from staged_pool.runtime.models.kernels.transfer import send_arrays
from staged_pool.runtime.models.specs.model import PoolingMode
from staged_pool.runtime.models.transformer.packing import Skip


def pool(hidden: Tensor, lengths: Tensor, modes: Sequence[PoolingMode], *, skip: Skip | None = None) -> Tensor:
    """Make one vector of each sequence of a packed batch; several modes are concatenated.

    Args:
        hidden: [tokens, width], any dtype; sequences one after the other.
        lengths: [sequences], int64, on the device of `hidden`; each at least 1, sums to `tokens`.
        modes: At least one.
        skip: Leading tokens of each that are left out. None: none.

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

    With `before` [sequences] tokens left out of the beginning of each, t counts from before + 1.
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
    """The vector of each sequence's first token `end_token`, [sequences, width]; of its first one where there is none.

    None: of the token with the highest id, as CLIP finds the end where its config has another id for it than its
    tokenizer. Both as `CLIPTextModel` of transformers has them.
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
    # What would be checked are the lengths, for which the host would have to wait for the device.
    return torch.segment_reduce(hidden, how, lengths=lengths, unsafe=True)


def _each(values: Tensor, lengths: Tensor, tokens: int) -> Tensor:
    """The value of each token's sequence, [tokens]. Their number is known: the host need not wait for the device."""
    return values.repeat_interleave(lengths, output_size=tokens)


_Pooling: TypeAlias = Callable[[Tensor, Tensor], Tensor]

_POOLINGS: Final[Mapping[PoolingMode, _Pooling]] = {
    "cls": cls_pool,
    "max": max_pool,
    "mean": mean_pool,
    "mean_sqrt_len_tokens": mean_sqrt_len_pool,
    "lasttoken": last_token_pool,
}
