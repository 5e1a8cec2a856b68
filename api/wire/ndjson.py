"""Answers of one JSON object a line: a result as soon as it is done, whichever it is; at the end what the request cost.

What goes wrong after the first line stands in the last one, as the `error` that would have been the answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from staged_pool.api.wire.chunked_json import dump
from staged_pool.api.wire.exchange import Body, Received, usage_fields
from staged_pool.runtime.model import ModelCard
from staged_pool.runtime.results import Usage
from staged_pool.stages.work import Request

WriteSome: TypeAlias = Callable[[Sequence[int], Any], Iterable[Mapping[str, object]]]
"""Makes the objects of some results out of their places in the request, and a result of these alone."""


@dataclass(frozen=True, slots=True)
class LineWriter:
    """What an answer in lines needs of the request."""

    kind: str
    """What the `id` begins with."""
    request_id: str | None
    """The rest of it, where the body says so."""
    write: WriteSome


ReadLines: TypeAlias = Callable[[Body, ModelCard], tuple[Request, LineWriter]]
"""As `Read`. Raises `InvalidInput` also for what needs all results at once."""


class LineExchange(Received[LineWriter]):
    """What `Engine.stream` is given for one HTTP request."""

    __slots__ = ()

    def encode(self, places: Sequence[int], result: object) -> bytes:
        """The lines of some results."""
        return b"".join(dump(line) + b"\n" for line in self.writer.write(places, result))

    def last(self, tokens: int) -> bytes:
        """The line behind all results, without its end."""
        return dump(
            {
                "id": f"{self.writer.kind}-{self.writer.request_id or self._request_id}",
                "object": "list",
                "created": int(time.time()),
                "model": self._card.name,
                "usage": usage_fields(Usage(tokens)),
            }
        )
