"""Streamed answers (NDJSON): one JSON object a line, written as soon as a result is done.

The lines are in the order in which the results are done. The last line has the usage, or the `error` if the request
failed after the first line.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from staged_pool.api.wire.chunked_json import dump
from staged_pool.api.wire.exchange import Body, Received, usage_fields
from staged_pool.runtime.card import ModelCard
from staged_pool.runtime.results import Usage
from staged_pool.stages.work import Request

WriteSome: TypeAlias = Callable[[Sequence[int], Any], Iterable[Mapping[str, object]]]
"""Function that makes the JSON objects of some results.

Its arguments are the indexes of their inputs, and a result that holds only these.
"""


@dataclass(frozen=True, slots=True)
class LineWriter:
    """Writer of the lines of one answer."""

    kind: str
    """Prefix of the answer's `id`."""
    request_id: str | None
    """The rest of the `id` if the body names it."""
    write: WriteSome


ReadLines: TypeAlias = Callable[[Body, ModelCard], tuple[Request, LineWriter]]
"""Reader like `Read`; it also rejects, by `InvalidInput`, an answer that needs all results at once."""


class LineExchange(Received[LineWriter]):
    """Argument of `Engine.stream` for one HTTP request: decodes the body, encodes the lines."""

    __slots__ = ()

    def encode(self, places: Sequence[int], result: object) -> bytes:
        """Encode the lines of some results; `places` are the indexes of their inputs."""
        return b"".join(dump(line) + b"\n" for line in self.writer.write(places, result))

    def last(self, tokens: int) -> bytes:
        """Encode the line after all results, without its newline; `tokens` are the prompt tokens of the request."""
        return dump(
            {
                "id": f"{self.writer.kind}-{self.writer.request_id or self._request_id}",
                "object": "list",
                "created": int(time.time()),
                "model": self._card.name,
                "usage": usage_fields(Usage(tokens)),
            }
        )
