"""Bodies of the routes of pipelines: the fields of a request, and the outcomes of its items."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, Final

import msgspec

from staged_pool.api.status import problem
from staged_pool.api.wire import json_decode
from staged_pool.api.wire.chunked_json import Pieces, dump, pieces_of
from staged_pool.api.wire.exchange import Body, usage_fields
from staged_pool.api.wire.parts import FIELDS, ContentPart, document
from staged_pool.api.wire.user_values import write_value
from staged_pool.runtime.pipelines.items import ItemError, Outcome, PipelineResult
from staged_pool.runtime.results import Usage
from staged_pool.stages.errors import StageFailed
from staged_pool.stages.foreign_json import MOST_DEPTH

_FIELDS: Final = msgspec.json.Decoder(dict[str, Any])
_PARTS: Final = frozenset({"type", "uuid", *FIELDS})
"""Fields of a text or an image as a part of a message."""


def read_request(body: Body) -> Mapping[str, object]:
    """Return the fields of a request. A part of a message in a field becomes its text, its image, or both in one.

    Raises:
        InvalidInput: The body is no JSON object, or an image in it is wrong.
    """
    given = json_decode.decode(_FIELDS, body, most_depth=MOST_DEPTH)
    return {name: _content(value, name) for name, value in given.items()}


def _content(value: object, where: str, index: int | None = None) -> object:
    if isinstance(value, list) and index is None:
        return [_content(entry, f"{where}[{place}]", place) for place, entry in enumerate(value)]
    if isinstance(value, dict) and value and value.keys() <= _PARTS and value.keys() & {*FIELDS}:
        default = next(name for name in FIELDS if name in value)
        return document(msgspec.convert(value, ContentPart).read(where, index, default=default))
    return value


def encode_result(result: PipelineResult, *, pipeline: str, request_id: str) -> Pieces:
    """Write the answer: items and errors in their order."""
    return write_value(
        lambda: {
            **_head(pipeline, request_id),
            "items": [_outcome(item) for item in result.items],
            "errors": [_outcome(error) for error in result.errors],
            "usage": usage_fields(result.usage),
        },
        partial(_failure, pipeline),
    )


def encode_lines(outcomes: Iterable[Outcome], *, pipeline: str) -> bytes:
    """Write a line for each outcome."""
    lines = (write_value(partial(_outcome, outcome), partial(_failure, pipeline)) for outcome in outcomes)
    return b"".join(piece for line in lines for piece in (*pieces_of(line), b"\n"))


def encode_last(tokens: int, *, pipeline: str, request_id: str) -> bytes:
    """Write the line after all outcomes, without its newline."""
    return dump({**_head(pipeline, request_id), "usage": usage_fields(Usage(tokens))})


def timing(stage_s: Mapping[str, float]) -> bytes:
    """Write the value of `Server-Timing`: the longest time of an item in each stage."""
    return ", ".join(f"{name};dur={round(seconds * 1e3, 3):g}" for name, seconds in stage_s.items()).encode()


def _head(pipeline: str, request_id: str) -> dict[str, object]:
    return {
        "id": f"pipe-{request_id}",
        "object": "pipeline.result",
        "created": int(time.time()),
        "pipeline": pipeline,
    }


def _outcome(outcome: Outcome) -> dict[str, object]:
    place: dict[str, object] = {"index": outcome.index}
    if outcome.parts:
        place["parts"] = list(outcome.parts)
    if isinstance(outcome, ItemError):
        return {**place, "stage": outcome.stage, **problem(outcome.error).fields()}
    return {**place, "value": _plain(outcome.value)}


def _plain(value: object) -> object:
    """Return a value for JSON: fields of a dataclass that are None are left out."""
    if is_dataclass(value) and not isinstance(value, type):
        named = ((each.name, getattr(value, each.name)) for each in fields(value))
        return {name: _plain(given) for name, given in named if given is not None}
    if isinstance(value, Mapping):
        return {str(name): _plain(given) for name, given in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(given) for given in value]
    return value


def _failure(pipeline: str, fault: str) -> StageFailed:
    return StageFailed(f"The output of the pipeline `{pipeline}` {fault}.", stage="output")
