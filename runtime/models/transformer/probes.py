"""Test sequences for the checks of a transformer at load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from transformers import PreTrainedModel

from staged_pool.runtime.models.transformer.rows import token_embedding
from staged_pool.runtime.payloads import TokenSequence
from staged_pool.runtime.requests import DENSE_ONLY

_LONGEST_PROBE: Final = 1024
"""Longest test sequence, in tokens. With a longer one, the checks would take longer than the load."""

_SHORTEST_PROBE: Final = 16
"""Lower bound on the longest sequence of a probe, in tokens."""

_LIMITS: Final = ("original_max_position_embeddings", "max_position_embeddings")
"""Settings in tokens; a model may compute longer sequences in another way."""


class Probes:
    """Test sequences that cover the different ways in which a model computes.

    Args:
        model: Model to test, for its vocabulary and config.
        pairs: The model distinguishes the two segments of a pair.
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
        """Make sequences of equal and different lengths, the longest beyond the limits of the config."""
        lengths = [min(length, self._max_tokens) for length in (5, 5, 1, self._longest, 9)]
        return self.random_sequences(lengths, np.random.default_rng(0))

    def random_sequences(self, lengths: Sequence[int], random: np.random.Generator) -> Sequence[TokenSequence]:
        """Make sequences of random token ids; every other one is a pair, if the model distinguishes segments."""
        found = []
        for place, length in enumerate(lengths):
            ids: list[int] = random.integers(self._vocabulary, size=length).tolist()
            if self._mask is not None and place % 2 and length > 2:
                ids[1] = self._mask  # some models scale a whole row by its number of mask tokens
            first = length // 2 if self._pairs and place % 2 else None
            found.append(TokenSequence(ids, DENSE_ONLY, first_tokens=first))
        return found


def _limits(settings: dict[str, Any]) -> Sequence[int]:
    """Collect the limits of a config and of its nested configs."""
    found: list[int] = []
    for name, value in settings.items():
        if isinstance(value, dict):
            found += _limits(value)
        elif name in _LIMITS and isinstance(value, int) and value > 0:
            found.append(value)
    return found
