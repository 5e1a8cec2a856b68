"""Traces: the arrival times and sizes of requests, without contents, keys, ids or names.

A trace is lines of JSON. The first says the format and its version, and each other one is a request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import orjson

from staged_pool.api.bench.sizes import Kind
from staged_pool.stages import foreign_json, foreign_text
from staged_pool.stages.errors import ConfigError

FORMAT: Final = "staged-pool-trace"
FORMAT_VERSION: Final = 1

KIND_OF_ROUTE: Final[Mapping[str, Kind]] = {
    **dict.fromkeys(
        (
            "/v1/embeddings", "/embeddings", "/v1/embed", "/v2/embed", "/embed", "/embed_all", "/embed_sparse",
            "/pooling", "/classify", "/classify_tokens", "/predict", "/api/embed", "/api/embeddings", "/vectors",
            "/vectorize", "/v1/multimodalembeddings", "/embeddings_image", "/similarity", "/invocations", "/",
        ),
        "texts",
    ),
    **dict.fromkeys(
        ("/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score", "/v1/ranking", "/v1/reranking"), "rerank"
    ),
}  # fmt: skip
"""Routes whose requests a trace holds, and the kind as which each is replayed. No other path gets into a trace."""

MOST_TOKENS: Final = 2**31
MOST_ITEMS: Final = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One request of a trace."""

    at_s: float
    """Seconds from the first request."""
    route: str
    items: int
    tokens: int
    images: int
    body_bytes: int
    bulk: bool = False
    """It had the priority bulk."""

    def line(self) -> bytes:
        """Return its line of JSON, with the line end."""
        fields = {
            "at_s": round(self.at_s, 6),
            "route": self.route,
            "items": self.items,
            "tokens": self.tokens,
            "images": self.images,
            "body_bytes": self.body_bytes,
            "priority": "bulk" if self.bulk else "interactive",
        }
        return orjson.dumps(fields) + b"\n"

    @property
    def kind(self) -> Kind:
        """The kind as which it is replayed."""
        kind = KIND_OF_ROUTE[self.route]
        return "images" if kind == "texts" and self.images else kind


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests of a trace, in the order of their times."""

    rows: Sequence[Row]

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Trace:
        """Put rows in order, and let the first be at 0."""
        ordered = sorted(rows, key=lambda row: row.at_s)
        begin = ordered[0].at_s if ordered else 0.0
        return cls([replace(row, at_s=row.at_s - begin) for row in ordered])

    def lines(self) -> Iterator[bytes]:
        """Yield the lines of its file."""
        yield orjson.dumps({"format": FORMAT, "version": FORMAT_VERSION, "requests": len(self.rows)}) + b"\n"
        for row in self.rows:
            yield row.line()

    @property
    def seconds(self) -> float:
        """Time from the first request to the last."""
        return self.rows[-1].at_s if self.rows else 0.0

    def replayed(self, speed: float, limit: int | None) -> Trace:
        """Return its first `limit` requests, `speed` times as fast."""
        return Trace([replace(row, at_s=row.at_s / speed) for row in self.rows[:limit]])


def read_trace(path: Path) -> Trace:
    """Read the file of a trace.

    Raises:
        ConfigError: It cannot be read, or a line is wrong; names the line.
    """
    try:
        content = foreign_text.unmarked(path.read_bytes())
    except (OSError, foreign_text.BadText) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"TRACE {path}: cannot be read: {reason}") from error
    first, _, rest = content.partition(b"\n")
    try:
        head = foreign_json.decode(first, orjson.loads)
        form, version = head["format"], head["version"]
    except (foreign_json.BadJson, KeyError, TypeError):
        form, version = None, None
    if form != FORMAT:
        raise ConfigError(f"TRACE {path}: is no trace; make one by `staged-pool trace record`")
    if version != FORMAT_VERSION:
        raise ConfigError(f"TRACE {path}: has version {version} of the format; this program reads {FORMAT_VERSION}")
    rows = [_row(path, number, line) for number, line in enumerate(rest.splitlines(), start=2) if line.strip()]
    if not rows:
        raise ConfigError(f"TRACE {path}: has no requests")
    return Trace.of(rows)


def _row(path: Path, number: int, line: bytes) -> Row:
    try:
        fields: dict[str, Any] = foreign_json.decode(line, orjson.loads)
        row = Row(
            at_s=float(fields["at_s"]),
            route=fields["route"],
            items=int(fields["items"]),
            tokens=int(fields["tokens"]),
            images=int(fields["images"]),
            body_bytes=int(fields["body_bytes"]),
            bulk=fields["priority"] == "bulk",
        )
        fits = row.at_s >= 0 and 1 <= row.items <= MOST_ITEMS and 0 <= row.tokens <= MOST_TOKENS
        if not fits or not 0 <= row.images <= MOST_ITEMS or row.body_bytes < 0 or row.route not in KIND_OF_ROUTE:
            raise ValueError(line)
    except (KeyError, TypeError, ValueError):
        raise ConfigError(f"TRACE {path}: line {number} is no request of a trace") from None
    return row
