"""The route of the live feed, on real connections: its head, its end, its limit and its count."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
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


async def test_one_key_leaves_places_for_the_others() -> None:
    async with serving(api_keys=("greedy", "modest")) as served, served.client() as client, AsyncExitStack() as stack:

        async def watch(key: str) -> httpx.Response:
            head = {"authorization": f"Bearer {key}"}
            answer = await stack.enter_async_context(client.stream("GET", "/stages/live", headers=head))
            if answer.status_code != 200:
                await answer.aread()
            return answer

        taken = [await watch("greedy") for _ in range(MAX_CLIENTS)]
        statuses = [answer.status_code for answer in taken]
        assert statuses == [200] * (MAX_CLIENTS // 8 * 7) + [503] * (MAX_CLIENTS // 8)
        message = taken[-1].json()["error"]["message"]
        assert message.startswith(f"At most {MAX_CLIENTS} clients may watch the server at once. Of these, the rest is")
        assert taken[-1].headers["retry-after"] == "1"
        others = await watch("modest")
        assert others.status_code == 200
        assert (await next_event(others.aiter_lines()))["models"]


async def test_a_client_that_leaves_gives_its_place_back() -> None:
    async with serving() as served:
        http = served.server.http_statistics
        for _ in range(2):
            async with served.client() as client, AsyncExitStack() as stack:
                for _ in range(MAX_CLIENTS // 8 * 7):
                    answer = await stack.enter_async_context(client.stream("GET", "/stages/live"))
                    assert answer.status_code == 200
                assert (await client.get("/stages/live")).status_code == 503
            await until(lambda: http() is not None and http().live_clients == 0)  # type: ignore[union-attr]


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
