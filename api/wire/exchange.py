"""One HTTP request for a task of the engine: its body is read in parse, its answer is written in postprocess."""

from __future__ import annotations

import binascii
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, Protocol, TypeAlias

import numpy as np
import orjson
from numpy.typing import NDArray

from staged_pool.runtime.model import ModelCard
from staged_pool.runtime.results import Usage
from staged_pool.stages.work import Request

Body: TypeAlias = bytes | bytearray
EncodingFormat: TypeAlias = Literal["float", "base64"]

_OPTIONS: Final = orjson.OPT_SERIALIZE_NUMPY


class Write(Protocol):
    """Writes the answer of one request."""

    def __call__(self, result: Any, /, *, request_id: str, created: int) -> bytes:
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


class Exchange:
    """What `Engine.submit` is given for one HTTP request. The body is let go once decoded.

    Args:
        read: Of the request's route.
        body: As received.
        card: Of the served model.
        request_id: Becomes part of the answer's `id`.
    """

    __slots__ = ("_body", "_card", "_read", "_request_id", "_write")

    def __init__(self, read: Read, body: Body, card: ModelCard, request_id: str) -> None:
        self._read = read
        self._body = body
        self._card = card
        self._request_id = request_id
        self._write: Write | None = None

    def decode(self) -> Request:
        """The request, once. Runs in the parse stage."""
        body, self._body = self._body, b""
        request, self._write = self._read(body, self._card)
        return request

    def encode(self, result: object) -> bytes:
        """The answer. Runs in the postprocess stage."""
        if self._write is None:
            raise RuntimeError("a request is decoded before it is answered")
        return self._write(result, request_id=self._request_id, created=int(time.time()))


def dump(answer: Mapping[str, object]) -> bytes:
    """JSON of an answer; arrays become lists of numbers, each the shortest that reads back as the same float32."""
    return orjson.dumps(answer, option=_OPTIONS)


def listing(
    kind: str,
    data: Sequence[Mapping[str, object]],
    *,
    model: str,
    usage: Usage,
    request_id: str,
    created: int,
    **others: object,
) -> bytes:
    """The answer of a task that has one object for each input, as OpenAI's and vLLM's clients expect it.

    Args:
        kind: What the answer's `id` begins with.
        data: The objects.
        model: The served name.
        usage: What the request cost.
        request_id: The rest of the `id`.
        created: Seconds since 1970.
        others: Further fields of the answer.
    """
    return dump(
        {
            "id": f"{kind}-{request_id}",
            "object": "list",
            "created": created,
            "model": model,
            "data": data,
            "usage": usage_fields(usage),
            **others,
        }
    )


def usage_fields(usage: Usage) -> dict[str, int | None]:
    """`usage` of an answer; nothing is completed here."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


def values(array: NDArray[Any], encoding: EncodingFormat) -> NDArray[Any] | str:
    """An array as `dump` can write it.

    Args:
        array: Of any shape.
        encoding: `float`: JSON numbers, in lists of that shape. `base64`: the values one after the other, four bytes
            each (float32 or int32), the lowest byte first.
    """
    wanted = "<i4" if array.dtype.kind in "iu" else "<f4"
    laid_out = np.ascontiguousarray(array, dtype=wanted)
    if encoding == "float":
        return laid_out
    return binascii.b2a_base64(laid_out.tobytes(), newline=False).decode("ascii")
