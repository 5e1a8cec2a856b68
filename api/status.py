"""HTTP statuses and bodies of errors: one table from error class to status."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import orjson

from staged_pool.stages import errors
from staged_pool.stages.exhausted import is_out_of_memory


@dataclass(frozen=True, slots=True)
class Row:
    """Status and names of one class of error over HTTP."""

    status: int
    type: str
    """The `type` in the error body, in the spelling of OpenAI's and vLLM's servers."""
    word: str
    """Name in logs and metrics."""


TABLE: Final[dict[type[BaseException], Row]] = {
    errors.InvalidInput: Row(400, "BadRequestError", "invalid_input"),
    errors.InvalidSetting: Row(400, "BadRequestError", "invalid_input"),
    errors.NoInputs: Row(400, "BadRequestError", "no_inputs"),
    errors.UrlNotAllowed: Row(400, "BadRequestError", "url_not_allowed"),
    errors.UnknownModel: Row(404, "NotFoundError", "unknown_model"),
    errors.TooLarge: Row(413, "RequestTooLargeError", "too_large"),
    errors.UnsupportedMedia: Row(415, "UnsupportedMediaTypeError", "unsupported_image"),
    errors.UnusableMedia: Row(422, "UnprocessableEntityError", "unusable_media"),
    errors.ModelFailed: Row(424, "ModelFailedError", "model_failed"),
    errors.Overloaded: Row(429, "RateLimitError", "overloaded"),
    errors.Abandoned: Row(499, "AbandonedError", "abandoned"),  # for the log only: the client has left
    errors.ScopeEnds: Row(499, "AbandonedError", "abandoned"),  # likewise
    errors.ConfigError: Row(500, "InternalServerError", "misconfigured"),
    errors.StageFailed: Row(500, "InternalServerError", "stage_failed"),
    errors.StagedPoolError: Row(500, "InternalServerError", "failed"),
    errors.Unsupported: Row(501, "NotImplementedError", "unsupported"),
    errors.DeviceLost: Row(503, "ServiceUnavailableError", "device_lost"),
    errors.MediaUnavailable: Row(502, "BadGatewayError", "media_unavailable"),
    errors.EngineStopped: Row(503, "ServiceUnavailableError", "unavailable"),
    errors.OutOfMemory: Row(503, "ServiceUnavailableError", "out_of_memory"),
    errors.MediaTimedOut: Row(504, "TimeoutError", "media_timed_out"),
    errors.DeadlineExceeded: Row(504, "TimeoutError", "deadline_exceeded"),
}
"""Rows by error class. Every class of `stages/errors.py` has a row; other subclasses take their parent's row."""

UNEXPECTED: Final = Row(500, "InternalServerError", "bug")

BAD_FRAMING: Final = Row(400, "BadRequestError", "bad_framing")
UNAUTHORIZED: Final = Row(401, "AuthenticationError", "unauthorized")
NO_ROUTE: Final = Row(404, "NotFoundError", "route")
WRONG_METHOD: Final = Row(405, "MethodNotAllowedError", "method")
SLOW_BODY: Final = Row(408, "TimeoutError", "slow_body")
TOO_MANY_PIECES: Final = Row(400, "BadRequestError", "too_many_pieces")
BODY_TOO_LARGE: Final = Row(413, "RequestTooLargeError", "body_too_large")
TARGET_TOO_LONG: Final = Row(414, "BadRequestError", "target_too_long")
UNSUPPORTED_MEDIA: Final = Row(415, "UnsupportedMediaTypeError", "unsupported_media")
UNSUPPORTED_CODING: Final = Row(415, "UnsupportedMediaTypeError", "unsupported_coding")
BAD_CODING: Final = Row(400, "BadRequestError", "bad_coding")
BODIES_TOO_LARGE: Final = Row(429, "RateLimitError", "bodies_too_large")
HEADERS_TOO_LARGE: Final = Row(431, "HeadersTooLargeError", "headers_too_large")
UNSUPPORTED_FRAMING: Final = Row(501, "NotImplementedError", "unsupported_framing")
UNKNOWN_METHOD: Final = Row(501, "NotImplementedError", "unknown_method")
UNSUPPORTED_VERSION: Final = Row(505, "HTTPVersionNotSupportedError", "unsupported_version")
TOO_MANY_CONNECTIONS: Final = Row(503, "ServiceUnavailableError", "too_many_connections")
TOO_MANY_REQUESTS: Final = Row(503, "ServiceUnavailableError", "too_many_requests")

