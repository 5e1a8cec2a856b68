"""The model double of all tests: one token a character, and answers that the functions here tell."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from staged_pool.runtime.card import Lane, ModelCard
from staged_pool.runtime.model import ModelInput, Preprocessed
from staged_pool.runtime.payloads import Payload, Pixels, PreparedImage, Row, SparseVector, TokenSequence, Values
from staged_pool.runtime.requests import MODEL_MAX, Chat, Image, ImagePair, Output, PairInput, PluginSource
from staged_pool.runtime.spans import Span
from staged_pool.runtime.statistics import ImageCacheStatistics, ReplicaStatistics
from staged_pool.runtime.tokens import Tokens
from staged_pool.stages.errors import InvalidInput, ModelFailed
from staged_pool.stages.work import Prepared
from tests.support.cards import CARD, LABELS

VECTOR_NUMBERS = 4
"""Numbers of a dense vector that depend on the text; the others are 0."""


def expected(text: str, width: int = VECTOR_NUMBERS) -> NDArray[np.float32]:
    """Return the dense vector of a text: length, sum, first and last letter. It differs for nearly all texts."""
    codes = [ord(letter) for letter in text]
    return np.pad(_floats([len(codes), sum(codes), codes[0], codes[-1]]), (0, max(width - VECTOR_NUMBERS, 0)))


def label_logits(text: str) -> list[float]:
    """Count each label in a text."""
    return [float(text.count(label)) for label in LABELS]


def pair_logit(first: str, second: str) -> float:
    """Count the letters that two texts have in common, less 1."""
    return float(len(set(first) & set(second)) - 1)


def token_logits(text: str) -> list[list[float]]:
    """Return the logits of each letter: -1, 1 for a capital, else 1, -1."""
    return [[-1.0, 1.0] if letter.isupper() else [1.0, -1.0] for letter in text]


def token_vectors(text: str) -> list[list[float]]:
    """Return a vector for each letter: 1, and its code modulo 7."""
    return [[1.0, float(ord(letter) % 7)] for letter in text]


def letter_counts(text: str) -> SparseVector:
    """Count each letter in a text."""
    letters, counts = np.unique([ord(letter) for letter in text], return_counts=True)
    return SparseVector(letters.astype(np.int32), counts.astype(np.float32))


@dataclass
class LetterModel:
    """Model double with all inputs and outputs, whose card names those of the test. Thread-safe; it records its calls.

    It reads images as letters, too: hooks and records have the letters of texts and images alike. A text with "NaN" in
    it fails in the forward.
    """

    card: ModelCard = CARD
    padded: bool = False
    """Batches are padded to their longest input."""
    logit_shift: float = 0.0
    """Number to add to each logit of labels and pairs."""

    on_preprocess: Callable[[Sequence[str]], None] = lambda texts: None
    """Called by each preprocess with the letters of its inputs."""
    on_forward: Callable[[Sequence[str]], None] = lambda texts: None
    """Called by each forward with the letters of its batch."""
    read_image: Callable[[bytes], str] = bytes.decode
    """Returns the letters of an image file, or raises `InvalidInput`."""

    given: list[ModelInput] = field(default_factory=list)
    """Inputs of all calls of preprocess."""
    preprocessed: list[list[str]] = field(default_factory=list)
    """Letters of each call of preprocess."""
    forwarded: list[list[str]] = field(default_factory=list)
    """Letters of each forward."""
    at_once: list[int] = field(default_factory=list)
    """The `at_once` argument of each forward."""
    warmed_up: list[tuple[Lane, str]] = field(default_factory=list)
    """Lane of each warm-up, and the name of its thread."""

    def warm_up(self, lane: Lane) -> None:
        self.warmed_up.append((lane, threading.current_thread().name))

    def release(self) -> None:
        """It has no weights."""

    def pads(self, lane: Lane) -> bool:
        return self.padded

    def preprocess(self, inputs: Sequence[ModelInput]) -> Sequence[Preprocessed]:
        self.given += inputs
        read = [self._read(given) for given in inputs]
        texts = [text for text in read if isinstance(text, str)]
        self.preprocessed.append(texts)
        self.on_preprocess(texts)
        return [
            text if isinstance(text, InvalidInput) else self._prepare(given, text)
            for given, text in zip(inputs, read, strict=True)
        ]

    def forward(self, payloads: Sequence[Payload], at_once: int = 1, /) -> list[Row | ModelFailed]:
        texts = [letters(payload) for payload in payloads]
        self.forwarded.append(texts)
        self.at_once.append(at_once)
        self.on_forward(texts)
        return [
            ModelFailed("NaN") if "NaN" in text else Row(self._values(payload, text), payload)
            for text, payload in zip(texts, payloads, strict=True)
        ]

    def tokenize(self, source: str | Chat, *, add_special_tokens: bool) -> Tokens:
        text = source if isinstance(source, str) else _rendered(source)
        return Tokens([ord(letter) for letter in text], list(text), [(at, at + 1) for at in range(len(text))])

    def detokenize(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(map(chr, ids))

    @property
    def devices(self) -> Sequence[ReplicaStatistics]:
        return []

    @property
    def image_cache(self) -> ImageCacheStatistics | None:
        return None

    def clear_image_cache(self) -> None:
        """Do nothing: there is no cache."""

    def close(self) -> None:
        """Do nothing: there are no processes."""

    def _read(self, given: ModelInput) -> str | InvalidInput:
        """Return all letters of an input, before it is cut."""
        source = given.source
        if given.images:
            try:
                return "".join(self.read_image(cast(bytes, image.source)) for image in given.images)
            except InvalidInput as error:
                return error
        assert not isinstance(source, Image | ImagePair | PluginSource)
        if isinstance(source, PairInput):
            return source.first + source.second
        if isinstance(source.source, Chat):
            return given.prompt + _rendered(source.source)
        return given.prompt + (source.source if isinstance(source.source, str) else "".join(map(chr, source.source)))

    def _prepare(self, given: ModelInput, text: str) -> Prepared[Payload] | InvalidInput:
        if given.lane == "image":
            return _prepared_image(given, text)
        source = given.source
        assert not isinstance(source, Image | ImagePair | PluginSource)
        if source.max_tokens is not None:
            text = text[: self.card.max_tokens if source.max_tokens == MODEL_MAX else source.max_tokens]
        if not text:
            return InvalidInput("The input has no tokens.", param="input")
        if len(text) > self.card.max_tokens:
            return InvalidInput("The input has too many tokens.", param="input")
        sequence = TokenSequence(
            [ord(letter) for letter in text],
            given.outputs,
            first_tokens=len(source.first) if isinstance(source, PairInput) else None,
            spans=tuple(Span(at, at + 1, word=0) for at in range(len(text)))
            if Output.TOKEN_LABELS in given.outputs
            else None,
        )
        return Prepared(sequence, len(text), given.outputs)

    def _values(self, payload: Payload, text: str) -> dict[Output, Values]:
        return {output: self._output(output, payload, text) for output in payload.outputs}

    def _output(self, output: Output, payload: Payload, text: str) -> Values:
        match output:
            case Output.DENSE:
                return expected(text, self.card.width)
            case Output.SPARSE:
                return letter_counts(text)
            case Output.MULTI_VECTOR:
                return _floats(token_vectors(text))
            case Output.TOKEN_LABELS:
                return _floats(token_logits(text))
            case Output.TOKEN_WEIGHTS:
                return _floats([[vector[1]] for vector in token_vectors(text)])
            case Output.LABELS:
                return _floats(self._logits(payload, text)) + np.float32(self.logit_shift)

    def _logits(self, payload: Payload, text: str) -> list[float]:
        if self.card.scoring is None:
            return label_logits(text)
        assert isinstance(payload, TokenSequence)
        assert payload.first_tokens is not None
        return [pair_logit(text[: payload.first_tokens], text[payload.first_tokens :])]


def letters(payload: Payload) -> str:
    """Return the letters of a payload of `LetterModel`."""
    codes = payload.ids if isinstance(payload, TokenSequence) else payload.pixels.values.tolist()
    return "".join(map(chr, codes))


def _prepared_image(given: ModelInput, text: str) -> Prepared[Payload]:
    pixels = Pixels(np.array([ord(letter) for letter in text], dtype=np.uint8))
    return Prepared(PreparedImage(pixels, given.outputs, len(text)), len(text), given.outputs)


def _rendered(chat: Chat) -> str:
    """Return the text of a conversation in the chat template of `LetterModel`."""
    said = "".join(f"<{message['role']}>{message['content']}" for message in chat.messages)
    return said + ("<assistant>" if chat.add_generation_prompt else "")


def _floats(values: ArrayLike) -> NDArray[np.float32]:
    return np.asarray(values, np.float32)
