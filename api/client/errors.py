"""Errors of calls: the engine's, as the server reports them, and those of clients alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from staged_pool.stages import foreign_json
from staged_pool.stages.errors import (
    DeadlineExceeded,
    EngineStopped,
    InvalidInput,
    MediaUnavailable,
    ModelFailed,
    Overloaded,
    StagedPoolError,
    TooLarge,
    UnknownModel,
    Unsupported,
    UnsupportedMedia,
    UnusableMedia,
    shortened,
)


class ClientError(StagedPoolError):
    """Base class of errors between a client and a server."""


class ConnectionFailed(ClientError):
    """No server answers at this address, or the connection ended too early."""


class Unauthorized(ClientError):
    """The server requires an API key, or another one."""


class BadAnswer(ClientError):
    """The answer is not one of this package's server: it is another service or version."""


class ServerFailed(ClientError):
    """The server, or a proxy in front of it, answered with an unknown error.

    Args:
        message: The message of the answer.
        status: The HTTP status.
    """

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class ErrorObject(msgspec.Struct, kw_only=True):
    """Error object of an answer."""

    message: str = ""
    param: str | None = None
    index: int | None = None
    code: int | str | None = None
    is_route: bool = False
    """The route does not exist: the body has `"detail": "Not Found"`."""


class _Body(msgspec.Struct):
    """Error body of any dialect: an object, or a text."""

    error: ErrorObject | str | None = None
    detail: object = None
    message: str | None = None


_BODY: Final = msgspec.json.Decoder(_Body)

RETRY_AFTER_S: Final = 1.0
"""Pause after a rejection without `Retry-After`, in seconds."""

_WITH_INPUT: Final[Mapping[int, type[InvalidInput]]] = {
    400: InvalidInput,
    404: UnknownModel,
    413: TooLarge,
    415: UnsupportedMedia,
    422: UnusableMedia,
}
_OTHERS: Final[Mapping[int, Callable[[ErrorObject, float | None], StagedPoolError]]] = {
    424: lambda error, after_s: ModelFailed(error.message, index=error.index),
    429: lambda error, after_s: Overloaded(error.message, retry_after_s=RETRY_AFTER_S if after_s is None else after_s),
    501: lambda error, after_s: Unsupported(error.message),
    502: lambda error, after_s: MediaUnavailable(error.message, index=error.index),
    503: lambda error, after_s: EngineStopped(
        error.message, retry_after_s=RETRY_AFTER_S if after_s is None else after_s
    ),
    504: lambda error, after_s: DeadlineExceeded(error.message, stage="server"),
}


def error_of(status: int, body: bytes, retry_after_s: float | None = None, location: str = "") -> StagedPoolError:
    """Return the error of an answer that is not a result.

    Args:
        status: HTTP status.
        body: Error object of any dialect, or anything else that a proxy has written.
        retry_after_s: `Retry-After` of the answer, in seconds.
        location: Address that a redirect leads to.
    """
    if 300 <= status < 400:  # a key is not for other servers
        to = f" to {shortened(location)}" if location else ""
        message = f"The server answered with a redirect{to} (status {status}), which is not followed; ask that address"
        return ServerFailed(message, status=status)
    error, ours = _read_error(body)
    if not error.message:
        error.message = f"The server answered with status {status} and no reason"
    if status in (401, 403):
        return Unauthorized(error.message)
    if status == 404 and ours and error.is_route:
        return Unsupported(error.message)
    if status == 404 and not ours:
        return Unsupported(
            "The server does not have this route: it is another service or version, or its model has no such task"
        )
    if status == 502 and not ours:
        return ServerFailed("A proxy in front of the server could not reach it", status=status)
    if status in _WITH_INPUT:
        return _WITH_INPUT[status](error.message, param=error.param, index=error.index)
    if status in _OTHERS:
        return _OTHERS[status](error, retry_after_s)
    return ServerFailed(error.message, status=status)


def error_of_object(error: ErrorObject) -> StagedPoolError:
    """Return the error of an error object in a line of a stream."""
    status = error.code if isinstance(error.code, int) else 500
    return error_of(status, msgspec.json.encode({"error": error}))


def _read_error(body: bytes) -> tuple[ErrorObject, bool]:
    """Read the error of a body; True if the body has an error object."""
    try:
        found = foreign_json.decode(body, _BODY.decode)
    except (msgspec.DecodeError, foreign_json.BadJson):
        return ErrorObject(), False
    if isinstance(found.error, ErrorObject):
        found.error.is_route = found.detail == "Not Found"
        return found.error, True
    for text in (found.error, found.message, found.detail):
        if isinstance(text, str):
            return ErrorObject(message=shortened(text)), False
    return ErrorObject(), False
