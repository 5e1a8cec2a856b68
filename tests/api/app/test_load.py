"""Load and readiness, as a router sees them: `/load`, `/ready`, gauges, and the header of answers."""

from __future__ import annotations

import base64
import json
from typing import Any

import anyio
import httpx
import pytest
from blockbuster import BlockBuster
from prometheus_client.parser import text_string_to_metric_families

from staged_pool.stages.scheduling.recent_mean import RECENT_S
from staged_pool.stages.scheduling.service_time import LEAST_STALL_S, STALL_LEARNED_BATCHES
from staged_pool.stages.stage import StageOptions
from tests.servers.in_memory import serving_in_memory
from tests.support.cards import BOTH_LANES
from tests.support.gates import Gate
from tests.support.model import LetterModel
from tests.support.waiting import until

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore:Async generator 'httpx:ResourceWarning"),  # the client's own, on trio
]


@pytest.fixture(autouse=True)
def metrics_may_be_read(nothing_blocks_the_event_loop: BlockBuster) -> None:
    """Prometheus' client reads /proc in each scrape."""
    nothing_blocks_the_event_loop.deactivate()


LOAD_FORMAT = "endpoint-load-metrics-format"


class Clock:
    """Time that passes when the test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


async def embed(client: httpx.AsyncClient, text: str = "a", **headers: str) -> httpx.Response:
    return await client.post("/v1/embeddings", json={"input": text}, headers=headers)


async def ready(client: httpx.AsyncClient) -> tuple[int, str]:
    answer = await client.get("/ready")
    return answer.status_code, answer.json().get("reason", "")


def gauges(text: str) -> dict[str, float]:
    """Return the gauges without labels."""
    families = text_string_to_metric_families(text)
    return {sample.name: sample.value for family in families for sample in family.samples if not sample.labels}


class Hanging:
    """A server whose forward of the text "hang" waits at a gate. The test makes time pass."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.gate = Gate()
        self.model = LetterModel(on_forward=self.forward)

    def forward(self, texts: Any) -> None:
        if "hang" in texts:
            self.gate()

    def serving(self) -> Any:
        return serving_in_memory(self.model, options=StageOptions(clock=self.clock))


async def test_a_hanging_forward_turns_readiness_off_until_it_ends() -> None:
    world = Hanging()
    async with world.serving() as served, served.client() as client, anyio.create_task_group() as tasks:
        for _ in range(STALL_LEARNED_BATCHES):
            await embed(client)
        tasks.start_soon(embed, client, "hang")
        await world.gate.arrived()
        world.clock.now += LEAST_STALL_S
        assert await ready(client) == (200, "")
        world.clock.now += 0.9  # two seconds are the promise
        status, reason = await ready(client)
        assert (status, reason) == (
            503,
            "a forward of the text lane has run for 1.9 s, and at most 1.0 s were expected",
        )
        assert [(await client.get(path)).status_code for path in ("/health", "/ping")] == [200, 200]
        assert (await client.get("/.well-known/ready")).status_code == 503
        assert gauges_of_stall(await client.get("/metrics")) == [1.0]
        assert (await client.get("/stages")).json()["models"]["letters"]["stall"] == reason
        assert served.registry.enter() is served.engine, "requests are accepted all the same"
        world.gate.open()
        await until(lambda: served.engine.statistics().admission.requests == 0)
        assert await ready(client) == (200, "")
        assert gauges_of_stall(await client.get("/metrics")) == [0.0]


def gauges_of_stall(answer: httpx.Response) -> list[float]:
    families = text_string_to_metric_families(answer.text)
    return [sample.value for family in families for sample in family.samples if sample.name == "staged_pool_stalled"]


async def test_requests_that_come_during_a_hanging_forward_are_answered_after_it() -> None:
    world = Hanging()
    answers: list[httpx.Response] = []

    async def ask(text: str) -> None:
        answers.append(await embed(client, text))

    async with world.serving() as served, served.client() as client, anyio.create_task_group() as tasks:
        for _ in range(STALL_LEARNED_BATCHES):
            await embed(client)
        tasks.start_soon(ask, "hang")
        await world.gate.arrived()
        world.clock.now += 60.0
        assert (await ready(client))[0] == 503
        tasks.start_soon(ask, "late")
        await until(lambda: served.engine.statistics().admission.requests == 2)
        world.gate.open()
    assert [answer.status_code for answer in answers] == [200, 200]


async def test_a_first_forward_of_any_length_leaves_readiness_alone() -> None:
    world = Hanging()
    async with world.serving() as served, served.client() as client, anyio.create_task_group() as tasks:
        tasks.start_soon(embed, client, "hang")
        await world.gate.arrived()
        world.clock.now += 3600.0
        assert await ready(client) == (200, "")
        world.gate.open()


