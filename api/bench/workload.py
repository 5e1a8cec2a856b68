"""Requests of a load: bodies of the standard routes with made-up inputs."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, Protocol

import numpy as np
import orjson

from staged_pool.api.bench.connection import post, with_body
from staged_pool.api.bench.images import ImageMaker
from staged_pool.api.bench.sizes import ImageSize, Kind, Range
from staged_pool.api.bench.texts import TextMaker, TokenRate, in_turn

PATHS: Final[Mapping[Kind, str]] = {"texts": "/v1/embeddings", "images": "/v1/embeddings", "rerank": "/v1/rerank"}
"""Route of each kind, as OpenAI, vLLM and Jina have it."""

QUERY_WORDS: Final = 8
"""Words of the query of a ranking."""


_TOKENS: Final = Range(64, 64)
_ONE: Final = Range(1, 1)


@dataclass(frozen=True, slots=True)
class Made:
    """One request, ready to be sent."""

    content: bytes
    """The whole request, with its head."""
    kind: Kind
    items: int
    """Texts, images or documents."""


class Maker(Protocol):
    """Makes the requests of a load, one after another."""

    def __call__(self) -> Made:
        """Make the next request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Server side of the requests: address, key, model and routes."""

    authority: str
    prefix: str = ""
    api_key: str | None = None
    model: str | None = None
    """Name that each request has; None: none."""
    path: str | None = None
    """Path of the route, where the server has another than `PATHS`."""
    encoding_format: str | None = None
    """Format of vectors that embeddings ask for; None: the server's."""

    def head(self, kind: Kind, *headers: str) -> bytes:
        """Return the head of requests of a kind."""
        return post(self.authority, self.prefix + self.path_of(kind), self.api_key, *headers)

    def path_of(self, kind: Kind) -> str:
        """Return the path of a kind."""
        return self.path or PATHS[kind]

    def body(self, kind: Kind, inputs: Mapping[str, Any]) -> bytes:
        """Return the JSON of a request."""
        model = {} if self.model is None else {"model": self.model}
        known = kind != "rerank" and self.encoding_format is not None
        return orjson.dumps({**model, **inputs, **({"encoding_format": self.encoding_format} if known else {})})


def texts_body(texts: Sequence[str]) -> Mapping[str, Any]:
    """Return the inputs of a request to embed texts."""
    return {"input": texts if len(texts) > 1 else texts[0]}


def image_body(url: str) -> Mapping[str, Any]:
    """Return the inputs of a request to embed an image, as vLLM has them."""
    return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}


def rerank_body(query: str, documents: Sequence[str]) -> Mapping[str, Any]:
    """Return the inputs of a request to rank documents."""
    return {"query": query, "documents": documents}


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Kinds and sizes of the inputs."""

    mix: Mapping[Kind, float]
    """Share of each kind; they add up to 1."""
    tokens: Range = _TOKENS
    """Tokens of a text, or of a query and a document together."""
    texts_per_request: Range = _ONE
    documents: int = 10
    """Documents of a ranking."""
    image_size: ImageSize | None = None
    lines: Sequence[str] | None = None
    """Texts of the user, in place of made-up ones."""

    def __str__(self) -> str:
        parts = []
        for kind, share in self.mix.items():
            of = f"{share:.0%} " if len(self.mix) > 1 else ""
            lengths = f"of {self.tokens} tokens" if self.lines is None else "from the file"
            match kind:
                case "texts":
                    parts.append(f"{of}{self.texts_per_request} text(s) {lengths}")
                case "images":
                    parts.append(f"{of}one image of {self.image_size}")
                case "rerank":
                    parts.append(f"{of}a query with {self.documents} documents {lengths}")
        return ", ".join(parts)


class MixedMaker:
    """Makes requests of several kinds, by chance.

    Args:
        target: Server side of the requests.
        inputs: Kinds and sizes.
        rates: Tokens of a word, by kind.
        rng: Source of randomness.
    """

    def __init__(
        self, target: Target, inputs: Inputs, rates: Mapping[Kind, TokenRate], rng: np.random.Generator
    ) -> None:
        self._target = target
        self._inputs = inputs
        self._rng = rng
        self._heads = {kind: target.head(kind) for kind in inputs.mix}
        self._kinds = list(inputs.mix)
        self._bounds = list(accumulate(inputs.mix.values()))[:-1]
        taken = None if inputs.lines is None else in_turn(inputs.lines)
        self._texts: dict[Kind, Callable[[int], str]] = {
            kind: taken or TextMaker(rng, rates.get(kind, TokenRate())) for kind in self._kinds
        }
        self._queries = taken or TextMaker(rng, TokenRate())
        self._images = ImageMaker(rng)
        if inputs.image_size is not None:
            self._images.draw(inputs.image_size)

    def __call__(self) -> Made:
        """See `Maker`."""
        kind = self._kinds[bisect(self._bounds, self._rng.random())] if self._bounds else self._kinds[0]
        return self.one(kind)

    def one(self, kind: Kind) -> Made:
        """Make a request of this kind."""
        inputs, items = self._inputs, 1
        if kind == "texts":
            items = inputs.texts_per_request.draw(self._rng)
            body = texts_body([self._text(kind) for _ in range(items)])
        elif kind == "images":
            assert inputs.image_size is not None, "the flags are checked"
            body = image_body(self._images(inputs.image_size))
        else:
            items = inputs.documents
            body = rerank_body(self._queries(QUERY_WORDS), [self._text(kind) for _ in range(items)])
        return Made(with_body(self._heads[kind], self._target.body(kind, body)), kind, items)

    def _text(self, kind: Kind) -> str:
        return self._texts[kind](self._inputs.tokens.draw(self._rng))
