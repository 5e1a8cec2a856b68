"""The description of one method of one path, and short ways to write it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from staged_pool.api.openapi import answers

Tag: TypeAlias = Literal["Vectors", "Scores", "Labels", "Tokens", "Models", "Server"]

TAGS: Final[Mapping[Tag, str]] = {
    "Vectors": "Texts, token ids or conversations to vectors.",
    "Scores": "How well documents answer a query.",
    "Labels": "Labels of texts, and of what is in them.",
    "Tokens": "Texts to token ids, and back.",
    "Models": "What is served.",
    "Server": "How the server is.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path."""

    summary: str
    tag: Tag
    text: str = ""
    """What else there is to know."""
    body: Sequence[Any] = ()
    """What a JSON body is read as: one of these. A route that has one is POST."""
    answer: Sequence[Any] = ()
    """What the answer of status 200 is, as JSON: one of these."""
    content_types: Sequence[str] = ()
    """Of answers that are no JSON."""
    errors: Sequence[Any] = (answers.Error,)
    """What the answer to a request that failed is: one of these."""
    status: int = 200
    """Of an answer to a request that did not fail."""
    examples: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Bodies, by what they show. Each is answered with `status` by any model that has the route."""
    forms: bool = False
    """Whether the body may also be a form, with files for images."""
    is_task: bool = False
    """Whether it goes through the four stages, and may fail in all the ways that they may."""
    unready: Any = None
    """What the answer of status 503 is, where it is no error object."""


BYTES: Final = ("application/octet-stream", "application/vnd.staged-pool.embeddings")
LINES: Final = "application/x-ndjson"
TEI: Final = (answers.TeiError,)
BOTH: Final = (answers.Error, answers.TeiError)
SHARED: Final = (answers.SharedError,)
PLAIN: Final = (answers.PlainError,)


def post(summary: str, tag: Tag, body: Any, answer: Any, text: str = "", **more: Any) -> Mapping[str, Operation]:
    bodies = body if isinstance(body, tuple) else (body,)
    found = answer if isinstance(answer, tuple) else (answer,)
    return {"POST": Operation(summary=summary, tag=tag, text=text, body=bodies, answer=found, **more)}


def task(summary: str, tag: Tag, body: Any, answer: Any, text: str = "", **more: Any) -> Mapping[str, Operation]:
    return post(summary, tag, body, answer, text, is_task=True, **more)


def get(summary: str, tag: Tag = "Server", answer: Any = None, text: str = "", **more: Any) -> Mapping[str, Operation]:
    found = () if answer is None else (answer,)
    return {"GET": Operation(summary=summary, tag=tag, answer=found, text=text, **more)}
