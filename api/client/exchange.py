"""One request with its retries, until a result, an error or the deadline. Pure.

`exchange` is a generator without I/O: it yields the next step, and receives the outcome of that step. The clients run
the steps: they send bytes and sleep.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

import msgspec

from staged_pool.client.errors import ConnectionFailed, error_of
from staged_pool.client.retry import RetryPolicy, retry_after_s
from staged_pool.stages.errors import DeadlineExceeded, InvalidInput, StagedPoolError

JSON: Final = "application/json"
NDJSON: Final = "application/x-ndjson"
MAX_TIMEOUT_S: Final = 86_400.0
"""Maximum of `X-Request-Timeout` that a server accepts, in seconds."""

_RETRIED: Final = frozenset({429, 503})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRequest:
    """Request to the server."""

    path: str
    method: Literal["GET", "POST"] = "POST"
    fields: Mapping[str, object] | None = None
    """Fields of the JSON body; None: no body."""
    streamed: bool = False
    """Ask for an answer in lines, which are read as they arrive."""
    results: frozenset[int] = frozenset({200})
    """Statuses of an answer that is a result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """Step: send this request once; its outcome is a `ServerAnswer` or a `NoAnswer`."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes | None
    streamed: bool
    results: frozenset[int]
    timeout_s: float
    """Limit in seconds, after which the outcome is a timeout; math.inf: no limit."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Step: wait for this time."""

    seconds: float


@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """Answer of the server; a result that is streamed has no body here."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers by their names in lower case."""
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """Outcome of an attempt without an answer."""

    why: Literal["unreachable", "cut off", "timeout"]
    """Cause: no connection; a connection that ended before the end of the answer; or a timeout."""
    message: str = ""


Step: TypeAlias = Attempt | Pause
StepOutcome: TypeAlias = ServerAnswer | NoAnswer | None
"""Outcome of a step; None after a `Pause`."""
Exchange: TypeAlias = Generator[Step, StepOutcome, ServerAnswer]


def exchange(
    request: ServerRequest,
    *,
    policy: RetryPolicy,
    clock: Callable[[], float],
    deadline: float,
    attempt_timeout_s: float,
    luck: Callable[[], float],
) -> Exchange:
    """Send a request until it has a result, a final error, or no time left.

    Args:
        request: The request.
        policy: Policy for retries.
        clock: Returns the time of a monotonic clock, in seconds.
        deadline: Time on the same clock, after which nothing is sent. math.inf: none.
        attempt_timeout_s: Limit for one attempt, in seconds. math.inf: no limit.
        luck: See `RetryPolicy.pause_s`.

    Raises:
        StagedPoolError: Error of the server, or cause of a missing answer.
    """
    body = None if request.fields is None else _encoded(request.fields)
    retries = 0
    while True:
        left_s = min(deadline - clock(), attempt_timeout_s)
        if left_s <= 0:
            raise DeadlineExceeded("The deadline passed before the request was sent", stage="client")
        outcome = yield _attempt(request, body, left_s)
        if isinstance(outcome, ServerAnswer) and outcome.status in request.results:
            return outcome
        error, after_s, retryable = _failure(outcome, request, left_s, retries)
        pause_s = policy.pause_s(retries, retry_after_s=after_s, luck=luck()) if retryable else None
        if pause_s is None or clock() + pause_s >= deadline:
            try:
                raise error
            finally:
                del error  # breaks the cycle of the error, its traceback and this frame, which holds the request
        yield Pause(pause_s)
        retries += 1


def _attempt(request: ServerRequest, body: bytes | None, timeout_s: float) -> Attempt:
    headers = {"accept": NDJSON if request.streamed else JSON}
    if body is not None:
        headers["content-type"] = JSON
    if math.isfinite(timeout_s) and request.method == "POST":
        headers["x-request-timeout"] = f"{min(max(timeout_s, 0.001), MAX_TIMEOUT_S):.3f}"
    return Attempt(
        method=request.method,
        path=request.path,
        headers=headers,
        body=body,
        streamed=request.streamed,
        results=request.results,
        timeout_s=timeout_s,
    )


def _encoded(fields: Mapping[str, object]) -> bytes:
    try:
        return msgspec.json.encode(fields, enc_hook=_plain)
    except UnicodeEncodeError:
        raise InvalidInput("A text holds half of a surrogate pair, so it is not valid Unicode", param="input") from None


def _plain(value: object) -> str:
    """Return the text of a subclass of str, such as `numpy.str_`.

    Raises:
        TypeError: It is no text.
    """
    if isinstance(value, str):
        return str(value)
    raise TypeError(f"Encoding objects of type {type(value).__qualname__} is unsupported")


def _failure(
    outcome: StepOutcome, request: ServerRequest, left_s: float, retries: int
) -> tuple[StagedPoolError, float | None, bool]:
    """Return the error of an outcome, its `Retry-After` in seconds, and if it is retryable."""
    if isinstance(outcome, ServerAnswer):
        after_s = retry_after_s(outcome.headers)
        error = error_of(outcome.status, outcome.body, after_s, outcome.headers.get("location", ""))
        sent_as = outcome.headers.get("x-request-id")
        error.add_note(f"{request.method} {request.path}: HTTP {outcome.status}, request id {sent_as or 'unknown'}")
        return error, after_s, outcome.status in _RETRIED
    if outcome is None:
        raise RuntimeError("an Attempt has no outcome")
    if outcome.why == "timeout":
        return DeadlineExceeded(f"The server did not answer within {left_s:.3g} s", stage="client"), None, False
    if outcome.why == "unreachable":
        return ConnectionFailed(f"The server cannot be reached: {outcome.message}"), None, True
    message = f"The connection ended before the answer arrived: {outcome.message}"
    return ConnectionFailed(message), None, retries == 0
