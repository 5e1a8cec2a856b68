"""Records of a load: one row for each request, in columns."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from staged_pool.api.bench.connection import Reply
from staged_pool.api.bench.sizes import KINDS
from staged_pool.api.bench.workload import Made

NOT_SENT: Final = 0
"""Outcome of a request that would have needed more connections than allowed."""
NO_CONNECTION: Final = 1
BROKEN: Final = 2
TIMED_OUT: Final = 3
UNFINISHED: Final = 4
"""Outcome of a request in flight as the user ended the load."""

WORDS: Final[Mapping[int, str]] = {
    NOT_SENT: "not sent",
    NO_CONNECTION: "no connection",
    BROKEN: "broken",
    TIMED_OUT: "timed out",
    UNFINISHED: "unfinished",
}
"""Words for outcomes that are no status of HTTP."""

OK: Final = 200
REJECTED: Final = 429

_USAGE: Final = re.compile(rb'"(?:total|prompt)_tokens":[ \t]*(\d{1,12})')
_TIMING: Final = re.compile(r"([\w-]+)(?:;[^,]*?)?;dur=([\d.e+-]+)")


@dataclass(frozen=True, slots=True)
class Columns:
    """Rows of some requests, as arrays of equal length."""

    due: NDArray[np.float64]
    """Time at which each request should be sent, in seconds."""
    sent: NDArray[np.float64]
    ended: NDArray[np.float64]
    status: NDArray[np.int32]
    kind: NDArray[np.int32]
    """Index in `KINDS`."""
    items: NDArray[np.int64]
    tokens: NDArray[np.int64]
    """Tokens as the server counts them; -1 if it does not say."""

    def where(self, chosen: NDArray[np.bool_]) -> Columns:
        """Return the rows for which `chosen` is true."""
        return Columns(*(getattr(self, name)[chosen] for name in self.__slots__))

    def at(self, places: NDArray[np.int64]) -> Columns:
        """Return the rows at these places."""
        return Columns(*(getattr(self, name)[places] for name in self.__slots__))

    def __len__(self) -> int:
        return len(self.due)

    @property
    def latency_s(self) -> NDArray[np.float64]:
        """Seconds from the time at which each was due to its end."""
        return self.ended - self.due

    @property
    def is_ok(self) -> NDArray[np.bool_]:
        """True for requests that were answered with 200."""
        ok: NDArray[np.bool_] = self.status == OK
        return ok


class Records:
    """Rows of all requests of a load, and counts for a display of progress."""

    def __init__(self) -> None:
        self._due = array("d")
        self._sent = array("d")
        self._ended = array("d")
        self._status = array("i")
        self._kind = array("i")
        self._items = array("q")
        self._tokens = array("q")
        self._timings: list[str | None] = []
        self.lateness = array("d")
        """Seconds by which the generator was late: for each request, or each look at a closed loop."""
        self.statuses: Counter[int] = Counter()
        self.resent = 0
        """Requests that were sent again, because a kept connection was closed."""
        self.connections = 0
        """Most connections at once."""

    def __len__(self) -> int:
        return len(self._due)

    def add(self, made: Made, due: float, sent: float, ended: float, outcome: Reply | int) -> None:
        """Add a request that has ended.

        Args:
            made: The request.
            due: Time at which it should have been sent.
            sent: Time at which it was sent.
            ended: Time of the end of its answer.
            outcome: The answer, or one of the numbers in `WORDS`.
        """
        status, tokens, timing = outcome if isinstance(outcome, int) else outcome.status, -1, None
        if isinstance(outcome, Reply):
            self.resent += outcome.resent
            if status == OK:
                tokens, timing = tokens_of(outcome), outcome.header("server-timing")
        self._due.append(due)
        self._sent.append(sent)
        self._ended.append(ended)
        self._status.append(status)
        self._kind.append(KINDS.index(made.kind))
        self._items.append(made.items)
        self._tokens.append(tokens)
        self._timings.append(timing)
        self.statuses[status] += 1

    def columns(self) -> Columns:
        """Return copies of all rows."""
        return Columns(
            np.array(self._due, np.float64),
            np.array(self._sent, np.float64),
            np.array(self._ended, np.float64),
            np.array(self._status, np.int32),
            np.array(self._kind, np.int32),
            np.array(self._items, np.int64),
            np.array(self._tokens, np.int64),
        )

    def stage_ms(self, chosen: NDArray[np.bool_]) -> tuple[Mapping[str, float], int]:
        """Return the mean milliseconds in each stage, and the number of requests that say them.

        A stage that an answer does not name counts as zero.
        """
        sums: Counter[str] = Counter()
        said = 0
        for place in np.flatnonzero(chosen).tolist():
            if (timing := self._timings[place]) is not None:
                said += 1
                sums.update(stage_times_ms(timing))
        return {name: total / said for name, total in sums.items()}, said

    def has_timing(self) -> NDArray[np.bool_]:
        """Return which answers have the times of their stages."""
        return np.array([timing is not None for timing in self._timings], np.bool_)


def tokens_of(reply: Reply) -> int:
    """Return the tokens in the usage of an answer; -1 if neither end of its body has any."""
    found = _USAGE.search(reply.body)
    return -1 if found is None else int(found[1])


def stage_times_ms(timing: str) -> dict[str, float]:
    """Return the entries of a `Server-Timing` header, in milliseconds."""
    times: dict[str, float] = {}
    for name, text in _TIMING.findall(timing):
        try:
            times[name] = times.get(name, 0.0) + float(text)
        except ValueError:
            continue
    return times
