"""Lay the sequences of a batch one behind the other, and bring them to the device in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, groupby

import numpy as np
import torch
from torch import Tensor

from staged_pool.runtime.model import TokenSequence
from staged_pool.runtime.models.stack import Group


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """The token ids of several sequences, one after the other, and behind them a few tokens that mean nothing."""

    ids: Tensor
    """[rounded tokens], int64; 0 behind the sequences."""
    positions: Tensor
    """[rounded tokens], int64: each token's place in its sequence, from 0."""
    lengths: Tensor
    """[sequences], int64."""
    types: Tensor | None
    """[rounded tokens], int64: 1 in the second segment of a pair. None: there is no pair."""
    prompt_lengths: Tensor | None
    """[sequences], int64: leading tokens that pooling leaves out. None: none."""
    groups: Sequence[Group]
    """Of the sequences, without what is behind them."""
    tokens: int
    """Of the sequences."""
    sequences: Sequence[TokenSequence]

    @classmethod
    def of(cls, sequences: Sequence[TokenSequence], device: torch.device) -> PackedBatch:
        """Lay the sequences out, and bring them to the device in one copy."""
        count = len(sequences)
        lengths = np.fromiter((len(s.ids) for s in sequences), np.int64, count)
        tokens = int(lengths.sum())
        rounded = _round_up(tokens)
        starts = lengths.cumsum() - lengths
        places = np.arange(tokens) - starts.repeat(lengths)
        pairs = any(s.first_tokens is not None for s in sequences)
        prompts = any(s.prompt_tokens for s in sequences)
        packed = np.zeros((3 if pairs else 2) * rounded + (2 if prompts else 1) * count, np.int64)
        packed[:tokens] = np.fromiter(chain.from_iterable(s.ids for s in sequences), np.int64, tokens)
        packed[rounded : rounded + tokens] = places
        at = 2 * rounded
        if pairs:
            firsts = [len(s.ids) if s.first_tokens is None else s.first_tokens for s in sequences]
            packed[at : at + tokens] = places >= np.repeat(firsts, lengths)
            at += rounded
        packed[at : at + count] = lengths
        if prompts:
            packed[at + count :] = [s.prompt_tokens for s in sequences]
        on_device = torch.from_numpy(packed).to(device)
        groups = [
            Group(len(list(same)), length, length - unseen)
            for (length, unseen), same in groupby((len(s.ids), s.unseen_tokens) for s in sequences)
        ]
        return cls(
            ids=on_device[:rounded],
            positions=on_device[rounded : 2 * rounded],
            lengths=on_device[at : at + count],
            types=on_device[2 * rounded : 3 * rounded] if pairs else None,
            prompt_lengths=on_device[at + count :] if prompts else None,
            groups=groups,
            tokens=tokens,
            sequences=sequences,
        )


def _round_up(tokens: int) -> int:
    """To one of eight sizes in each octave: at most an eighth more.

    oneDNN makes and keeps a kernel, and its scratch memory, for every size of a matrix that it meets: about 1.4 MB for
    each number of tokens in MiniLM. There are fifty sizes up to 2048 tokens this way, instead of as many as tokens.
    """
    step = max(4, 1 << max(0, (tokens - 1).bit_length() - 4))
    return -(-tokens // step) * step