async def test_a_lane_that_hangs_is_named() -> None:
    clock, gate = Clock(), Gate()
    model = LetterModel(BOTH_LANES, on_forward=lambda texts: gate() if "hang" in texts else None)

    async def see(client: httpx.AsyncClient, letters: bytes) -> None:
        image = {
            "type": "image_url",
            "image_url": {"url": f"data:image/png;base64,{base64.b64encode(letters).decode()}"},
        }
        body = {"messages": [{"role": "user", "content": [image]}]}
        assert (await client.post("/v1/embeddings", json=body)).status_code == 200

    async with (
        serving_in_memory(model, options=StageOptions(clock=clock)) as served,
        served.client() as client,
        anyio.create_task_group() as tasks,
    ):
        for number in range(STALL_LEARNED_BATCHES):
            await see(client, b"%d" % number)
        tasks.start_soon(see, client, b"hang")
        await gate.arrived()
        clock.now += 60.0
        status, reason = await ready(client)
        assert (status, reason.split(" has")[0]) == (503, "a forward of the image lane")
        gate.open()


async def test_the_load_counts_waiting_and_running_requests() -> None:
    world = Hanging()
    async with world.serving() as served, served.client() as client, anyio.create_task_group() as tasks:
        empty = (await client.get("/load")).json()
        assert empty == {
            "server_load": 0, "running": 0, "queued": 0, "requests_per_second": 0.0, "utilization": 0.0,
            "fullness": 0.0, "lanes": {"letters": {"text": {"drain_s": 0.0, "utilization": 0.0}}},
        }  # fmt: skip
        tasks.start_soon(embed, client, "hang")
        await world.gate.arrived()
        for text in ("b", "c"):
            tasks.start_soon(embed, client, text)
        await until(lambda: served.engine.statistics().admission.requests == 3)
        busy = (await client.get("/load")).json()
        seen = gauges((await client.get("/metrics")).text)
        world.gate.open()
    assert (busy["server_load"], busy["running"], busy["queued"]) == (3, 1, 2)
    assert busy["fullness"] == pytest.approx(3 / served.engine.config.max_requests, abs=1e-3)
    for prefix in ("staged_pool_", "vllm:"):
        assert (seen[f"{prefix}num_requests_waiting"], seen[f"{prefix}num_requests_running"]) == (2, 1)
    assert seen["staged_pool_fullness"] == seen["vllm:kv_cache_usage_perc"] > 0


async def test_utilization_and_rate_are_of_the_last_seconds() -> None:
    world = Hanging()
    async with world.serving() as served, served.client() as client, anyio.create_task_group() as tasks:
        tasks.start_soon(embed, client, "hang")
        await world.gate.arrived()
        world.clock.now += 20 * RECENT_S
        assert served.registry.load().utilization == pytest.approx(1.0)
        assert (await client.get("/load")).json()["lanes"]["letters"]["text"]["utilization"] == 1.0
        world.gate.open()
        await until(lambda: served.engine.statistics().admission.requests == 0)
        assert served.registry.load().requests_per_second == pytest.approx(1 / RECENT_S)
        world.clock.now += 20 * RECENT_S
        assert (await client.get("/load")).json()["requests_per_second"] == 0.0
        assert gauges((await client.get("/metrics")).text)["staged_pool_utilization"] == pytest.approx(0.0, abs=1e-6)


async def test_the_header_has_the_load_where_the_request_asks_for_it() -> None:
    async with serving_in_memory(options=StageOptions(clock=Clock())) as served, served.client() as client:
        plain = await embed(client)
        as_json = await embed(client, **{LOAD_FORMAT: "json"})
        as_text = await embed(client, **{LOAD_FORMAT: "TEXT"})
        unknown = await embed(client, **{LOAD_FORMAT: "BIN"})
        in_lines = await embed(client, **{LOAD_FORMAT: "JSON", "accept": "application/x-ndjson"})
    assert "endpoint-load-metrics" not in plain.headers
    assert "endpoint-load-metrics" not in unknown.headers
    kind, report = as_json.headers["endpoint-load-metrics"].split(" ", 1)
    assert (kind, [*json.loads(report)]) == ("JSON", ["rps_fractional", "application_utilization", "named_metrics"])
    assert json.loads(report)["rps_fractional"] == round(2 / RECENT_S, 3)  # its own request included
    kind, report = as_text.headers["endpoint-load-metrics"].split(" ", 1)
    assert (kind, [pair.split("=")[0] for pair in report.split(",")]) == (
        "TEXT",
        ["rps_fractional", "application_utilization", "named_metrics.num_requests_waiting"],
    )
    assert in_lines.headers["endpoint-load-metrics"].startswith("JSON {")


async def test_with_its_setting_every_answer_has_the_header() -> None:
    async with serving_in_memory(load_header=True) as served, served.client() as client:
        headers = [(await embed(client)).headers, (await client.post("/v1/embeddings", json={})).headers]
    assert all(each["endpoint-load-metrics"].startswith("JSON {") for each in headers)
