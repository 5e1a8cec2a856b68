"""One request until it has an answer, an error or no time left: what to send, how long to wait, when to give up.

Without input and output. `exchange` is a generator: it yields what is to be done, and is sent what came of it. Whoever
drives it carries bytes and sleeps, and decides nothing.
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
"""The longest that a server takes for `X-Request-Timeout`."""

_REPEATED: Final = frozenset({429, 503})


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is to be asked of the server."""

    path: str
    method: Literal["GET", "POST"] = "POST"
    fields: Mapping[str, object] | None = None
    """Of the JSON body."""
    streamed: bool = False
    """Whether lines are read as they come, rather than the whole answer."""
    results: frozenset[int] = frozenset({200})
    """Statuses whose answer is a result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Send this, and report an `Answer` or a `NoAnswer`."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes | None
    streamed: bool
    results: frozenset[int]
    timeout_s: float
    """Report a timeout after so long; math.inf for never."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait so long."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server answered; of a result that is read in lines, without its body."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    """By their names in lower case."""
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """Why there is none."""

    why: Literal["unreachable", "cut off", "timeout"]
    """No connection; it ended before the answer was complete; or the answer did not come in time."""
    message: str = ""


Step: TypeAlias = Ask | Pause
Outcome: TypeAlias = Answer | NoAnswer | None
"""Of an `Ask`; None after a `Pause`."""
Exchange: TypeAlias = Generator[Step, Outcome, Answer]


def exchange(
    request: Request,
    *,
    policy: RetryPolicy,
    clock: Callable[[], float],
    deadline: float,
    attempt_timeout_s: float,
    luck: Callable[[], float],
) -> Exchange:
    """Ask until there is a result.

    Args:
        request: What to ask.
        policy: When to ask again.
        clock: Seconds on any monotonic clock.
        deadline: On the same clock; nothing goes on beyond it. math.inf: none.
        attempt_timeout_s: For one try. math.inf: no limit.
        luck: See `RetryPolicy.pause_s`.

    Raises:
        StagedPoolError: What the server said, or why there was no answer.
    """
    body = None if request.fields is None else _encoded(request.fields)
    retries = 0
    while True:
        left_s = min(deadline - clock(), attempt_timeout_s)
        if left_s <= 0:
            raise DeadlineExceeded("No time was left to ask the server", stage="client")
        outcome = yield _ask(request, body, left_s)
        if isinstance(outcome, Answer) and outcome.status in request.results:
            return outcome
        error, after_s, repeated = _verdict(outcome, request, left_s, retries)
        pause_s = policy.pause_s(retries, retry_after_s=after_s, luck=luck()) if repeated else None
        if pause_s is None or clock() + pause_s >= deadline:
            try:
                raise error
            finally:
                del error  # whose traceback has this frame, which has the request
        yield Pause(pause_s)
        retries += 1


def _ask(request: Request, body: bytes | None, timeout_s: float) -> Ask:
    headers = {"accept": NDJSON if request.streamed else JSON}
    if body is not None:
        headers["content-type"] = JSON
    if math.isfinite(timeout_s) and request.method == "POST":
        headers["x-request-timeout"] = f"{min(max(timeout_s, 0.001), MAX_TIMEOUT_S):.3f}"
    return Ask(
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
        return msgspec.json.encode(fields)
    except UnicodeEncodeError:
        raise InvalidInput("A text holds half of a surrogate pair, which is no character", param="input") from None


def _verdict(
    outcome: Outcome, request: Request, left_s: float, retries: int
) -> tuple[StagedPoolError, float | None, bool]:
    """What an outcome that is no result means, when a retry has a chance, and whether there may be one."""
    if isinstance(outcome, Answer):
        after_s = retry_after_s(outcome.headers)
        error = error_of(outcome.status, outcome.body, after_s)
        sent_as = outcome.headers.get("x-request-id")
        error.add_note(f"{request.method} {request.path}: HTTP {outcome.status}, request id {sent_as or 'unknown'}")
        return error, after_s, outcome.status in _REPEATED
    if outcome is None:
        raise RuntimeError("an Ask was answered as if it were a Pause")
    if outcome.why == "timeout":
        return DeadlineExceeded(f"The server did not answer within {left_s:.3g} s", stage="client"), None, False
    if outcome.why == "unreachable":
        return ConnectionFailed(f"The server cannot be reached: {outcome.message}"), None, True
    message = f"The connection ended before the answer came: {outcome.message}"
    return ConnectionFailed(message), None, retries == 0
