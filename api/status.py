"""HTTP statuses and bodies of errors: one table from error class to status."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import orjson

from staged_pool.stages import errors
from staged_pool.stages.exhausted import is_out_of_memory


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """Status and names of one kind of error over HTTP."""

    status: int
    type: str
    """The `type` in the error body, in the spelling of OpenAI's and vLLM's servers."""
    word: str
    """Name in logs and metrics."""


TABLE: Final[dict[type[BaseException], ErrorKind]] = {
    errors.InvalidInput: ErrorKind(400, "BadRequestError", "invalid_input"),
    errors.InvalidSetting: ErrorKind(400, "BadRequestError", "invalid_input"),
    errors.InvalidArgument: ErrorKind(400, "BadRequestError", "invalid_input"),
    errors.NoInputs: ErrorKind(400, "BadRequestError", "no_inputs"),
    errors.UrlNotAllowed: ErrorKind(400, "BadRequestError", "url_not_allowed"),
    errors.UnknownModel: ErrorKind(404, "NotFoundError", "unknown_model"),
    errors.TooLarge: ErrorKind(413, "RequestTooLargeError", "too_large"),
    errors.UnsupportedMedia: ErrorKind(415, "UnsupportedMediaTypeError", "unsupported_image"),
    errors.UnusableMedia: ErrorKind(422, "UnprocessableEntityError", "unusable_media"),
    errors.ModelFailed: ErrorKind(424, "ModelFailedError", "model_failed"),
    errors.Overloaded: ErrorKind(429, "RateLimitError", "overloaded"),
    errors.Abandoned: ErrorKind(499, "AbandonedError", "abandoned"),  # for the log only: the client has left
    errors.PluginFailed: ErrorKind(500, "InternalServerError", "plugin_failed"),
    errors.ScopeEnds: ErrorKind(499, "AbandonedError", "abandoned"),  # likewise
    errors.ConfigError: ErrorKind(500, "InternalServerError", "misconfigured"),
    errors.StageFailed: ErrorKind(500, "InternalServerError", "stage_failed"),
    errors.StagedPoolError: ErrorKind(500, "InternalServerError", "failed"),
    errors.Unsupported: ErrorKind(501, "NotImplementedError", "unsupported"),
    errors.DeviceLost: ErrorKind(503, "ServiceUnavailableError", "device_lost"),
    errors.MediaUnavailable: ErrorKind(502, "BadGatewayError", "media_unavailable"),
    errors.EngineStopped: ErrorKind(503, "ServiceUnavailableError", "unavailable"),
    errors.OutOfMemory: ErrorKind(503, "ServiceUnavailableError", "out_of_memory"),
    errors.MediaTimedOut: ErrorKind(504, "TimeoutError", "media_timed_out"),
    errors.DeadlineExceeded: ErrorKind(504, "TimeoutError", "deadline_exceeded"),
}
"""Kinds by error class. Every class of `stages/errors.py` has one; other subclasses take that of their parent."""

UNEXPECTED: Final = ErrorKind(500, "InternalServerError", "bug")

BAD_FRAMING: Final = ErrorKind(400, "BadRequestError", "bad_framing")
UNAUTHORIZED: Final = ErrorKind(401, "AuthenticationError", "unauthorized")
NO_ROUTE: Final = ErrorKind(404, "NotFoundError", "route")
WRONG_METHOD: Final = ErrorKind(405, "MethodNotAllowedError", "method")
NO_OBJECT: Final = ErrorKind(404, "NotFoundError", "no_object")
IN_USE: Final = ErrorKind(409, "ConflictError", "in_use")
LOAD_TIMED_OUT: Final = ErrorKind(504, "TimeoutError", "load_timed_out")
NO_MEMORY: Final = ErrorKind(507, "InsufficientStorageError", "no_memory")
TOO_MANY_BATCHES: Final = ErrorKind(429, "RateLimitError", "too_many_batches")
STORAGE_FULL: Final = ErrorKind(413, "RequestTooLargeError", "storage_full")
SLOW_BODY: Final = ErrorKind(408, "TimeoutError", "slow_body")
TOO_MANY_PIECES: Final = ErrorKind(400, "BadRequestError", "too_many_pieces")
BODY_TOO_LARGE: Final = ErrorKind(413, "RequestTooLargeError", "body_too_large")
TARGET_TOO_LONG: Final = ErrorKind(414, "BadRequestError", "target_too_long")
UNSUPPORTED_MEDIA: Final = ErrorKind(415, "UnsupportedMediaTypeError", "unsupported_media")
UNSUPPORTED_CODING: Final = ErrorKind(415, "UnsupportedMediaTypeError", "unsupported_coding")
BAD_CODING: Final = ErrorKind(400, "BadRequestError", "bad_coding")
BODIES_TOO_LARGE: Final = ErrorKind(429, "RateLimitError", "bodies_too_large")
HEADERS_TOO_LARGE: Final = ErrorKind(431, "HeadersTooLargeError", "headers_too_large")
UNSUPPORTED_FRAMING: Final = ErrorKind(501, "NotImplementedError", "unsupported_framing")
UNKNOWN_METHOD: Final = ErrorKind(501, "NotImplementedError", "unknown_method")
UNSUPPORTED_VERSION: Final = ErrorKind(505, "HTTPVersionNotSupportedError", "unsupported_version")
TOO_MANY_CONNECTIONS: Final = ErrorKind(503, "ServiceUnavailableError", "too_many_connections")
TOO_MANY_REQUESTS: Final = ErrorKind(503, "ServiceUnavailableError", "too_many_requests")

_DETAILS: Final = {NO_ROUTE: "Not Found", WRONG_METHOD: "Method Not Allowed"}
"""Values of `detail`, the only field in vLLM's answer, which its clients look for."""

