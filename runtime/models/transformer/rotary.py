"""Rotary frequencies for each sequence of a batch, by its own length.

With the rope types `dynamic` and `longrope` the frequencies depend on the number of tokens. transformers uses the
highest position of a whole call, and keeps the result for the next call. Here each sequence gets the frequencies of a
call of its own, and nothing is kept.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from staged_pool.runtime.models.kernels.encoder_layers import Group
from staged_pool.stages.errors import ConfigError

_BY_LENGTH: Final = ("dynamic", "longrope")
"""Parts of the names of rope types with frequencies by the number of tokens."""

_MAXIMA: Final = ("original_max_position_embeddings", "max_position_embeddings")
"""Settings with the largest number of tokens of a short sequence; see `_short_tokens`."""


class _Run(NamedTuple):
    """Neighbours in a batch that share one call for their frequencies."""

    sequences: int
    longest: int
    """Tokens of the longest sequence."""
    tokens: int
    """Tokens of all sequences."""


class _Sequences(threading.local):
    """Sequences of the forward that the calling thread runs."""

    groups: Sequence[Group] | None = None
    """Sequences in the order of the batch. None: unknown; each row counts as one sequence."""
    packed: bool = False
    """All sequences are in one row. False: each has a row of its own, padded to the longest."""


class PerSequenceRotary(nn.Module):
    """Rotary module that computes each sequence as if it were alone.

    Thread-safe: each call runs a fresh copy of the module, so no call changes the next.

    Args:
        rotary: Module of transformers that this one replaces, before its first forward.
        short: Longest sequence, in tokens, with the frequencies of short sequences. Short neighbours share a call.
        sequences: Sequences of the running forward.
    """

    def __init__(self, rotary: nn.Module, short: int, sequences: _Sequences) -> None:
        super().__init__()
        self.rotary = rotary
        self._short = short
        self._sequences = sequences

    def forward(self, x: Tensor, position_ids: Tensor, *others: Any, **settings: Any) -> Any:
        """Compute what `rotary` does: positions [..., rows, tokens] -> [..., rows, tokens, width] each."""

        def compute(positions: Tensor) -> Any:
            return _fresh(self.rotary)(x, positions, *others, **settings)

        groups = self._sequences.groups
        if groups is None:
            return compute(position_ids)
        runs = self._runs(groups)
        if self._sequences.packed:
            return _packed(compute, position_ids, runs)
        return _padded(compute, position_ids, runs)

    def _runs(self, groups: Sequence[Group]) -> Sequence[_Run]:
        """Group neighbours of equal length, and neighbours that are all short."""
        runs: list[_Run] = []
        for group in groups:
            tokens = group.sequences * group.tokens
            last = runs[-1] if runs else None
            if last is not None and max(group.tokens, last.longest) <= self._short:
                longest = max(group.tokens, last.longest)
                runs[-1] = _Run(last.sequences + group.sequences, longest, last.tokens + tokens)
            else:
                runs.append(_Run(group.sequences, group.tokens, tokens))
        return runs


def _packed(compute: Callable[[Tensor], Any], positions: Tensor, runs: Sequence[_Run]) -> Any:
    """Apply `compute` to sequences that are packed in one row."""
    return _joined([compute(part) for part in positions.split_with_sizes([run.tokens for run in runs], dim=-1)], -2)


def _padded(compute: Callable[[Tensor], Any], positions: Tensor, runs: Sequence[_Run]) -> Any:
    """Apply `compute` to padded rows; padding is left out, and gets zeros."""
    longest = positions.shape[-1]
    rows = sum(run.sequences for run in runs)
    if positions.shape[-2] != rows:
        positions = positions.expand(*positions.shape[:-2], rows, longest)
    split = positions.split_with_sizes([run.sequences for run in runs], dim=-2)
    parts = [_zero_padded(compute(part[..., : run.longest]), longest) for run, part in zip(runs, split, strict=True)]
    return _joined(parts, -3)


def per_sequence_rotary(model: nn.Module) -> SequenceLengths | None:
    """Replace the rotary modules with frequencies that depend on the length of a sequence.

    Args:
        model: Before its first forward.

    Returns:
        Setter for the sequences of each forward; None where no frequency depends on a length.

    Raises:
        ConfigError: The model does not compute such frequencies from positions.
    """
    sequences = _Sequences()
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if not isinstance(parent, PerSequenceRotary) and _by_length(child)
    ]
    for parent, name, child in places:
        if "position_ids" not in inspect.signature(child.forward).parameters:
            kinds = ", ".join(_by_length(child))
            raise ConfigError(
                f"config.json: rope_type={kinds!r} depends on the length of a text, and {type(child).__name__} computes"
                " it in an unknown way: a batch would give other vectors than single texts"
            )
        setattr(parent, name, PerSequenceRotary(child, _short_tokens(child), sequences))
    return SequenceLengths(sequences) if places else None


class SequenceLengths:
    """Setter for the sequences that the rotary modules of a model compute, for each thread."""

    def __init__(self, sequences: _Sequences) -> None:
        self._sequences = sequences

    @contextmanager
    def set(self, groups: Sequence[Group], *, packed: bool) -> Iterator[None]:
        """Open a block that runs one forward of these sequences, packed or one a row."""
        self._sequences.groups, self._sequences.packed = groups, packed
        try:
            yield
        finally:
            self._sequences.groups = None


def _by_length(module: nn.Module) -> Sequence[str]:
    """Return the rope types of a rotary module that depend on the number of tokens."""
    found = getattr(module, "rope_type", None)
    kinds = found.values() if isinstance(found, dict) else [found]
    return [kind for kind in kinds if isinstance(kind, str) and any(part in kind for part in _BY_LENGTH)]


def _short_tokens(rotary: nn.Module) -> int:
    """Return the longest sequence, in tokens, with the frequencies of short sequences; 0 if unknown."""
    config = getattr(rotary, "config", None)
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    limits = [getattr(rotary, "original_max_seq_len", None), getattr(rotary, "max_seq_len_cached", None)]
    for name in _MAXIMA:
        limits += [getattr(config, name, None), *(settings.get(name) for settings in (parameters, *nested))]
    return min((int(value) for value in limits if isinstance(value, int) and value > 0), default=0)


def _fresh(module: nn.Module) -> nn.Module:
    """Copy a module as it was loaded; the original keeps that state because it never runs."""
    fresh = copy.copy(module)
    fresh._buffers = {name: None if value is None else value.clone() for name, value in module._buffers.items()}
    return fresh


def _zero_padded(found: Any, tokens: int) -> Any:
    """Pad each tensor, [..., rows, tokens, width], with zeros to `tokens`."""
    if isinstance(found, Tensor):
        return F.pad(found, (0, 0, 0, tokens - found.shape[-2]))
    return tuple(_zero_padded(values, tokens) for values in found)


def _joined(parts: Sequence[Any], dim: int) -> Any:
    if isinstance(parts[0], Tensor):
        return torch.cat([*parts], dim=dim)
    return tuple(torch.cat(values, dim=dim) for values in zip(*parts, strict=True))
