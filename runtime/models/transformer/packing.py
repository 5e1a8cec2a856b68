"""Lay the sequences of a batch one behind the other, and bring them to the device in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from staged_pool.runtime.model import TokenSequence
from staged_pool.runtime.models.kernels.attention import Bounds
from staged_pool.runtime.models.kernels.encoder_layers import Group
from staged_pool.runtime.models.kernels.transfer import send_arrays


class Skip(NamedTuple):
    """Leading tokens of sequences that pooling leaves out."""

    tokens: Tensor
    """[sequences], int64; fewer than each sequence has."""
    total: int
    """Of all sequences, as the host knows it."""


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
    prompts: Skip | None
    """The prompts that pooling leaves out. A sequence that consists of nothing else is pooled whole. None: none."""
    seen: Tensor | None
    """[sequences], int64: leading tokens of each that its tokens attend to. None: all."""
    groups: Sequence[Group]
    """Of the sequences, without what is behind them."""
    bounds: Bounds
    """Of the sequences, and of what is behind them as one more."""
    tokens: int
    """Of the sequences."""
    sequences: Sequence[TokenSequence]

    @classmethod
    def of(cls, sequences: Sequence[TokenSequence], device: torch.device) -> PackedBatch:
        """Lay the sequences out, and begin one copy to the device.

        Args:
            sequences: At least one.
            device: Where they go.
        """
        lengths = np.fromiter((len(s.ids) for s in sequences), np.int64, len(sequences))
        tokens = int(lengths.sum())
        rounded = _round_up(tokens)
        starts = lengths.cumsum() - lengths
        places = np.arange(tokens) - starts.repeat(lengths)
        ids = np.fromiter(chain.from_iterable(s.ids for s in sequences), np.int32, tokens)
        parts = {"ids": _filled(ids, rounded), "positions": _filled(places, rounded), "lengths": lengths}
        if any(s.first_tokens is not None for s in sequences):
            firsts = [len(s.ids) if s.first_tokens is None else s.first_tokens for s in sequences]
            parts["types"] = _filled(places >= np.repeat(firsts, lengths), rounded)
        skipped = [s.prompt_tokens if s.prompt_tokens < len(s.ids) else 0 for s in sequences]
        if any(skipped):
            parts["skipped"] = np.array(skipped)
        if any(s.unseen_tokens for s in sequences):
            parts["seen"] = lengths - [s.unseen_tokens for s in sequences]
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
            seen=found.get("seen"),
            groups=groups,
            bounds=Bounds(sent[-len(bounds) :], max(int(lengths.max()), rounded - tokens)),
            tokens=tokens,
            sequences=sequences,
        )


def _filled(values: NDArray[Any], rounded: int) -> NDArray[Any]:
    """The same with zeros behind it."""
    filled = np.zeros(rounded, np.int32)
    filled[: len(values)] = values
    return filled


def _round_up(tokens: int) -> int:
    """Round up to one of eight sizes in each octave: at most an eighth more tokens.

    oneDNN makes and keeps kernels for every size of a matrix that it meets, some 2 MB for each number of tokens: there
    are fewer than sixty up to 2048 tokens in this way. perf/NOTES.md has what more sizes would gain and cost.
    """
    step = max(4, 1 << max(0, (tokens - 1).bit_length() - 4))
    return -(-tokens // step) * step
