"""Made-up sequences to try a transformer with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from transformers import PreTrainedModel

from staged_pool.runtime.model import TokenSequence
from staged_pool.runtime.models.transformer.rows import token_embedding
from staged_pool.runtime.requests import DENSE_ONLY

_LONGEST_PROBE: Final = 1024
"""Tokens. Where a window is longer, finding it out would take longer than loading the model."""

_SHORTEST_PROBE: Final = 16
"""Tokens of the longest sequence of a probe at least."""

_LIMITS: Final = ("original_max_position_embeddings", "max_position_embeddings")
"""Settings in tokens: what a model computes may change where a sequence is longer."""


class Probes:
    """Makes sequences that a model computes in different ways, as far as its config tells.

    Args:
        model: Its vocabulary and its config are looked at.
        pairs: The model tells the two segments of a pair apart.
        max_tokens: Longest input of the model.
    """

    def __init__(self, model: PreTrainedModel, *, pairs: bool, max_tokens: int) -> None:
        self._vocabulary: int = token_embedding(model).weight.shape[0]
        self._pairs = pairs
        self._max_tokens = max_tokens
        window = getattr(model.config, "sliding_window", None) or 0
        passed = [limit + 16 for limit in _limits(model.config.to_dict()) if limit + 16 <= _LONGEST_PROBE]
        longest = max([_SHORTEST_PROBE, min(window + 16, _LONGEST_PROBE), *passed])
        self._longest = min(longest, max_tokens)
        mask = getattr(model.config, "mask_token_id", None)
        self._mask: int | None = mask if isinstance(mask, int) and 0 <= mask < self._vocabulary else None

    def sequences(self) -> Sequence[TokenSequence]:
        """Neighbours of equal and of different length, the longest of them beyond the limits of the config."""
        lengths = [min(length, self._max_tokens) for length in (5, 5, 1, self._longest, 9)]
        return self.made_up(lengths, np.random.default_rng(0))

    def made_up(self, lengths: Sequence[int], random: np.random.Generator) -> Sequence[TokenSequence]:
        """Random token ids; every other one is a pair where the model tells the two apart."""
        found = []
        for place, length in enumerate(lengths):
            ids: list[int] = random.integers(self._vocabulary, size=length).tolist()
            if self._mask is not None and place % 2 and length > 2:
                ids[1] = self._mask  # some models scale a whole row by how many of these are in it
            first = length // 2 if self._pairs and place % 2 else None
            found.append(TokenSequence(ids, DENSE_ONLY, first_tokens=first))
        return found


def _limits(settings: dict[str, Any]) -> Sequence[int]:
    """The limits in a config, those of its parts included."""
    found: list[int] = []
    for name, value in settings.items():
        if isinstance(value, dict):
            found += _limits(value)
        elif name in _LIMITS and isinstance(value, int) and value > 0:
            found.append(value)
    return found
