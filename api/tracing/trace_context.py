"""W3C Trace Context: the trace that a request belongs to, from its headers."""

from __future__ import annotations

import re
from random import getrandbits
from typing import Final, NamedTuple

_TRACE_PARENT: Final = re.compile(
    rb"(?!ff)[0-9a-f]{2}-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?:-.*)?"
)
_SAMPLED: Final = 1
_ROOTS: Final = 1 << 64
"""Values of the lowest 64 bits of a trace id, which decide about a root.

OpenTelemetry's sampler `TraceIdRatioBased` takes the same ones.
"""


class TraceParent(NamedTuple):
    """The span that a request belongs to."""

    trace_id: int
    span_id: int
    flags: int

    @property
    def sampled(self) -> bool:
        """True if the caller records the trace."""
        return bool(self.flags & _SAMPLED)


def trace_parent(header: bytes) -> TraceParent | None:
    """Read a `traceparent` header; None without a valid one (W3C Trace Context, section 3.2)."""
    if not header or (given := _TRACE_PARENT.fullmatch(header)) is None:
        return None
    found = TraceParent(int(given["trace"], 16), int(given["span"], 16), int(given["flags"], 16))
    return found if found.trace_id and found.span_id else None


def new_trace_id() -> int:
    """Return a random id of a trace, which is not 0."""
    return getrandbits(128) or 1


def new_span_id() -> int:
    """Return a random id of a span, which is not 0."""
    return getrandbits(64) or 1


def written(trace_id: int) -> str:
    """Write the id of a trace as headers and logs have it."""
    return f"{trace_id:032x}"


class RootSampler:
    """Chooses a part of the traces that begin here, by their ids: the same ones as other services with this ratio.

    Args:
        ratio: The part, 0 to 1.
    """

    def __init__(self, ratio: float) -> None:
        self._bound = round(ratio * _ROOTS)

    def chooses(self, trace_id: int) -> bool:
        """Return True if a trace is sampled."""
        return trace_id % _ROOTS < self._bound
