"""Turns on the device, asked for over HTTP by several callers at once."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from staged_pool.api.app.app import Application
from staged_pool.api.app.call import priority_of
from staged_pool.api.app.engine_registry import EngineRegistry
from staged_pool.api.asgi import Scope
from staged_pool.api.config import ServerConfig
from staged_pool.api.keys import TENANT, Keys
from staged_pool.runtime.config import EngineConfig
from staged_pool.stages.errors import ConfigError
from staged_pool.stages.scheduling.entries import Priority
from tests.servers.byte_client import post, read_answer, statuses
from tests.servers.on_socket import Served, serving
from tests.support.gates import Gate
from tests.support.model import LetterModel
from tests.support.stages import batch_stages
from tests.support.waiting import until

HEAVY, LIGHT = "key-of-the-heavy-one", "key-of-the-light-one"
BACKLOG = 30

with_anyio = pytest.mark.anyio


class Callers:
    """Requests of one text each. The first stands on the device until `release`; forwards are of one text each."""

    def __init__(self, served: Served, tasks: anyio.abc.TaskGroup, gate: Gate, model: LetterModel) -> None:
        self._served = served
        self._tasks = tasks
        self._gate = gate
        self._model = model

    async def ask(self, *texts: str, **headers: str) -> None:
        """Send a request for each text, and wait until all are in flight."""
        in_flight = self._served.in_flight + len(texts)
        for text in texts:
            given = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
            self._tasks.start_soon(self._ask, post(json.dumps({"input": text}).encode(), *given))
        await until(lambda: self._served.in_flight == in_flight)
        await self._gate.arrived()

    async def _ask(self, request: bytes) -> None:
        async with await self._served.connect() as stream:
            await stream.send(request)
            assert statuses(await read_answer(stream)) == [200]

    async def release(self) -> list[str]:
        """Let the device go on until all is done; the texts, in its order."""
        self._gate.open()
        await until(lambda: self._served.in_flight == 0)
        return [text for batch in self._model.forwarded for text in batch]

    async def until_ready(self, items: int) -> None:
        """Wait until `items` items wait for the device; one of them may have been handed to it."""
        batch = batch_stages(self._served.engine)["text"]
        await until(lambda: batch.waiting + batch._slots.ahead == items)


@asynccontextmanager
async def callers(waiting_tokens: int = 10_000, **config: Any) -> AsyncIterator[Callers]:
    gate = Gate()
    model = LetterModel(on_forward=gate)
    engine = EngineConfig(coalesce=False, max_batch_items=1, max_batch_tokens=1, waiting_tokens=waiting_tokens)
    async with serving(model, engine=engine, **config) as served, anyio.create_task_group() as tasks:
        yield Callers(served, tasks, gate, model)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@with_anyio
@pytest.mark.parametrize("waiting_tokens", [10_000, 4], ids=["in front of the device", "in front of preprocess"])
async def test_a_request_of_one_key_does_not_wait_for_the_backlog_of_another(waiting_tokens: int) -> None:
    async with callers(waiting_tokens, api_keys=(HEAVY, LIGHT)) as asking:
        await asking.ask(*["h"] * BACKLOG, **bearer(HEAVY))
        await asking.ask("l", **bearer(LIGHT))
        if waiting_tokens > BACKLOG:
            await asking.until_ready(BACKLOG)
        order = await asking.release()
    ahead_at_most = 3 if waiting_tokens > BACKLOG else 3 + waiting_tokens + 2  # items that the stages hold
    assert order.index("l") <= ahead_at_most
    assert len(order) == BACKLOG + 1


@with_anyio
async def test_a_header_says_whose_a_request_is_where_the_operator_says_so() -> None:
    async with callers(api_keys=(HEAVY,), tenant_header="X-Tenant") as asking:
        await asking.ask(*["h"] * BACKLOG, **bearer(HEAVY), x_tenant="heavy")
        await asking.ask("l", **bearer(HEAVY), x_tenant="light")
        await asking.until_ready(BACKLOG)
        assert (await asking.release()).index("l") <= 3


@with_anyio
async def test_without_that_a_client_cannot_choose_whose_its_request_is() -> None:
    async with callers(api_keys=(HEAVY,)) as asking:
        await asking.ask(*["h"] * BACKLOG, **bearer(HEAVY), x_tenant="heavy")
        await asking.ask("l", **bearer(HEAVY), x_tenant="light")
        await asking.until_ready(BACKLOG)
        assert (await asking.release()).index("l") > BACKLOG // 2


@with_anyio
@pytest.mark.parametrize("headers", [{"x_priority": "bulk"}, {"priority": "u=7, i"}])
async def test_interactive_requests_overtake_bulk_ones_which_get_an_eighth(headers: dict[str, str]) -> None:
    async with callers() as asking:
        await asking.ask("first")
        await asking.ask(*["b"] * 10, **headers)
        await asking.ask(*["i"] * 40)
        await asking.until_ready(50)
        order = await asking.release()
    places = [place for place, text in enumerate(order) if text == "b"]
    due = zip(places[:5], [8, 16, 24, 32, 40], strict=True)
    assert all(abs(place - eighth) <= 1 for place, eighth in due), "one of eight, the text on the device not counted"
    assert places[5:] == list(range(46, 51)), "and all of it when nothing else waits"


@pytest.mark.parametrize(
    ("headers", "priority"),
    [
        ({}, Priority.INTERACTIVE),
        ({b"x-priority": b"BULK"}, Priority.BULK),
        ({b"x-priority": b"background"}, None),
        ({b"x-priority": b"interactive", b"priority": b"u=7"}, Priority.INTERACTIVE),
        ({b"priority": b"u=7"}, Priority.BULK),
        ({b"priority": b"i, u=7;x=1"}, Priority.BULK),
        ({b"priority": b"u=6"}, Priority.INTERACTIVE),
        ({b"priority": b"u=1, i"}, Priority.INTERACTIVE),
        ({b"priority": b"u=77"}, Priority.INTERACTIVE),
        ({b"priority": b"\xff"}, Priority.INTERACTIVE),
    ],
)
def test_the_priority_is_read_from_headers(headers: dict[bytes, bytes], priority: Priority | None) -> None:
    assert priority_of(headers) is priority


def tenant_of(keys: Keys, headers: list[tuple[bytes, bytes]]) -> object:
    scope: Scope = {"path": "/v1/embeddings", "headers": headers}
    assert keys.admit(scope) is None
    return scope.get(TENANT)


def test_a_tenant_is_a_key_or_a_header_and_all_that_have_neither_are_one() -> None:
    key, named = [(b"authorization", b"Bearer k")], [(b"x-tenant", b"somebody")]
    assert tenant_of(Keys(), named) is None
    by_key = tenant_of(Keys(["k"]), [*key, *named])
    by_header = tenant_of(Keys(["k"], "X-Tenant"), [*key, *named])
    assert by_key != by_header == tenant_of(Keys([], "x-tenant"), named)
    assert tenant_of(Keys(["k"], "x-tenant"), key) == by_key, "without the header it is the key's"
    nobody = tenant_of(Keys([], "x-tenant"), [])
    assert nobody is not None
    assert nobody not in (by_key, by_header)
    assert "somebody" not in str(by_header)


@pytest.mark.parametrize("name", ["", "X Tenant", "X-Tenant:", "é", "x" * 200])
def test_an_invalid_header_name_is_rejected_at_start(name: str) -> None:
    with pytest.raises(ConfigError, match="tenant_header="):
        ServerConfig(tenant_header=name)


def test_the_application_takes_the_header_from_its_settings() -> None:
    application = Application(EngineRegistry(), config=ServerConfig(tenant_header="X-Tenant"))
    scope: Scope = {"method": "POST", "path": "/v1/embeddings", "headers": [(b"x-tenant", b"a")]}
    assert application.front_door.reject(scope) is None
    assert TENANT in scope
