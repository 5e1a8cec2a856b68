"""Deterministic texts of known token counts, and requests with them.

The words come from Python's own documentation. Only words that are one token are used, so that a text of n words has n
tokens and the special ones. They are in random order: an encoder does the same work for them as for prose.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Final, Literal

from perf.tools.client import post
from staged_pool.runtime.models.folders.resolver import resolve

Shape = Literal["s1", "m8", "x64", "day"]

SHAPES: Final[dict[Shape, str]] = {
    "s1": "1 text of 12 tokens",
    "m8": "8 texts of 64 tokens",
    "x64": "64 texts of 8 to 256 tokens",
    "day": "1 text, 9 of 10 with 8 to 24 tokens, the others with 64 to 256",
}
"""Shapes of requests by name."""

_SEED: Final = 20_240_229
_WORDS: Final = 2000
_LONGEST: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests of one shape, which are sent repeatedly in this order."""

    shape: Shape
    requests: tuple[bytes, ...]
    """Complete requests with their HTTP heads."""
    texts_per_request: int
    mean_tokens: float
    """Mean tokens of a text, special tokens included."""


class TextSource:
    """Makes texts for one model.

    Args:
        model: A folder or hub id, as for the server.
    """

    def __init__(self, model: str | None) -> None:
        from tokenizers import Tokenizer

        self.folder: Path = resolve(model).folder
        self._tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._words = self._whole_words()
        self._special_tokens = self.tokens_of(self._words[0]) - 1

    def tokens_of(self, text: str) -> int:
        """Tokens of a text, special tokens included."""
        return len(self._tokenizer.encode(text).ids)

    def text(self, tokens: int, rng: random.Random) -> str:
        """Return a text of this number of tokens, special tokens included."""
        return " ".join(rng.choices(self._words, k=tokens - self._special_tokens))

    def lists(self, shape: Shape) -> list[list[str]]:
        """The texts of each request of one shape."""
        rng = random.Random(_SEED)
        return [[self.text(tokens, rng) for tokens in lengths] for lengths in _lengths(shape, rng)]

    def equal_lists(self, *, requests: int, texts: int, tokens: int) -> list[list[str]]:
        """Return the texts of each request, all of the same number of tokens."""
        rng = random.Random(_SEED)
        return [[self.text(tokens, rng) for _ in range(texts)] for _ in range(requests)]

    def workload(self, shape: Shape) -> Workload:
        """The requests of one shape."""
        requests = self.lists(shape)
        texts = [text for request in requests for text in request]
        return Workload(
            shape=shape,
            requests=tuple(post("/v1/embeddings", embeddings_body(request)) for request in requests),
            texts_per_request=len(requests[0]),
            mean_tokens=sum(map(self.tokens_of, texts)) / len(texts),
        )

    def _whole_words(self) -> list[str]:
        words = sorted({word for text in topics.values() for word in re.findall(r"\b[a-z]{2,}\b", text)})
        random.Random(_SEED).shuffle(words)
        bare = self._tokenizer.encode_batch(words, add_special_tokens=False)
        return [word for word, encoding in zip(words, bare, strict=True) if len(encoding.ids) == 1][:_WORDS]


def embeddings_body(texts: Iterable[str]) -> bytes:
    """Return the body of a request; base64 is OpenAI's default, and cheap for the client to decode."""
    return json.dumps({"input": list(texts), "encoding_format": "base64"}).encode()


def token_counts(shape: Shape) -> list[list[int]]:
    """Return the tokens of each text of each request of one shape."""
    return _lengths(shape, random.Random(_SEED))


def _lengths(shape: Shape, rng: random.Random) -> list[list[int]]:
    """Return the tokens of each text of each request."""
    if shape == "s1":
        return [[12]] * 256
    if shape == "m8":
        return [[64] * 8] * 64
    if shape == "x64":
        return [[min(max(round(rng.lognormvariate(3.6, 0.8)), 8), _LONGEST) for _ in range(64)] for _ in range(32)]
    return [[rng.randint(8, 24) if place % 10 else rng.randint(64, _LONGEST)] for place in range(500)]
