"""Traces of requests, as stages see them: they note times, and tell of batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

TRACE_BYTES: Final = 24
"""Bytes of the ids of a trace and a span, for another process."""


@dataclass(slots=True, eq=False)
class Trace:
    """A request that a tracer follows. Only the event loop's thread writes."""

    trace_id: int
    """Id of the trace, of 128 bits, as in W3C Trace Context."""
    span_id: int
    """Id of the request's own span, of 64 bits."""
    on_batch: Callable[[TracedBatch], object]
    """Told of each batch with an item of this request. Several requests may have the same function."""
    model: str = ""
    """Name of the served model; empty until it is known."""
    times: dict[str, tuple[float, float]] = field(default_factory=dict)
    """First start and last end by stage, in seconds on the clock of the stages."""

    @property
    def packed(self) -> bytes:
        """The ids as bytes, for another process."""
        return self.trace_id.to_bytes(16, "big") + self.span_id.to_bytes(8, "big")

    @staticmethod
    def unpacked(ids: bytes, on_batch: Callable[[TracedBatch], object], model: str) -> Trace:
        """Return the trace of a request of another process, which notes its times itself."""
        return Trace(int.from_bytes(ids[:16], "big"), int.from_bytes(ids[16:], "big"), on_batch, model)

    def passed(self, stage: str, began_at: float, ended_at: float) -> None:
        """Note that an item was in a stage. Items pass a stage side by side: the time of all of them counts."""
        known = self.times.get(stage)
        if known is not None:
            began_at, ended_at = min(known[0], began_at), max(known[1], ended_at)
        self.times[stage] = began_at, ended_at


class TracedBatch(NamedTuple):
    """One batch that has ended, with an item of at least one traced request."""

    lane: str
    began_at: float
    """Time at which it got its slot, in seconds on the clock of the stages."""
    ended_at: float
    """End of its last forward."""
    items: int
    tokens: int
    """Tokens with padding."""
    trigger: str
    """See `BatchTrigger`."""
    traces: Sequence[Trace]
    """Its traced requests, each once."""
