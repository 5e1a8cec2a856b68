"""Fronts and the engine process: requests cross the line, and nothing is lost on it."""

from __future__ import annotations

import anyio
import numpy as np
import pytest

from tests.servers.fronts import fronts_on
from tests.support.model import LetterModel, expected
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


async def test_requests_of_two_fronts_share_one_device_and_get_their_own_rows() -> None:
    model = LetterModel()
    async with fronts_on(model, fronts=2) as (engines, device, _, _):
        results = {}

        async def ask(front: int, text: str) -> None:
            results[front, text] = (await engines[front].embed([text, text[::-1]], normalize=False)).embeddings

        async with anyio.create_task_group() as tasks:
            for place in range(40):
                for front in range(2):
                    tasks.start_soon(ask, front, f"text {front} of {place}")
        for (_, text), vectors in results.items():
            assert np.array_equal(vectors[0], expected(text)) or np.array_equal(vectors[0, :4], expected(text))
            assert np.array_equal(vectors[1, :4], expected(text[::-1])[:4])
        assert len(results) == 80
        await until(lambda: device.statistics().admission.requests == 0)
        assert device.statistics().admission.tokens == 0
        assert not any(device.admission.in_flight.fed.values())
