"""A model of letters with every output, and cards of models with some of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from staged_pool.runtime.model import ModelCard, ModelInput, Payload, Row, Span, SparseVector, TokenSequence, Values
from staged_pool.runtime.requests import Chat, Image, Output, PairInput
from staged_pool.stages.errors import InvalidInput, ModelFailed
from staged_pool.stages.work import Prepared
from tests.doubles import CARD, LetterModel, rendered, sequence, vector

EMBEDDER = replace(
    CARD,
    outputs=(Output.DENSE, Output.SPARSE, Output.MULTI_VECTOR),
    dimensions=(2, 4),
    prompts={"query": "q:", "passage": "p:"},
)
LABELS = ("a", "b", "c")
CLASSIFIER = replace(
    CARD, outputs=(Output.LABELS,), labels=LABELS, activation="softmax", scoring=None, width=0, matryoshka=False
)
CROSS_ENCODER = replace(CLASSIFIER, labels=("",), activation="sigmoid", scoring="cross-encoder")
TAGGER = replace(CLASSIFIER, outputs=(Output.TOKEN_LABELS,), labels=("O", "CAPITAL"))


def label_logits(text: str) -> list[float]:
    """Count each label in a text."""
    return [float(text.count(label)) for label in LABELS]


def pair_logit(first: str, second: str) -> float:
    """Count the letters that two texts have in common, less 1."""
    return float(len(set(first) & set(second)) - 1)


def token_logits(text: str) -> list[list[float]]:
    """Return the logits of each letter: 1, -1 for a capital, else -1, 1."""
    return [[-1.0, 1.0] if letter.isupper() else [1.0, -1.0] for letter in text]


def token_vectors(text: str) -> list[list[float]]:
    """A vector for each letter: [1, its code modulo 7]."""
    return [[1.0, float(ord(letter) % 7)] for letter in text]


def letter_counts(text: str) -> SparseVector:
    """Count each letter in a text."""
    letters, counts = np.unique([ord(letter) for letter in text], return_counts=True)
    return SparseVector(letters.astype(np.int32), counts.astype(np.float32))


@dataclass
class TaskModel(LetterModel):
    """Gives what its card names; the functions of this module say what. A text's tokens are its letters."""

    card: ModelCard = EMBEDDER
    given: list[ModelInput] = field(default_factory=list)
    """Everything that was preprocessed."""

    def preprocess(self, inputs: Sequence[ModelInput]) -> list[Prepared[TokenSequence] | InvalidInput]:
        self.given.extend(inputs)
        return [self._prepare(given) for given in inputs]

    def _prepare(self, given: ModelInput) -> Prepared[TokenSequence] | InvalidInput:
        source, first_tokens = given.source, None
        assert not isinstance(source, Image)
        if isinstance(source, PairInput):
            text, first_tokens = source.first + source.second, len(source.first)
        elif isinstance(source.source, Chat):
            text = rendered(source.source)
        elif isinstance(source.source, str):
            text = given.prompt + source.source
        else:
            text = "".join(map(chr, source.source))
        if source.max_tokens == -1:
            text = text[: self.card.max_tokens]
        if not text or len(text) > self.card.max_tokens:
            return InvalidInput("The input has no tokens, or too many.", param="input")
        spans = tuple(Span(place, place + 1, word=0) for place in range(len(text)))
        sequence = TokenSequence([ord(c) for c in text], given.outputs, first_tokens=first_tokens, spans=spans)
        return Prepared(sequence, len(text), batch_key=given.outputs)

    def forward(self, payloads: Sequence[Payload], at_once: int = 1, /) -> list[Row | ModelFailed]:
        return [
            Row({output: self._values(output, sequence(payload)) for output in payload.outputs}, payload)
            for payload in payloads
        ]

    def _values(self, output: Output, payload: TokenSequence) -> Values:
        text = "".join(map(chr, payload.ids))
        match output:
            case Output.DENSE:
                return vector(payload.ids)
            case Output.SPARSE:
                return letter_counts(text)
            case Output.MULTI_VECTOR:
                return _floats(token_vectors(text))
            case Output.TOKEN_LABELS:
                return _floats(token_logits(text))
            case Output.TOKEN_WEIGHTS:
                return _floats([[vector[1]] for vector in token_vectors(text)])
            case Output.LABELS:
                if self.card.scoring is None:
                    return _floats(label_logits(text))
                assert payload.first_tokens is not None
                return _floats([pair_logit(text[: payload.first_tokens], text[payload.first_tokens :])])


def _floats(values: object) -> NDArray[np.float32]:
    return np.asarray(values, np.float32)
