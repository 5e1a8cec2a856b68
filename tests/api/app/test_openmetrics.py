"""Metrics as OpenMetrics: asked for by `Accept`, read by a strict parser, with exemplars of traced requests."""

from __future__ import annotations

import httpx
import pytest
from blockbuster import BlockBuster
from prometheus_client.core import Exemplar
from prometheus_client.parser import text_string_to_metric_families as classic_families

from staged_pool.api.app.metrics import wants_openmetrics
from tests.servers.on_socket import Served, serving
from tests.servers.trace_receiver import collecting
from tests.support.cards import BOTH_LANES
from tests.support.model import LetterModel
from tests.support.openmetrics import openmetrics_families

pytestmark = pytest.mark.anyio

PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,application/openmetrics-text;"
    "version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
"""Header of Prometheus 3."""
DURATIONS = "staged_pool_http_request_duration_seconds"


@pytest.fixture(autouse=True)
def metrics_may_be_read(nothing_blocks_the_event_loop: BlockBuster) -> None:
    """Prometheus' client reads /proc in each scrape."""
    nothing_blocks_the_event_loop.deactivate()


async def scrape(served: Served, accept: str = PROMETHEUS) -> httpx.Response:
    async with served.client() as client:
        return await client.get("/metrics", headers={"accept": accept})


async def ask(served: Served, traceparent: str | None = None) -> None:
    headers = {} if traceparent is None else {"traceparent": traceparent}
    async with served.client() as client:
        assert (await client.post("/v1/embeddings", json={"input": "a"}, headers=headers)).status_code == 200


@pytest.mark.parametrize("accept", ["*/*", "text/plain;version=0.0.4", ""])
async def test_by_default_the_format_is_the_classic_one(accept: str) -> None:
    async with serving() as served:
        response = await scrape(served, accept)
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert "# EOF" not in response.text
    assert list(classic_families(response.text))


async def test_every_family_is_valid_openmetrics() -> None:
    async with serving(LetterModel(BOTH_LANES)) as served:
        await ask(served)
        response, classic = await scrape(served), await scrape(served, "*/*")
    assert response.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert response.text.endswith("# EOF\n")
    found = openmetrics_families(response.text)
    assert found.keys() == {family.name for family in classic_families(classic.text)}
    assert len(found) > 40
    assert found["vllm:num_requests_running"].samples  # a name that gateways read
    for family in found.values():
        assert all(sample.name.startswith(family.name) for sample in family.samples)
        if family.type == "counter":
            assert all(sample.name == f"{family.name}_total" for sample in family.samples)


async def test_a_traced_request_is_the_exemplar_of_its_bucket() -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    async with collecting() as collector:
        async with serving(trace_endpoint=collector.url, trace_ratio=0.0) as served:
            await ask(served)
            assert not _exemplars(await scrape(served))
            await ask(served, f"00-{trace}-00f067aa0ba902b7-01")
            response, classic = await scrape(served), await scrape(served, "*/*")
    ((bound, exemplar),) = _exemplars(response)
    assert exemplar.labels == {"trace_id": trace}
    assert 0 < exemplar.value <= bound
    assert exemplar.timestamp is not None
    assert trace not in classic.text


async def test_without_traces_there_are_no_exemplars() -> None:
    async with serving() as served:
        await ask(served, "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
        assert not _exemplars(await scrape(served))


def _exemplars(response: httpx.Response) -> list[tuple[float, Exemplar]]:
    samples = openmetrics_families(response.text)[DURATIONS].samples
    return [(float(sample.labels["le"]), sample.exemplar) for sample in samples if sample.exemplar is not None]


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        (PROMETHEUS, True),
        ("application/openmetrics-text", True),
        ("text/plain, Application/OpenMetrics-Text; version=1.0.0", True),
        ("application/openmetrics-text-more", False),
        ("text/plain", False),
        ("", False),
    ],
)
def test_the_header_decides(accept: str, wanted: bool) -> None:
    assert wants_openmetrics(accept.encode()) == wanted
