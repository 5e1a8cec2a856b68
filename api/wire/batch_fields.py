"""Fields of OpenAI's files and batches in requests: bodies, forms and queries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal, TypeAlias
from urllib.parse import parse_qs

import msgspec

from staged_pool.api.wire import json_decode
from staged_pool.api.wire.exchange import Body
from staged_pool.stages.errors import InvalidInput

LEAST_KEPT_S: Final = 3600
MOST_KEPT_S: Final = 30 * 86_400
"""Range of the seconds that a file is kept, as at OpenAI."""

_Seconds: TypeAlias = Annotated[int, msgspec.Meta(ge=LEAST_KEPT_S, le=MOST_KEPT_S)]
_Key: TypeAlias = Annotated[str, msgspec.Meta(max_length=64)]
_Value: TypeAlias = Annotated[str, msgspec.Meta(max_length=512)]


class ExpiresAfter(msgspec.Struct):
    """Time that a file is kept."""

    anchor: Literal["created_at"]
    seconds: _Seconds


class BatchBody(msgspec.Struct):
    """Body of `POST /v1/batches`; fields that are not named here are ignored."""

    input_file_id: str
    """Id of a file with the purpose batch."""
    endpoint: str
    """Path of all requests of the batch, such as /v1/embeddings."""
    completion_window: str = "24h"
    """Time for the batch: a number of s, m, h or d, up to 7 days. The rest expires then."""
    metadata: Annotated[dict[_Key, _Value], msgspec.Meta(max_length=16)] | None = None
    """Up to 16 texts by name, which are returned with the batch."""
    output_expires_after: ExpiresAfter | None = None
    """Time that the output is kept; 30 days by default."""


_BATCH: Final = msgspec.json.Decoder(BatchBody)


def decode_batch(body: Body) -> BatchBody:
    """Read a request for a batch.

    Raises:
        InvalidInput: A field is missing or wrong.
    """
    return json_decode.decode(_BATCH, body)


def kept_s(fields: Mapping[str, str], default: int) -> int:
    """Return the seconds that an uploaded file is kept, by the fields of its form.

    Raises:
        InvalidInput: `expires_after[anchor]` or `expires_after[seconds]` is missing or wrong.
    """
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return default
    if anchor != "created_at":
        raise InvalidInput("expires_after[anchor]: expected created_at", param="expires_after[anchor]")
    return _number("expires_after[seconds]", seconds or "", LEAST_KEPT_S, MOST_KEPT_S)


class Page(msgspec.Struct, frozen=True):
    """The part of a list that a query asks for."""

    limit: int
    after: str | None
    newest_first: bool
    purpose: str | None


def read_page(query: bytes, *, most: int, default: int) -> Page:
    """Read the query of a list; fields that are not named here are ignored.

    Args:
        query: Query of the target, without its question mark.
        most: Maximum of `limit`.
        default: Value of `limit` if it is not given.

    Raises:
        InvalidInput: A field is wrong.
    """
    given = {name: values[-1] for name, values in parse_qs(query.decode("latin-1")).items()}
    order = given.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidInput("order: expected asc or desc", param="order")
    limit = _number("limit", given.get("limit", str(default)), 1, most)
    return Page(limit, given.get("after"), order == "desc", given.get("purpose"))


def _number(name: str, text: str, low: int, high: int) -> int:
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 18 else -1
    if not low <= number <= high:
        raise InvalidInput(f"{name}: expected a whole number from {low} to {high}", param=name)
    return number
