"""Results: one frozen value for each task."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from staged_pool.runtime.payloads import SparseVector


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that a request used."""

    prompt_tokens: int
    """Tokens that the model read, special tokens included, after truncation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedResult:
    """Vectors of each input, in the order of the inputs. Outputs that were not requested are None."""

    dense: NDArray[np.float32] | None = None
    """[inputs, width or the requested dimensions]."""
    sparse: tuple[SparseVector, ...] | None = None
    multi_vector: tuple[NDArray[np.float32], ...] | None = None
    """[tokens, width] each; [chunks, width] with `chunk_tokens`."""
    token_weights: tuple[NDArray[np.float32], ...] | None = None
    """[tokens] each, without the special tokens at both ends."""
    offsets: tuple[NDArray[np.int32] | None, ...] | None = None
    """[tokens, 2] each: the first character of each token of `multi_vector`, and the one behind its last.

    Both are equal for a token without text of the input, such as [CLS] or one of a prompt. None for an input that is no
    text; None instead of the tuple: not requested. With `chunk_tokens`, those of each chunk.
    """
    chunks: tuple[NDArray[np.int32], ...] | None = None
    """[chunks, 2] each: the first token of each chunk, and the one behind its last. None: without `chunk_tokens`.

    Special tokens count, so the last number is that of all tokens of the input.
    """
    usage: Usage
    model: str
    """Served name of the model."""

    @property
    def embeddings(self) -> NDArray[np.float32]:
        """`dense` if it was requested: [inputs, width].

        Raises:
            ValueError: It was not requested.
        """
        if self.dense is None:
            raise ValueError("dense was not among the requested outputs")
        return self.dense


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifyResult:
    """Scores of each label for each input."""

    scores: NDArray[np.float32]
    """[inputs, labels]: probabilities, or logits if those were requested."""
    labels: tuple[str, ...]
    usage: Usage
    model: str
    logits: NDArray[np.float32] | None = None
    """[inputs, labels]: logits before the activation. None: `scores` are logits, or they are unknown."""

    @property
    def sort_keys(self) -> NDArray[np.float32]:
        """[inputs, labels]: values that order labels as `scores` do, and differ where scores are rounded.

        In float32 a sigmoid is 1 from a logit of 17 on, and a softmax is 0 at 104 below the highest logit.
        """
        return self.scores if self.logits is None else self.logits

    @property
    def best(self) -> NDArray[np.intp]:
        """[inputs]: index of the best label, the first of equal ones."""
        best: NDArray[np.intp] = self.sort_keys.argmax(axis=1)
        return best


@dataclass(frozen=True, slots=True)
class Entity:
    """A span of a text with a label."""

    label: str
    score: float
    """Probability of the label: the average over its tokens."""
    start: int
    """Index of its first character in the text."""
    end: int
    """Index behind its last character."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenClassifyResult:
    """Scores of the labels of each token, and entities."""

    scores: tuple[NDArray[np.float32], ...]
    """[tokens, labels] each: probabilities, or logits if those were requested; special tokens included.

    [steps, labels] from a process reward model, whose last label means that a step is right.
    """
    entities: tuple[tuple[Entity, ...], ...]
    """Entities of each input; none for an input sent as token ids.

    Of a process reward model, each step: the last label and its probability, and the text up to the tag.
    """
    labels: tuple[str, ...]
    usage: Usage
    model: str
    offsets: tuple[NDArray[np.int32] | None, ...] | None = None
    """[tokens, 2] each: the first character of each token or tag, and the one behind its last. None for token ids.

    Both are equal for a token without text of the input, such as [CLS].
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreResult:
    """Scores of each document for its query."""

    scores: NDArray[np.float32]
    """[documents]; higher is better."""
    usage: Usage
    model: str
    logits: NDArray[np.float32] | None = None
    """[documents]: logits before the activation. None: there was no activation, or they are unknown."""

    @property
    def sort_keys(self) -> NDArray[np.float32]:
        """[documents]: values that order documents as `scores` do; see `ClassifyResult.sort_keys`."""
        return self.scores if self.logits is None else self.logits


@dataclass(frozen=True, slots=True)
class Ranked:
    """One document of a ranking."""

    index: int
    """Index of the document in the request."""
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankResult:
    """Documents, the best first; equal ones in the order of the request."""

    ranking: tuple[Ranked, ...]
    usage: Usage
    model: str
