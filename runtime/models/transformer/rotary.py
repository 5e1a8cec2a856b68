"""Rotary frequencies chosen for each sequence by its own length.

With `dynamic` and `longrope` the frequencies depend on the number of tokens. transformers takes the highest position
of a whole call for it, and keeps what it computed for the next call. Here every sequence gets the frequencies that it
gets in a call of its own, in a module without memory.
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
"""Parts of the names of rope types whose frequencies depend on the number of tokens."""

_MAXIMA: Final = ("original_max_position_embeddings", "max_position_embeddings")
"""Settings that say up to how many tokens the frequencies are those of a short sequence."""


class _Run(NamedTuple):
    """Neighbours in a batch that get their frequencies in one call."""

    sequences: int
    longest: int
    """Tokens of the longest of them."""
    tokens: int
    """Tokens of all of them."""


class _Sequences(threading.local):
    """The sequences of the forward that the calling thread runs."""

    groups: Sequence[Group] | None = None
    """In the order of the batch. None: not known, and each row is taken as one sequence."""
    packed: bool = False
    """All lie in one row. False: each has a row of its own, filled up to the longest."""


class PerSequenceRotary(nn.Module):
    """Cosines and sines of a rotary module, computed for each sequence as if it were alone.

    Any thread may call it: each call runs on a fresh copy of the module's state, so nothing stays behind.

    Args:
        rotary: The module of transformers that it stands for, before its first forward.
        short: Sequences of up to so many tokens share their frequencies, and a call.
        sequences: The sequences of the running forward.
    """

    def __init__(self, rotary: nn.Module, short: int, sequences: _Sequences) -> None:
        super().__init__()
        self.rotary = rotary
        self._short = short
        self._sequences = sequences

    def forward(self, x: Tensor, position_ids: Tensor, *others: Any, **settings: Any) -> Any:
        """[..., rows, tokens] positions -> what `rotary` gives: [..., rows, tokens, width] each."""

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
        """Equal sequences that are neighbours, and neighbours that are all short."""
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
    """As `compute`, of sequences that lie one behind the other in one row."""
    return _joined([compute(part) for part in positions.split_with_sizes([run.tokens for run in runs], dim=-1)], -2)


def _padded(compute: Callable[[Tensor], Any], positions: Tensor, runs: Sequence[_Run]) -> Any:
    """As `compute`, of rows that are filled up: what stands behind a sequence has no say, and gets zeros."""
    longest = positions.shape[-1]
    rows = sum(run.sequences for run in runs)
    if positions.shape[-2] != rows:
        positions = positions.expand(*positions.shape[:-2], rows, longest)
    split = positions.split_with_sizes([run.sequences for run in runs], dim=-2)
    parts = [_filled(compute(part[..., : run.longest]), longest) for run, part in zip(runs, split, strict=True)]
    return _joined(parts, -3)


def per_sequence_rotary(model: nn.Module) -> SequenceLengths | None:
    """Give each sequence of a batch its own frequencies, where a model's rope type makes them depend on its length.

    Args:
        model: Before its first forward. Its rotary modules are replaced.

    Returns:
        What has to be told the sequences of each forward; None where no frequency depends on a length.

    Raises:
        ConfigError: The model computes such frequencies from something else than positions.
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
                " it in a way that is not known here: batches would give other vectors than single texts"
            )
        setattr(parent, name, PerSequenceRotary(child, _short(child), sequences))
    return SequenceLengths(sequences) if places else None


class SequenceLengths:
    """Tells the rotary modules of a model which sequences the calling thread runs."""

    def __init__(self, sequences: _Sequences) -> None:
        self._sequences = sequences

    @contextmanager
    def of(self, groups: Sequence[Group], *, packed: bool) -> Iterator[None]:
        """A block that runs one forward of these sequences, in one row or each in a row of its own."""
        self._sequences.groups, self._sequences.packed = groups, packed
        try:
            yield
        finally:
            self._sequences.groups = None


def _by_length(module: nn.Module) -> Sequence[str]:
    """The rope types of a rotary module that depend on the number of tokens."""
    found = getattr(module, "rope_type", None)
    kinds = found.values() if isinstance(found, dict) else [found]
    return [kind for kind in kinds if isinstance(kind, str) and any(part in kind for part in _BY_LENGTH)]


def _short(rotary: nn.Module) -> int:
    """Up to how many tokens the frequencies are those of any short sequence; 0 where that is not known."""
    config = getattr(rotary, "config", None)
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    said = [getattr(rotary, "original_max_seq_len", None), getattr(rotary, "max_seq_len_cached", None)]
    for name in _MAXIMA:
        said += [getattr(config, name, None), *(one.get(name) for one in (parameters, *nested))]
    return min((int(value) for value in said if isinstance(value, int) and value > 0), default=0)


def _fresh(module: nn.Module) -> nn.Module:
    """A copy in the state that the module was loaded in: the original is never run, so it stays there."""
    one = copy.copy(module)
    one._buffers = {name: None if value is None else value.clone() for name, value in module._buffers.items()}
    return one


def _filled(found: Any, tokens: int) -> Any:
    """[..., rows, up to `tokens`, width] each, with zeros up to `tokens`."""
    if isinstance(found, Tensor):
        return F.pad(found, (0, 0, 0, tokens - found.shape[-2]))
    return tuple(_filled(values, tokens) for values in found)


def _joined(parts: Sequence[Any], dim: int) -> Any:
    if isinstance(parts[0], Tensor):
        return torch.cat([*parts], dim=dim)
    return tuple(torch.cat(values, dim=dim) for values in zip(*parts, strict=True))
