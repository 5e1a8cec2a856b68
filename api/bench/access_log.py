"""Access logs as traces: the sizes in `request.finished` lines, and nothing else of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

import orjson

from staged_pool.api.bench.trace import KIND_OF_ROUTE, MOST_ITEMS, MOST_TOKENS, Row, Trace
from staged_pool.stages import foreign_json

EVENT: Final = b"request.finished"
"""Bytes that a line of a request has; others are not read as JSON."""


@dataclass(slots=True)
class LogReader:
    """Reader of a log, which keeps sizes and counts the lines without any."""

    rows: list[Row] = field(default_factory=list)
    rejected: int = 0
    """Rejected requests, whose inputs nobody has counted; those that the log leaves out included."""
    failed: int = 0
    """Requests of a trace's routes that have no sizes for another reason."""
    others: int = 0
    """Requests to other routes, such as those of probes."""
    unreadable: int = 0
    """Lines that name the event, and are no such JSON."""

    def read(self, lines: Iterable[bytes]) -> None:
        """Read some lines."""
        for line in lines:
            if EVENT in line:
                self._read_one(line)

    def _read_one(self, line: bytes) -> None:
        try:
            fields: Any = foreign_json.decode(line, orjson.loads)
            if fields["event"] != EVENT.decode():
                return
            row = self._row(fields)
        except (KeyError, TypeError, ValueError):
            self.unreadable += 1
            return
        if row is not None:
            self.rows.append(row)

    def _row(self, fields: dict[str, Any]) -> Row | None:
        """Return the sizes of a request; None if it has no place in a trace."""
        route = fields["path"]
        if fields["method"] != "POST" or route not in KIND_OF_ROUTE:
            self.others += 1
            return None
        items, tokens, images = (int(fields.get(name, 0)) for name in ("items", "tokens", "images"))
        if not 1 <= items <= MOST_ITEMS or not 0 <= tokens <= MOST_TOKENS or not 0 <= images <= MOST_ITEMS:
            if fields["status"] == 429:
                self.rejected += 1 + int(fields.get("rejections_left_out", 0))
            else:
                self.failed += 1
            return None
        finished = datetime.fromisoformat(fields["timestamp"]).timestamp()
        return Row(
            at_s=finished - float(fields["total_ms"]) / 1e3,
            route=route,
            items=items,
            tokens=tokens,
            images=images,
            body_bytes=max(int(fields.get("body_bytes", 0)), 0),
            bulk=fields.get("priority") == "bulk",
        )

    def trace(self, limit: int | None = None) -> Trace:
        """Return the requests so far, in the order of their arrival."""
        trace = Trace.of(self.rows)
        return Trace(trace.rows[:limit])

    def summary(self) -> str:
        """Return the counts in one line."""
        trace = self.trace()
        parts = [f"{len(trace.rows):,} requests over {trace.seconds:,.1f} s"]
        if self.rejected:
            parts.append(f"{self.rejected:,} rejected ones have no sizes and are left out")
        if self.failed:
            parts.append(f"{self.failed:,} failed ones have no sizes and are left out")
        if self.others:
            parts.append(f"{self.others:,} to other routes are left out")
        if self.unreadable:
            parts.append(f"{self.unreadable:,} lines could not be read")
        return "; ".join(parts)
