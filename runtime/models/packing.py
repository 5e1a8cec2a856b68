"""Lay the sequences of a batch one behind the other, and bring them to the device in one copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from staged_pool.runtime.model import TokenSequence
from staged_pool.runtime.models.attention import Bounds
from staged_pool.runtime.models.stack import Group
from staged_pool.runtime.models.transfer import Staging


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
    bounds: Bounds
    """Of the sequences, and of what is behind them as one more."""
    tokens: int
    """Of the sequences."""
    sequences: Sequence[TokenSequence]

    @classmethod
    def of(
        cls, sequences: Sequence[TokenSequence], device: torch.device, staging: Staging | None = None
    ) -> PackedBatch:
        """Lay the sequences out, and bring them to the device in one copy.

        Args:
            sequences: At least one.
            device: Where they go.
            staging: Of that device: the copy is then only begun.
        """
        count = len(sequences)
        lengths = np.fromiter((len(s.ids) for s in sequences), np.int64, count)
        tokens = int(lengths.sum())
        rounded = _round_up(tokens)
        starts = lengths.cumsum() - lengths
        pairs = any(s.first_tokens is not None for s in sequences)
        prompts = any(s.prompt_tokens for s in sequences)
        at = (3 if pairs else 2) * rounded
        end = at + count + (count if prompts else 0)

        def fill(packed: NDArray[np.int32]) -> None:
            places = np.arange(tokens) - starts.repeat(lengths)
            packed[:tokens] = np.fromiter(chain.from_iterable(s.ids for s in sequences), np.int32, tokens)
            packed[rounded : rounded + tokens] = places
            if pairs:
                firsts = [len(s.ids) if s.first_tokens is None else s.first_tokens for s in sequences]
                packed[2 * rounded : 2 * rounded + tokens] = places >= np.repeat(firsts, lengths)
            packed[at : at + count] = lengths
            if prompts:
                packed[at + count : end] = [s.prompt_tokens for s in sequences]
            packed[end : end + count] = starts
            packed[end + count :] = tokens, rounded

        sent = _send(end + count + 2, fill, device, staging)
        on_device = sent[:end].long()
        groups = [
            Group(len(list(same)), length, length - unseen)
            for (length, unseen), same in groupby((len(s.ids), s.unseen_tokens) for s in sequences)
        ]
        return cls(
            ids=on_device[:rounded],
            positions=on_device[rounded : 2 * rounded],
            lengths=on_device[at : at + count],
            types=on_device[2 * rounded : 3 * rounded] if pairs else None,
            prompt_lengths=on_device[at + count : end] if prompts else None,
            groups=groups,
            bounds=Bounds(sent[end:], max(int(lengths.max()), rounded - tokens)),
            tokens=tokens,
            sequences=sequences,
        )


def _send(
    size: int, fill: Callable[[NDArray[np.int32]], None], device: torch.device, staging: Staging | None
) -> Tensor:
    if staging is not None:
        return staging.send(size, fill)
    packed = np.zeros(size, np.int32)
    fill(packed)
    return torch.from_numpy(packed).to(device)


def _round_up(tokens: int) -> int:
    """To one of sixteen sizes in each octave: at most a sixteenth more, which takes as much more time.

    oneDNN makes and keeps a kernel for every size of a matrix that it meets: 2.4 MB for each number of tokens in MiniLM
    (AVX-512, float32). There are ninety sizes up to 2048 tokens this way, instead of as many as tokens.
    """
    step = max(4, 1 << max(0, (tokens - 1).bit_length() - 5))
    return -(-tokens // step) * step
