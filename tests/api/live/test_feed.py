"""The live feed: one snapshot for all its clients."""

from __future__ import annotations

import json
from contextlib import aclosing
from typing import Any

import anyio
import pytest

from staged_pool.api.live.feed import PERIOD_S, WINDOW_S, LiveFeed
from staged_pool.api.live.view import Moment
from tests.servers.engines import engine_on
from tests.support.model import LetterModel

pytestmark = pytest.mark.anyio


class Server:
    """A source of moments, whose time passes when the test says so."""

    def __init__(self, engines: Any = None) -> None:
        self.now = 1000.0
        self.taken = 0
        self.engines = engines or (dict)
        self.feed = LiveFeed(self.take, lambda: "", clock=lambda: self.now)

    async def take(self) -> Moment:
        self.taken += 1
        return Moment(self.now, self.engines(), None)

    async def look(self) -> dict[str, Any]:
        """Return the first event of a new client."""
        async with aclosing(self.feed.events()) as events:
            found: dict[str, Any] = json.loads(await anext(events))
        return found


async def test_all_clients_of_a_period_get_one_snapshot() -> None:
    server = Server()
    first, second = await server.look(), await server.look()
    assert first == second
    assert server.taken == 1
    server.now += PERIOD_S
    assert (await server.look())["at"] == server.now
    assert server.taken == 2


async def test_clients_that_come_at_once_do_not_ask_twice() -> None:
    server = Server()
    async with anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(server.look)
    assert server.taken == 1


async def test_rates_are_over_the_window_and_begin_anew_after_a_pause() -> None:
    async with engine_on(LetterModel()) as engine:
        server = Server(lambda: {"letters": engine.statistics()})
        rates = []
        await server.look()
        await engine.embed("a")
        for _ in range(round(WINDOW_S / PERIOD_S) + 1):
            server.now += PERIOD_S
            rates.append((await server.look())["models"]["letters"]["view"]["answers"])
        assert rates[0] == 1 / PERIOD_S
        assert rates[-2] == 1 / WINDOW_S
        assert rates[-1] == 0.0, "the answer is older than the window"
        await engine.embed("b")
        server.now += 10 * WINDOW_S
        assert (await server.look())["models"]["letters"]["view"]["answers"] == 0.0, "nobody has looked meanwhile"


async def test_an_event_has_everything_of_a_model() -> None:
    async with engine_on(LetterModel()) as engine:
        event = await Server(lambda: {"letters": engine.statistics()}).look()
    model = event["models"]["letters"]
    assert model["verdict"]["lead"] == "Idle"
    assert [stage["card"] for stage in model["view"]["stages"]] == ["parse", "preprocess", "batch", "postprocess"]
    assert event["period_s"] == PERIOD_S
