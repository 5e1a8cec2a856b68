"""One HTTP request for a task of the engine: its body is read in parse, its answer is written in postprocess."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar

from staged_pool.api.wire import extract_images, forms, json_decode
from staged_pool.api.wire.chunked_json import Pieces, dump_around
from staged_pool.api.wire.json_bounds import UNLIMITED, Limits
from staged_pool.runtime.model import ModelCard
from staged_pool.runtime.results import Usage
from staged_pool.stages.errors import ENGINE_WORDS, Words
from staged_pool.stages.work import Request

Body: TypeAlias = bytes | bytearray
W = TypeVar("W")

JSON: Final = b"application/json"


@dataclass(frozen=True, slots=True)
class Written:
    """An answer that is not only JSON."""

    content: Pieces
    content_type: bytes = JSON
    headers: tuple[tuple[bytes, bytes], ...] = ()


class Write(Protocol):
    """Writes the answer of one request."""

    def __call__(self, result: Any, /, *, request_id: str, created: int) -> Pieces | Written:
        """Args:
        result: Of the request's task.
        request_id: Becomes part of the answer's `id`.
        created: Seconds since 1970.
        """
        ...


Read: TypeAlias = Callable[[Body, ModelCard], tuple[Request, Write]]
"""Reads the body of a request to a model. Raises `InvalidInput`, which says what is wrong and what would be right.

The second value holds what the answer needs of the request and the engine has no use for.
"""


class Received(Generic[W]):
    """One HTTP request until it is answered. The body is let go once decoded.

    Args:
        read: Of the request's route.
        body: As received.
        card: Of the served model.
        request_id: Becomes part of the answer's `id`.
        limits: What the request may hold.
        boundary: Of a form. None: the body is JSON.
        placed: The path names the model; what the body says of it does not count.
    """

    __slots__ = ("_body", "_boundary", "_card", "_limits", "_placed", "_read", "_request_id", "_writer", "words")

    def __init__(
        self,
        read: Callable[[Body, ModelCard], tuple[Request, W]],
        body: Body,
        card: ModelCard,
        request_id: str,
        limits: Limits = UNLIMITED,
        *,
        boundary: bytes | None = None,
        placed: bool = False,
    ) -> None:
        self._placed = placed
        self._read = read
        self._body = body
        self._boundary = boundary
        self._card = card
        self._request_id = request_id
        self._limits = limits
        self._writer: W | None = None
        self.words: Words = ENGINE_WORDS
        """The caller's names for the fields of the request, once it is decoded."""

    def decode(self) -> Request:
        """The request, once. Runs in the parse stage."""
        body, self._body = self._body, b""
        with json_decode.at_most(self._limits.items):
            if self._boundary is None:
                request, self._writer = extract_images.read_json(self._read_json, body)
            else:
                form = forms.read_form(body, self._boundary, self._limits)
                request, self._writer = extract_images.read_marked(self._read_json, form)
        self.words = request.words
        return replace(request, model=None) if self._placed else request

    def _read_json(self, body: Body) -> tuple[Request, W]:
        return self._read(body, self._card)

    @property
    def writer(self) -> W:
        """What writes its answer."""
        if self._writer is None:
            raise RuntimeError("a request is decoded before it is answered")
        return self._writer


class Exchange(Received[Write]):
    """What `Engine.submit` is given for one HTTP request."""

    __slots__ = ()

    def encode(self, result: object) -> Written:
        """The answer. Runs in the postprocess stage."""
        written = self.writer(result, request_id=self._request_id, created=int(time.time()))
        return written if isinstance(written, Written) else Written(written)


def with_request_id(write: Write, request_id: str | None) -> Write:
    """The same, with the id that the body of the request asks for, if it does."""
    if request_id is None:
        return write

    def write_named(result: Any, /, *, request_id: str, created: int) -> Pieces | Written:
        return write(result, request_id=own, created=created)

    own = request_id
    return write_named


def listing(
    kind: str,
    data: Iterable[Mapping[str, object]],
    *,
    model: str,
    usage: Usage,
    request_id: str,
    created: int,
    item_values: int = 1,
    **others: object,
) -> Pieces:
    """The answer of a task that has one object for each input, as OpenAI's and vLLM's clients expect it.

    Args:
        kind: What the answer's `id` begins with.
        data: The objects; made as they are written.
        model: The served name.
        usage: What the request cost.
        request_id: The rest of the `id`.
        created: Seconds since 1970.
        item_values: About how many numbers each of the objects has.
        others: Further fields of the answer.
    """
    before = {"id": f"{kind}-{request_id}", "object": "list", "created": created, "model": model}
    return dump_around(before, "data", data, {"usage": usage_fields(usage), **others}, item_values=item_values)


def usage_fields(usage: Usage) -> dict[str, int | None]:
    """`usage` of an answer; nothing is completed here."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }
