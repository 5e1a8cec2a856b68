"""Packed batches: token sequences one behind the other, copied to the device at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from staged_pool.runtime.models.kernels.attention import Bounds
from staged_pool.runtime.models.kernels.encoder_layers import Group
from staged_pool.runtime.models.kernels.transfer import send_arrays
from staged_pool.runtime.payloads import TokenSequence


class Skip(NamedTuple):
    """Number of leading tokens that pooling leaves out of each sequence."""

    tokens: Tensor
    """[sequences], int64; fewer than each sequence has."""
    total: int
    """Sum of `tokens`, on the host."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Token ids of several sequences, one behind the other.

    A few filler tokens follow, which round the size up; see `_round_up`.
    """

    ids: Tensor
    """[rounded tokens], int64; filler is 0."""
    positions: Tensor
    """[rounded tokens], int64: each token's index in its sequence."""
    lengths: Tensor
    """[sequences], int64: tokens of each."""
    types: Tensor | None
    """[rounded tokens], int64: 1 in the second segment of a pair. None: there is no pair."""
    prompts: Skip | None
    """Prompts that pooling leaves out. None: there are none. A sequence that is only a prompt is pooled whole."""
    attended: Tensor | None
    """[sequences], int64: number of leading tokens that the tokens of each attend to. None: all."""
    groups: Sequence[Group]
    """Runs of neighbours of equal length, without filler."""
    bounds: Bounds
    """Starts and ends of the sequences; filler counts as one more sequence."""
    tokens: int
    """Tokens of all sequences, without filler."""
    sequences: Sequence[TokenSequence]

    @classmethod
    def of(cls, sequences: Sequence[TokenSequence], device: torch.device) -> PackedBatch:
        """Pack sequences, and start one copy to the device.

        Args:
            sequences: At least one.
            device: Where the tensors are.
        """
        lengths = np.fromiter((len(s.ids) for s in sequences), np.int64, len(sequences))
        tokens = int(lengths.sum())
        rounded = _round_up(tokens)
        starts = lengths.cumsum() - lengths
        places = np.arange(tokens) - starts.repeat(lengths)
        ids = np.fromiter(chain.from_iterable(s.ids for s in sequences), np.int32, tokens)
        parts = {"ids": _zero_padded(ids, rounded), "positions": _zero_padded(places, rounded), "lengths": lengths}
        if any(s.first_tokens is not None for s in sequences):
            firsts = [len(s.ids) if s.first_tokens is None else s.first_tokens for s in sequences]
            parts["types"] = _zero_padded(places >= np.repeat(firsts, lengths), rounded)
        skipped = [s.prompt_tokens if s.prompt_tokens < len(s.ids) else 0 for s in sequences]
        if any(skipped):
            parts["skipped"] = np.array(skipped)
        if any(s.unseen_tokens for s in sequences):
            parts["attended"] = lengths - [s.unseen_tokens for s in sequences]
        bounds = np.array([*starts, tokens, rounded])
        sent = send_arrays([part.astype(np.int32) for part in (*parts.values(), bounds)], device)
        *numbers, _ = sent.long().split_with_sizes([len(part) for part in (*parts.values(), bounds)])
        found = dict(zip(parts, numbers, strict=True))
        groups = [
            Group(len(list(same)), length, length - unseen)
            for (length, unseen), same in groupby((len(s.ids), s.unseen_tokens) for s in sequences)
        ]
        return cls(
            ids=found["ids"],
            positions=found["positions"],
            lengths=found["lengths"],
            types=found.get("types"),
            prompts=Skip(found["skipped"], sum(skipped)) if "skipped" in found else None,
            attended=found.get("attended"),
            groups=groups,
            bounds=Bounds(sent[-len(bounds) :], max(int(lengths.max()), rounded - tokens)),
            tokens=tokens,
            sequences=sequences,
        )


def _zero_padded(values: NDArray[Any], rounded: int) -> NDArray[Any]:
    """Append zeros up to a length of `rounded`."""
    filled = np.zeros(rounded, np.int32)
    filled[: len(values)] = values
    return filled


def _round_up(tokens: int) -> int:
    """Round up to one of eight sizes in each octave: at most an eighth more tokens.

    oneDNN compiles and keeps kernels for each matrix size, about 2 MB for each number of tokens. Rounded, there are
    fewer than sixty sizes up to 2048 tokens. perf/NOTES.md has the costs and gains of more sizes.
    """
    step = max(4, 1 << max(0, (tokens - 1).bit_length() - 4))
    return -(-tokens // step) * step
