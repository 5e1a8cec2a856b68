"""A streaming caller: each place comes once, and all together equal one whole result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import anyio
import numpy as np

from staged_pool.runtime.results import EmbedResult, ScoreResult, Usage
from tests.sim.watch import Watch
from tests.sim.world import ClientPlan
from tests.support.user_code import RustPanic, stray_cancellation


class Gathered:
    """Results of a stream so far."""

    def __init__(self, watch: Watch, client: ClientPlan) -> None:
        self._watch = watch
        self._client = client
        self._at: dict[int, tuple[Any, int]] = {}
        """By place: a result, and where in it the place is."""
        self._is_reading = False

    async def give(self, given: tuple[Sequence[int], Any]) -> None:
        """Take some results, and read them for the client's reading time."""
        places, result = given
        if self._is_reading:
            self._watch.fail(f"client {self._client.number} is given two things at once")
        for index, place in enumerate(places):
            if place in self._at:
                self._watch.fail(f"client {self._client.number} is given place {place} twice")
            self._at[place] = result, index
        self._is_reading = True
        try:
            with self._watch.at_work():
                await anyio.sleep(self._client.reads_s)
        finally:
            self._is_reading = False
        await _end(self._client)

    def whole(self, tokens: int) -> Any:
        """Return the whole stream as one result; None if a place is missing."""
        if sorted(self._at) != list(range(len(self._at))) or not self._at:
            return None
        each = [self._at[place] for place in range(len(self._at))]
        usage = Usage(tokens)
        if isinstance(each[0][0], ScoreResult):
            return replace(each[0][0], scores=np.array([r.scores[i] for r, i in each]), logits=None, usage=usage)
        first: EmbedResult = each[0][0]
        return replace(
            first,
            dense=None if first.dense is None else np.stack([r.dense[i] for r, i in each]),
            sparse=None if first.sparse is None else tuple(r.sparse[i] for r, i in each),
            multi_vector=None if first.multi_vector is None else tuple(r.multi_vector[i] for r, i in each),
            usage=usage,
        )


async def _end(client: ClientPlan) -> None:
    """End the function of a caller with its fault."""
    match client.gives:
        case "raises":
            raise ValueError("a bug of the caller")
        case "panics":
            raise RustPanic("a bug of the caller")
        case "strays":
            await stray_cancellation()