_DETAILS: Final = {NO_ROUTE: "Not Found", WRONG_METHOD: "Method Not Allowed"}
"""Values of `detail`, the only field in vLLM's answer, which its clients look for."""

RETRY_S: Final[dict[type[BaseException], float]] = {errors.DeviceLost: 10.0, errors.OutOfMemory: 1.0}
"""Seconds until a retry, by classes of errors without a value of their own. A lost device needs a new process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One rejection or failure, ready to be sent."""

    row: Row
    message: str
    param: str | None = None
    index: int | None = None
    """Index of the input at fault; None if it is not about one input."""
    retry_after_s: float | None = None

    @property
    def status(self) -> int:
        return self.row.status

    def fields(self) -> dict[str, object]:
        """Return the fields of the error body. `code` repeats the status, as vLLM's clients expect."""
        error = {"message": self.message, "type": self.row.type, "param": self.param, "code": self.status}
        if self.index is not None:
            error["index"] = self.index
        return {"error": error} | ({"detail": _DETAILS[self.row]} if self.row in _DETAILS else {})

    def body(self) -> bytes:
        """Return the error body as JSON."""
        return orjson.dumps(self.fields())

    def answer(self) -> tuple[int, bytes]:
        """Return the status, and the body in OpenAI's format, the default of all dialects."""
        return self.status, self.body()

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return headers that tell the client how to go on.

        - `Retry-After` if a retry may succeed: whole seconds, rounded up, at least 1.
        - `WWW-Authenticate` for a missing key (RFC 9110, section 11.6.1).
        - `Accept-Encoding` for an unsupported content coding (RFC 9110, section 12.5.3).
        """
        if self.row is UNAUTHORIZED:
            return [(b"www-authenticate", b"Bearer")]
        if self.row is UNSUPPORTED_CODING:
            return [(b"accept-encoding", b"gzip, deflate")]
        if self.retry_after_s is None:
            return []
        seconds = max(1, math.ceil(self.retry_after_s))
        return [(b"retry-after", str(seconds).encode())]


def problem(error: BaseException, words: errors.Words = errors.ENGINE_WORDS) -> Problem:
    """Convert the error that ended a request to a problem, with the caller's field names.

    Messages of this package's own errors are written for callers. Any other error is a bug, whose text may contain
    paths or input, so its message is a general one.
    """
    if isinstance(error, HttpError):
        return error.problem
    if is_out_of_memory(error) and not isinstance(error, errors.StagedPoolError):
        row = TABLE[errors.OutOfMemory]
        return Problem(row=row, message="The server has no memory for this request now", retry_after_s=1.0)
    row = TABLE.get(type(error)) or next((TABLE[cls] for cls in type(error).__mro__ if cls in TABLE), UNEXPECTED)
    if row is UNEXPECTED:
        return Problem(row=row, message="Internal server error")
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is None:
        retry_after_s = RETRY_S.get(type(error))
    message, param = error.in_words(words) if isinstance(error, errors.InvalidInput) else (str(error), None)
    return Problem(
        row=row,
        message=message,
        param=param,
        index=getattr(error, "index", None),
        retry_after_s=retry_after_s,
    )


class HttpError(Exception):
    """Rejection of a request at the level of HTTP, independent of its task."""

    def __init__(self, row: Row, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.problem = Problem(row=row, message=message, retry_after_s=retry_after_s)
