"""Description of one method of one path, and functions to write it briefly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from staged_pool.api.openapi import answers

Tag: TypeAlias = Literal["Vectors", "Scores", "Labels", "Tokens", "Batches", "Models", "Server"]

TAGS: Final[Mapping[Tag, str]] = {
    "Vectors": "Texts, token ids or conversations to vectors.",
    "Scores": "Scores of documents for a query.",
    "Labels": "Labels of texts, and entities in them.",
    "Tokens": "Texts to token ids, and back.",
    "Batches": "Files of requests, which run when the server has time.",
    "Models": "The served models.",
    "Server": "The state of the server.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path."""

    summary: str
    tag: Tag
    text: str = ""
    """Description, in addition to the summary."""
    body: Sequence[Any] = ()
    """Types of a JSON body, of which it has one; only for POST."""
    answer: Sequence[Any] = ()
    """Types of a JSON answer without an error, of which it has one."""
    content_types: Sequence[str] = ()
    """Content types of answers that are not JSON."""
    errors: Sequence[Any] = (answers.Error,)
    """Types of the answer to a request that failed, of which it has one."""
    status: int = 200
    """Status of an answer without an error."""
    examples: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Example bodies by name; a model that has the route answers each with `status`.

    Those with `candidate_labels` need a classifier of natural language inference.
    """
    forms: bool = False
    """The body may also be a form, with files for images."""
    query: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """Schemas of the parameters of its query by name."""
    conflicts: bool = False
    """The state of an object may not allow it."""
    loads: bool = False
    """The answer may come before the end, and there may be no memory."""
    uploads: bool = False
    """The body is a form with one file, which is stored."""
    is_task: bool = False
    """The request goes through the four stages, and may have all of their errors."""
    unready: Any = None
    """Type of the answer of status 503, if it is not an error object."""


BINARY: Final = ("application/octet-stream", "application/vnd.staged-pool.embeddings")
NDJSON: Final = "application/x-ndjson"
TEI: Final = (answers.TeiError,)
BOTH: Final = (answers.Error, answers.TeiError)
SHARED_ERROR: Final = (answers.SharedError,)
PLAIN_ERROR: Final = (answers.PlainError,)


def post(summary: str, tag: Tag, body: Any, answer: Any, text: str = "", **more: Any) -> Mapping[str, Operation]:
    bodies = body if isinstance(body, tuple) else (body,)
    found = answer if isinstance(answer, tuple) else (answer,)
    return {"POST": Operation(summary=summary, tag=tag, text=text, body=bodies, answer=found, **more)}


def task(summary: str, tag: Tag, body: Any, answer: Any, text: str = "", **more: Any) -> Mapping[str, Operation]:
    return post(summary, tag, body, answer, text, is_task=True, **more)


def get(summary: str, tag: Tag = "Server", answer: Any = None, text: str = "", **more: Any) -> Mapping[str, Operation]:
    found = () if answer is None else (answer,)
    return {"GET": Operation(summary=summary, tag=tag, answer=found, text=text, **more)}
