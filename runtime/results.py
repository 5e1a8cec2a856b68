"""What a caller gets: one frozen value a task."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from staged_pool.runtime.model import SparseVector


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost."""

    prompt_tokens: int
    """Tokens that the model read, special tokens included, after truncation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedResult:
    """Vectors of each input, in the order of the inputs; None for an output that was not asked for."""

    dense: NDArray[np.float32] | None = None
    """[inputs, width or the dimensions asked for]."""
    sparse: tuple[SparseVector, ...] | None = None
    multi_vector: tuple[NDArray[np.float32], ...] | None = None
    """[tokens, width] each."""
    token_weights: tuple[NDArray[np.float32], ...] | None = None
    """[tokens] each, without the special tokens at both ends."""
    usage: Usage
    model: str
    """The served name."""

    @property
    def embeddings(self) -> NDArray[np.float32]:
        """`dense`, where it was asked for: [inputs, width].

        Raises:
            ValueError: It was not.
        """
        if self.dense is None:
            raise ValueError("dense was not among the outputs that were asked for")
        return self.dense


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifyResult:
    """How well each label fits each input."""

    scores: NDArray[np.float32]
    """[inputs, labels]: probabilities, or logits where those were asked for."""
    labels: tuple[str, ...]
    usage: Usage
    model: str
    logits: NDArray[np.float32] | None = None
    """[inputs, labels]: what an activation made `scores` of. None: `scores` are logits, or these are not known."""

    @property
    def sort_keys(self) -> NDArray[np.float32]:
        """[inputs, labels]: values that order labels as `scores` do, and tell equal scores apart.

        In float32 a sigmoid is 1 from a logit of 17 on, and a softmax 0 where a logit is 104 below the highest.
        """
        return self.scores if self.logits is None else self.logits

    @property
    def best(self) -> NDArray[np.intp]:
        """[inputs]: the place of the label that fits best, the first of equal ones."""
        best: NDArray[np.intp] = self.sort_keys.argmax(axis=1)
        return best


@dataclass(frozen=True, slots=True)
class Entity:
    """A stretch of a text that has a label."""

    label: str
    score: float
    """Probability of the label; the average over its tokens where there are several."""
    start: int
    """In characters of the text."""
    end: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenClassifyResult:
    """The labels of the tokens of each input, and the entities that they spell."""

    scores: tuple[NDArray[np.float32], ...]
    """[tokens, labels] each: probabilities, or logits where those were asked for; special tokens included."""
    entities: tuple[tuple[Entity, ...], ...]
    """Of each input; empty ones where it was sent as token ids."""
    labels: tuple[str, ...]
    usage: Usage
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreResult:
    """How well each document answers its query."""

    scores: NDArray[np.float32]
    """[documents]; higher is better."""
    usage: Usage
    model: str
    logits: NDArray[np.float32] | None = None
    """[documents]: what an activation made `scores` of. None: there was no activation, or these are not known."""

    @property
    def sort_keys(self) -> NDArray[np.float32]:
        """[documents]: values that order documents as `scores` do, and tell equal scores apart: see
        `ClassifyResult.sort_keys`."""
        return self.scores if self.logits is None else self.logits


@dataclass(frozen=True, slots=True)
class Ranked:
    """One document of a ranking."""

    index: int
    """Of the documents as they were sent."""
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankResult:
    """Documents, the best first; equal ones in the order in which they were sent."""

    ranking: tuple[Ranked, ...]
    usage: Usage
    model: str
