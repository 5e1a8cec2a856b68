"""What a call raises: the errors of the engine where the server says which, and those that only a client can have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from staged_pool.client.batches import Stretch
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
    """Base of what goes wrong between a client and a server, whatever was asked."""


class ConnectionFailed(ClientError):
    """There is no server at this address, or the connection ended before the answer did."""


class Unauthorized(ClientError):
    """The server wants another key than the client has, or any at all."""


class BadAnswer(ClientError):
    """The answer is not what a server of this package sends: another service, or another version."""


class ServerFailed(ClientError):
    """The server, or something in front of it, answered with an error that has no class of its own.

    Args:
        message: What it said.
        status: The HTTP status.
    """

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class Problem(msgspec.Struct, kw_only=True):
    """What an error object says."""

    message: str = ""
    param: str | None = None
    index: int | None = None
    code: int | str | None = None
    is_route: bool = False
    """The route is what is not there, as a `detail` beside the object says."""


class _Body(msgspec.Struct):
    """The error bodies of the dialects: an object, or a text."""

    error: Problem | str | None = None
    detail: object = None
    message: str | None = None


_BODY: Final = msgspec.json.Decoder(_Body)

RETRY_AFTER_S: Final = 1.0
"""Of a rejection that does not say when to come back."""

_WITH_INPUT: Final[Mapping[int, type[InvalidInput]]] = {
    400: InvalidInput,
    404: UnknownModel,
    413: TooLarge,
    415: UnsupportedMedia,
    422: UnusableMedia,
}
_OTHERS: Final[Mapping[int, Callable[[Problem, float | None], StagedPoolError]]] = {
    424: lambda said, after_s: ModelFailed(said.message, index=said.index),
    429: lambda said, after_s: Overloaded(said.message, retry_after_s=RETRY_AFTER_S if after_s is None else after_s),
    501: lambda said, after_s: Unsupported(said.message),
    502: lambda said, after_s: MediaUnavailable(said.message, index=said.index),
    503: lambda said, after_s: EngineStopped(said.message, retry_after_s=RETRY_AFTER_S if after_s is None else after_s),
    504: lambda said, after_s: DeadlineExceeded(said.message, stage="server"),
}


def error_of(status: int, body: bytes, retry_after_s: float | None = None) -> StagedPoolError:
    """What an answer means that is not a result.

    Args:
        status: Of HTTP.
        body: The error object of any dialect; or anything else, which a proxy may have written.
        retry_after_s: What the answer's `Retry-After` says, in seconds.
    """
    said, ours = _said(body)
    if not said.message:
        said.message = f"The server answered with status {status} and no reason"
    if status in (401, 403):
        return Unauthorized(said.message)
    if status == 404 and ours and said.is_route:
        return Unsupported(said.message)
    if status == 404 and not ours:
        return Unsupported(
            "The server has no such route: it is another service or version, or its model has no such task"
        )
    if status == 502 and not ours:
        return ServerFailed("A proxy before the server could not reach it", status=status)
    if status in _WITH_INPUT:
        return _WITH_INPUT[status](said.message, param=said.param, index=said.index)
    if status in _OTHERS:
        return _OTHERS[status](said, retry_after_s)
    return ServerFailed(said.message, status=status)


def problem_error(said: Problem) -> StagedPoolError:
    """What the error object in a line of a stream means."""
    status = said.code if isinstance(said.code, int) else 500
    return error_of(status, msgspec.json.encode({"error": said}))


def _said(body: bytes) -> tuple[Problem, bool]:
    """What a body says, and whether it holds an error object."""
    try:
        found = _BODY.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Problem(), False
    if isinstance(found.error, Problem):
        found.error.is_route = found.detail == "Not Found"
        return found.error, True
    for text in (found.error, found.message, found.detail):
        if isinstance(text, str):
            return Problem(message=shortened(text)), False
    return Problem(), False


def located(error: StagedPoolError, stretch: Stretch, total: int) -> StagedPoolError:
    """The same error of a call that was sent in batches: says which inputs failed, and counts as the caller does.

    Args:
        error: Of a request that held the inputs of `stretch`.
        stretch: See `error`.
        total: Inputs of the call.
    """
    if stretch.count == total:
        return error
    message = f"Inputs {stretch.first} to {stretch.last - 1} of {total}: {error}"
    if isinstance(error, InvalidInput | ModelFailed | MediaUnavailable) and error.index is not None:
        error.index += stretch.first
        message += f" (input {error.index} of the call)"
    error.args = (message, *error.args[1:])
    return error