RETRY_S: Final[dict[type[BaseException], float]] = {errors.DeviceLost: 10.0, errors.OutOfMemory: 1.0}
"""Seconds until a retry, by classes of errors without a value of their own. A lost device needs a new process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One rejection or failure, ready to be sent."""

    kind: ErrorKind
    message: str
    param: str | None = None
    index: int | None = None
    """Index of the input at fault; None if it is not about one input."""
    retry_after_s: float | None = None

    @property
    def status(self) -> int:
        return self.kind.status

    @property
    def reason(self) -> str | None:
        """The message of a problem that passes by itself, for the log; None for another one."""
        return None if self.retry_after_s is None else self.message

    def fields(self) -> dict[str, object]:
        """Return the fields of the error body. `code` repeats the status, as vLLM's clients expect."""
        error = {"message": self.message, "type": self.kind.type, "param": self.param, "code": self.status}
        if self.index is not None:
            error["index"] = self.index
        return {"error": error} | ({"detail": _DETAILS[self.kind]} if self.kind in _DETAILS else {})

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
        if self.kind is UNAUTHORIZED:
            return [(b"www-authenticate", b"Bearer")]
        if self.kind is UNSUPPORTED_CODING:
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
        kind = TABLE[errors.OutOfMemory]
        return Problem(kind=kind, message="The server has no memory for this request now", retry_after_s=1.0)
    kind = TABLE.get(type(error)) or next((TABLE[cls] for cls in type(error).__mro__ if cls in TABLE), UNEXPECTED)
    if kind is UNEXPECTED:
        return Problem(kind=kind, message="Internal server error")
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is None:
        retry_after_s = RETRY_S.get(type(error))
    message, param = error.in_words(words) if isinstance(error, errors.InvalidInput) else (str(error), None)
    return Problem(
        kind=kind,
        message=message,
        param=param,
        index=getattr(error, "index", None),
        retry_after_s=retry_after_s,
    )


class HttpError(Exception):
    """Rejection of a request at the level of HTTP, independent of its task."""

    def __init__(
        self, kind: ErrorKind, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.problem = Problem(kind=kind, message=message, param=param, retry_after_s=retry_after_s)

    @classmethod
    def of(cls, problem: Problem) -> HttpError:
        """Return the error of a problem that is known already."""
        error = cls(problem.kind, problem.message)
        error.problem = problem
        return error
