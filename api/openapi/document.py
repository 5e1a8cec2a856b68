"""The document `/openapi.json` (OpenAPI 3.1) of the routes that the served models have."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

import orjson

from staged_pool.api.addresses import CANCEL_BATCH, FILE_CONTENT, ONE_BATCH, ONE_FILE
from staged_pool.api.config import MAX_TIMEOUT_S, ServerConfig
from staged_pool.api.keys import OPEN, is_admin
from staged_pool.api.openapi import answers
from staged_pool.api.openapi.admin import ADMIN_OPERATIONS
from staged_pool.api.openapi.batches import BATCH_OPERATIONS
from staged_pool.api.openapi.operations import BINARY, OPERATIONS, TAGS, Operation
from staged_pool.api.openapi.schemas import Schema, components
from staged_pool.runtime.version import VERSION
from staged_pool.stages.scheduling.entries import Priority

ABOUT: Final = (
    "Pooling models: vectors, scores and labels. Fields of bodies that are not named here are ignored. A server that "
    "is overloaded rejects a request at once, with the time after which to retry."
)

MEANINGS: Final[Mapping[int, str]] = {
    400: "The request is invalid; `error.param` and `error.index` name the field and the input.",
    401: "No API key, or an unknown one.",
    404: "No such model.",
    408: "The body did not arrive in time.",
    409: "The state of the file, the batch or the model does not allow this.",
    413: "The body is too large, or has too many inputs or values.",
    414: "The path and the query are too long.",
    415: "The body is not JSON, has a coding other than gzip and deflate, or has an image of an unknown format.",
    422: "An image cannot be decoded; in text-embeddings-inference's routes: the request is invalid.",
    424: "The model's output for an input is not finite; `error.index` names the input.",
    429: "The server is overloaded.",
    431: "The headers are too large.",
    500: "A bug of the server.",
    501: "The model cannot do this.",
    502: "An image cannot be fetched.",
    503: "The server is starting, stopping or broken.",
    504: "The deadline of the request passed, or that of the load.",
    507: "There is no memory for the model.",
}
"""Meaning of every status of an error."""

_ANY_REQUEST: Final = frozenset({400, 401, 404, 408, 413, 414, 415, 429, 431, 500, 503})
_BODY: Final = frozenset({*_ANY_REQUEST, 501})
_TASK: Final = frozenset({*_BODY, 422, 424, 502, 504})
_RETRIED: Final = frozenset({429, 503})

_HEADERS: Final[Schema] = {
    "X-Request-Id": {"description": "Id of the request, or a new one.", "schema": {"type": "string"}}
}
_RETRY_AFTER: Final[Schema] = {
    "Retry-After": {
        "description": "Seconds after which to retry; missing if a retry cannot succeed.",
        "schema": {"type": "integer", "minimum": 1},
    }
}
_SERVER_TIMING: Final[Schema] = {
    "Server-Timing": {"description": "Milliseconds in each stage.", "schema": {"type": "string"}}
}
_REQUEST_ID: Final[Schema] = {
    "name": "X-Request-Id",
    "in": "header",
    "description": "Up to 128 visible ASCII characters, repeated in the answer and in logs.",
    "schema": {"type": "string"},
}
_REQUEST_TIMEOUT: Final[Schema] = {
    "name": "X-Request-Timeout",
    "in": "header",
    "description": "Deadline of the request, in seconds from its arrival.",
    "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TIMEOUT_S, "examples": [30]},
}
_PRIORITY: Final[Schema] = {
    "name": "X-Priority",
    "in": "header",
    "description": "Bulk requests get the device time that interactive ones leave, and at least an eighth of it.",
    "schema": {"enum": list(Priority), "default": Priority.INTERACTIVE},
}
_TRACE: Final[Schema] = {
    "name": "traceparent",
    "in": "header",
    "description": "W3C trace context; logs name the trace of the request.",
    "schema": {"type": "string"},
}
_METADATA: Final[Schema] = {
    "metadata": {
        "description": "For binary answers: a JSON object with the offsets and types of the vectors.",
        "schema": {"type": "string"},
    }
}
_TEI_TIMES: Final[Schema] = {
    **{
        f"x-{name}-time": {
            "description": "Time in milliseconds, for clients of text-embeddings-inference.",
            "schema": {"type": "integer", "minimum": 0},
        }
        for name in ("total", "tokenization", "queue", "inference")
    },
    "x-compute-tokens": {
        "description": "Tokens of all inputs, for clients of text-embeddings-inference.",
        "schema": {"type": "integer", "minimum": 0},
    },
}


_NOT_IN_IDS: Final = str.maketrans("", "", " {}")
_PLACES: Final = re.compile(r"\{(\w+)\}")

_IDS: Final[Mapping[str, str]] = {
    **dict.fromkeys((ONE_FILE, FILE_CONTENT), "Id of a file."),
    **dict.fromkeys((ONE_BATCH, CANCEL_BATCH), "Id of a batch."),
}
"""Meanings of the ids in paths that do not name a model."""

_FORM: Final[Schema] = {
    "type": "object",
    "description": "The fields of the JSON body, each as JSON or as a text. Files are images and videos: inputs.",
    "properties": {
        "input": {"description": "Texts, one a part."},
        "image": {"description": "Image files, or their URLs, one a part."},
        "video": {"description": "Video files, or their URLs, one a part."},
    },
}


_UPLOAD: Final[Schema] = {
    "type": "object",
    "properties": {
        "purpose": {"const": "batch"},
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {"type": "integer"},
    },
    "required": ["purpose", "file"],
}


def document(
    paths: Sequence[str],
    config: ServerConfig,
    mount: str = "",
    more: Mapping[str, Mapping[str, Operation]] | None = None,
) -> bytes:
    """Return the document as JSON.

    It reads source files, so do not call it on the event loop.

    Args:
        paths: Paths of the routes that the served models have.
        config: API keys, and the prefix that a proxy puts before the paths.
        mount: Prefix that a host puts before the paths, if this server is mounted in it.
        more: Operations of further routes by path, which depend on the served pipelines.
    """
    known_paths = {**OPERATIONS, **BATCH_OPERATIONS, **ADMIN_OPERATIONS, **(more or {})}
    operations = [(path, method, operation) for path in paths for method, operation in known_paths[path].items()]
    types = list(dict.fromkeys(kind for _, _, operation in operations for kind in _types(operation)))
    schemas, named = components(types)
    known = dict(zip(types, schemas, strict=True))
    table: dict[str, dict[str, Any]] = {path: {} for path in paths}
    for path, method, operation in operations:
        table[path][method.lower()] = _operation(path, method, operation, known, with_keys=bool(config.api_keys))
    tags = {operation.tag for _, _, operation in operations}
    described: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "staged-pool",
            "version": VERSION,
            "description": ABOUT,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": quote(mount) or config.root_path or "/"}],
        "tags": [{"name": name, "description": text} for name, text in TAGS.items() if name in tags],
        "paths": table,
        "components": {"schemas": named},
    }
    if config.api_keys or config.admin_api_keys:
        described["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    if config.api_keys:
        described["security"] = [{"key": []}]
    return orjson.dumps(described)


def _types(operation: Operation) -> Iterator[Any]:
    yield from (*operation.errors, *operation.body, *operation.answer)
    if operation.unready is not None:
        yield operation.unready


def _any_of(kinds: Sequence[Any], known: Mapping[Any, Schema]) -> Schema:
    return known[kinds[0]] if len(kinds) == 1 else {"anyOf": [known[kind] for kind in kinds]}


def _operation(
    path: str, method: str, operation: Operation, known: Mapping[Any, Schema], *, with_keys: bool
) -> dict[str, Any]:
    needs_key = is_admin(path) or (with_keys and path not in OPEN)
    described: dict[str, Any] = {
        "operationId": f"{method.lower()} {path}".replace("/", "_").translate(_NOT_IN_IDS),
        "summary": operation.summary,
        "tags": [operation.tag],
        "parameters": [*_path_parameters(path), *_parameters(operation)],
        "responses": dict(_responses(operation, known, needs_key=needs_key)),
    }
    if operation.text:
        described["description"] = operation.text
    if with_keys != needs_key:
        described["security"] = [{"key": []}] if needs_key else []
    if operation.body:
        content: dict[str, Any] = {"schema": _any_of(operation.body, known)}
        if operation.examples:
            content["examples"] = {name: {"value": value} for name, value in operation.examples.items()}
        described["requestBody"] = {"required": True, "content": {"application/json": content}}
        if operation.forms:
            described["requestBody"]["content"]["multipart/form-data"] = {"schema": _FORM}
    if operation.uploads:
        described["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": _UPLOAD}}}
    return described


def _path_parameters(path: str) -> Iterator[Schema]:
    for name in _PLACES.findall(path):
        yield {
            "name": name,
            "in": "path",
            "required": True,
            "description": _IDS.get(path, "Served name of a model; slashes may be escaped or not."),
            "schema": {"type": "string"},
        }


def _parameters(operation: Operation) -> Iterator[Schema]:
    yield _REQUEST_ID
    for name, schema in operation.query.items():
        yield {"name": name, "in": "query", "schema": schema}
    if operation.is_task:
        yield from (_REQUEST_TIMEOUT, _PRIORITY, _TRACE)


def _responses(
    operation: Operation, known: Mapping[Any, Schema], *, needs_key: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    answered: dict[str, Any] = {"description": operation.summary, "headers": dict(_HEADERS)}
    if operation.is_task:
        answered["headers"] |= _SERVER_TIMING
        if BINARY[0] in operation.content_types:
            answered["headers"] |= _METADATA
        if answers.TeiError in operation.errors:
            answered["headers"] |= _TEI_TIMES
    content: dict[str, Any] = {}
    if operation.answer:
        content["application/json"] = {"schema": _any_of(operation.answer, known)}
    content |= {kind: {"schema": {"type": "string"}} for kind in operation.content_types}
    if content:
        answered["content"] = content
    yield str(operation.status), answered
    if operation.loads:
        yield "202", answered | {"description": "The operation goes on; GET the model to follow it."}
    for code in sorted(_statuses(operation) - {operation.status}):
        if code == 401 and not needs_key:
            continue
        is_unready = code == 503 and operation.unready is not None
        schema = known[operation.unready] if is_unready else _any_of(operation.errors, known)
        rejected = {
            "description": MEANINGS[code],
            "headers": {**_HEADERS, **_RETRY_AFTER} if code in _RETRIED else _HEADERS,
            "content": {"application/json": {"schema": schema}},
        }
        if code == 401 and "text/html" in operation.content_types:  # the page itself asks for the key
            rejected["content"] = content
        yield str(code), rejected


def _statuses(operation: Operation) -> frozenset[int]:
    found = _TASK if operation.is_task else _BODY if operation.body else _ANY_REQUEST
    if operation.conflicts:
        found |= {409}
    if operation.loads:
        found |= {504, 507}
    return found | {422} if answers.TeiError in operation.errors else found
