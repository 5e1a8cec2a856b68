"""The route of the live feed, on real connections: its head, its end, its limit and its count."""

from __future__ import annotations

import json
from typing import Any

import anyio
import httpx
import pytest
from blockbuster import BlockBuster

from staged_pool.api.app.live_routes import MAX_CLIENTS
from staged_pool.api.app.pages import PAGES
from tests.servers.on_socket import serving
from tests.support.waiting import until

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore:Async generator 'http:ResourceWarning"),  # the client's own, on trio
]


@pytest.fixture(autouse=True)
def metrics_may_be_read(nothing_blocks_the_event_loop: BlockBuster) -> None:
    """Prometheus' client reads /proc in each scrape."""
    nothing_blocks_the_event_loop.deactivate()


async def next_event(lines: Any) -> dict[str, Any]:
    async for line in lines:
        if line.startswith("data: "):
            event: dict[str, Any] = json.loads(line.removeprefix("data: "))
            return event
    raise AssertionError("the stream has ended")


async def test_a_client_gets_event_after_event_and_counts_as_answered() -> None:
    async with serving() as served, served.client() as client:
        async with client.stream("GET", "/stages/live") as response:
            lines = response.aiter_lines()
            first, second = await next_event(lines), await next_event(lines)
            metrics = (await client.get("/metrics")).text
        assert response.headers["content-type"] == "text/event-stream"
        assert response.headers["x-accel-buffering"] == "no"
        assert "content-length" not in response.headers
        assert first["at"] < second["at"]
        assert "letters" in first["models"]
        assert "staged_pool_live_clients 1.0" in metrics
        http = served.server.http_statistics
        await until(lambda: http() is not None and http().live_clients == 0)  # type: ignore[union-attr]
        statistics = http()
    assert statistics is not None
    (ended,) = [each for each in statistics.finished if each[0] == "/stages/live"]
    assert ended[2:] == (200, "general", 1)


async def test_the_stream_ends_with_the_server() -> None:
    async with serving() as served, served.client() as client, client.stream("GET", "/stages/live") as response:
        lines = response.aiter_lines()
        await next_event(lines)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(served.server.close)
            with anyio.fail_after(20):
                rest = [line async for line in lines]
    assert rest is not None


async def test_too_many_clients_are_told_to_come_later() -> None:
    async with serving() as served, served.client() as client:
        application = served.server._application
        assert application is not None
        application._metrics.http.live_clients = MAX_CLIENTS
        answer = await client.get("/stages/live")
        application._metrics.http.live_clients = 0
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert f"At most {MAX_CLIENTS} clients" in answer.json()["error"]["message"]


async def test_a_head_request_gets_the_head_alone() -> None:
    async with serving() as served, served.client() as client:
        answer = await client.head("/stages/live")
    assert (answer.status_code, answer.headers["content-type"], answer.content) == (200, "text/event-stream", b"")


async def test_the_feed_asks_for_the_key_and_the_page_does_not() -> None:
    async with serving(api_keys=("secret",)) as served, served.client() as client:
        page: httpx.Response = await client.get("/")
        live = await client.get("/stages/live")
        async with client.stream("GET", "/stages/live", headers={"authorization": "Bearer secret"}) as allowed:
            event = await next_event(allowed.aiter_lines())
    assert (page.status_code, page.headers["content-type"]) == (401, "text/html; charset=utf-8")
    assert b'id="verdict"' in page.content
    assert live.status_code == 401
    assert event["models"]


def test_the_page_is_one_file_that_loads_nothing_of_others() -> None:
    body = PAGES["/"].body
    assert b"<!-- include" not in body
    assert body.count(b"<style>") == body.count(b"<script>") == 1
    assert b"src=" not in body
    for address in (b"https://", b'"//'):
        assert address not in body
