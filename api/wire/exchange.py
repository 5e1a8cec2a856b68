"""One HTTP request for a task of the engine: its body is read in parse, its answer is written in postprocess."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar

from staged_pool.api.wire import body_fields, extract_images, forms, json_decode
from staged_pool.api.wire.chunked_json import Pieces, dump_around
from staged_pool.api.wire.json_bounds import UNLIMITED, BodyLimits
from staged_pool.runtime.card import ModelCard
from staged_pool.runtime.requests import EmbedRequest
from staged_pool.runtime.results import Usage
from staged_pool.stages.errors import ENGINE_WORDS, Words
from staged_pool.stages.work import Request

Body: TypeAlias = bytes | bytearray
W = TypeVar("W")

JSON: Final = b"application/json"


@dataclass(frozen=True, slots=True)
class Written:
    """Answer with a content type and headers."""

    content: Pieces
    content_type: bytes = JSON
    headers: tuple[tuple[bytes, bytes], ...] = ()


class Write(Protocol):
    """Function that writes the answer of one request."""

    def __call__(self, result: Any, /, *, request_id: str, created: int) -> Pieces | Written:
        """Args:
        result: Result of the request's task.
        request_id: Part of the answer's `id`.
        created: Seconds since 1970.
        """
        ...


Read: TypeAlias = Callable[[Body, ModelCard], tuple[Request, Write]]
"""Function that reads the body of a request to a model; returns the request, and the function that writes its answer.

The second one keeps the fields that only the answer needs. A body that is wrong raises `InvalidInput`: its message
names the field, the problem, and what would be right.
"""


class Received(Generic[W]):
    """One HTTP request until it is answered; the body is freed once it is decoded.

    Args:
        read: Reader of the request's route.
        body: The body as received.
        card: Description of the served model.
        request_id: Part of the answer's `id`.
        limits: Limits on the values of the body.
        boundary: Boundary of a form. None: the body is JSON.
        placed: The path names the model, so the body's `model` is ignored.
    """

    __slots__ = (
        "_body",
        "_boundary",
        "_card",
        "_limits",
        "_placed",
        "_read",
        "_request_id",
        "_writer",
        "dimensions",
        "headers",
        "words",
    )

    def __init__(
        self,
        read: Callable[[Body, ModelCard], tuple[Request, W]],
        body: Body,
        card: ModelCard,
        request_id: str,
        limits: BodyLimits = UNLIMITED,
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
        """The caller's names of the request's fields, set by `decode`."""
        self.dimensions: int | None = None
        """Numbers of a vector that the caller asks for, set by `decode`. None: all."""
        self.headers: tuple[tuple[bytes, bytes], ...] = ()
        """Headers of the answer that tell of the body, set by `decode`."""

    def decode(self) -> Request:
        """Decode the body; call it once. Runs in the parse stage."""
        body, self._body = self._body, b""
        with json_decode.at_most(self._limits.items), body_fields.noting() as ignored:
            if self._boundary is None:
                request, self._writer = extract_images.read_json(self._read_json, body)
            else:
                form = forms.read_form(body, self._boundary, self._limits)
                request, self._writer = extract_images.read_marked(self._read_json, form)
        self.words, self.headers = request.words, body_fields.headers_of(ignored)
        if isinstance(request, EmbedRequest):
            self.dimensions = request.dimensions
        return replace(request, model=None) if self._placed else request

    def _read_json(self, body: Body) -> tuple[Request, W]:
        return self._read(body, self._card)

    @property
    def writer(self) -> W:
        """Writer of the answer, set by `decode`."""
        if self._writer is None:
            raise RuntimeError("a request is decoded before it is answered")
        return self._writer


class Exchange(Received[Write]):
    """Argument of `Engine.submit` for one HTTP request: decodes the body, encodes the answer."""

    __slots__ = ()

    def encode(self, result: object) -> Written:
        """Encode the answer. Runs in the postprocess stage."""
        written = self.writer(result, request_id=self._request_id, created=int(time.time()))
        if not isinstance(written, Written):
            return Written(written, headers=self.headers)
        return replace(written, headers=written.headers + self.headers) if self.headers else written


def with_request_id(write: Write, request_id: str | None) -> Write:
    """Wrap a writer to use the id from the request's body; None keeps it as it is."""
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
    """Write an answer with one object for each input, in OpenAI's and vLLM's form.

    Args:
        kind: Prefix of the answer's `id`.
        data: The objects; consumed while they are written.
        model: The served name.
        usage: Token counts of the request.
        request_id: The rest of the `id`.
        created: Seconds since 1970.
        item_values: Approximate number of values in each object.
        others: Additional fields of the answer.
    """
    before = {"id": f"{kind}-{request_id}", "object": "list", "created": created, "model": model}
    return dump_around(before, "data", data, {"usage": usage_fields(usage), **others}, item_values=item_values)


def usage_fields(usage: Usage) -> dict[str, int | None]:
    """Return the `usage` of an answer; pooling models complete no tokens."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }
