"""Measurements of real servers: their own counts are those of the report."""

from __future__ import annotations

import collections
import math
from typing import Any

import anyio
import pytest
from prometheus_client.parser import text_string_to_metric_families

from staged_pool.api.bench.address import Address
from staged_pool.api.bench.bench import FORMAT_VERSION, Bench, Settings
from staged_pool.api.bench.level import Plan
from staged_pool.api.bench.sizes import ImageSize, Range
from staged_pool.api.bench.trace import Row, Trace
from staged_pool.api.bench.workload import Inputs, Target
from staged_pool.runtime.config import EngineConfig
from tests.api.bench.fake_server import CLOSE, Asked, answer, fake_server
from tests.servers.certificates import Certificates
from tests.servers.on_socket import Served, serving
from tests.support.cards import BOTH_LANES, CROSS_ENCODER
from tests.support.gates import Gate
from tests.support.model import LetterModel
from tests.support.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("servers_may_import")]

TEXTS = Inputs(mix={"texts": 1.0}, tokens=Range(20, 60))
OPEN = Plan(rate=100.0, warmup_s=0.1, round_s=0.2, rounds=2)
CLOSED = Plan(clients=3, warmup_s=0.1, round_s=0.2, rounds=2)


async def measured(
    url: str, inputs: Inputs = TEXTS, plan: Plan = OPEN, *, address: Address | None = None, **settings: Any
) -> dict[str, Any]:
    address = address or Address.of(url)
    target = settings.pop("target", {})
    bench = Bench(
        Settings(
            address=address,
            target=Target(authority=address.authority, prefix=address.prefix, **target),
            inputs=inputs,
            plan=plan,
            seed=1,
            **settings,
        )
    )
    await bench.run()
    return bench.report()


async def counts(served: Served, **settings: Any) -> collections.Counter[tuple[str, int]]:
    """The server's own counts of its requests by route and status."""
    async with served.client(**settings) as client:
        text = (await client.get("/metrics")).text
    found: collections.Counter[tuple[str, int]] = collections.Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            # A request that is rejected before its body is read has a series of its own, without a model.
            if sample.name == "staged_pool_http_requests_total" and sample.value:
                found[sample.labels["route"], int(sample.labels["status"])] += int(sample.value)
    return found


def by_route(found: dict[tuple[str, int], int], route: str) -> dict[str, int]:
    summed: dict[str, int] = {}
    for (path, status), number in found.items():
        if path == route:
            summed[str(status)] = summed.get(str(status), 0) + number
    return summed


@pytest.mark.parametrize("plan", [OPEN, CLOSED], ids=["open", "closed"])
async def test_the_counts_of_a_report_are_those_of_the_server(plan: Plan) -> None:
    model = LetterModel()
    async with serving(model) as served:
        report = await measured(served.url, plan=plan)
        theirs = by_route(await counts(served), "/v1/embeddings")
        done = served.engine.statistics().device
    (level,) = report["levels"]
    assert theirs == {"200": report["outcomes"]["200"] + report["probing"]["/v1/embeddings"]["200"]}
    assert level["sent"] == report["outcomes"] == {"200": theirs["200"] - 3}
    if plan.is_open:
        assert level["sent"]["200"] == 50
        assert level["requests"]["due"] == level["requests"]["answered"] == sum(r["due"] for r in level["rounds"])
        assert sum(row["due"] for row in level["timeline"]) == 50
    assert level["server"]["items"] == level["sent"]["200"]
    assert level["server"]["batches"] == sum(done.batches.values()) - 3
    assert level["server"]["coalesced_items"] == 0
    assert report["model"] == "letters"
    assert report["version"] == FORMAT_VERSION
    texts = [text for batch in model.preprocessed for text in batch]
    lengths = [len(text) for text in texts[-level["sent"]["200"] :]]
    assert sum(lengths) / len(lengths) == pytest.approx(40, abs=8)
    assert len(set(texts)) == len(texts)


async def test_stages_are_those_of_server_timing_and_fit_into_the_latency() -> None:
    async with serving() as served:
        report = await measured(served.url)
    (level,) = report["levels"]
    stages = level["stages_ms"]
    assert list(stages) == ["parse", "preprocess", "queue", "device", "postprocess", "rest"]
    assert sum(stages.values()) == pytest.approx(level["latency_ms"]["mean"], rel=0.02)
    assert level["rates"]["tokens"]["value"] > level["rates"]["answered"]["value"]


async def test_rejections_are_no_failures_and_are_counted_as_by_the_server() -> None:
    gate, stalls = Gate(), False
    model = LetterModel(on_forward=lambda texts: gate(texts) if stalls else None)
    async with serving(model, engine=EngineConfig(max_requests=2)) as served, anyio.create_task_group() as tasks:
        reports: list[dict[str, Any]] = []

        async def measure() -> None:
            plan = Plan(rate=200.0, warmup_s=0.0, round_s=0.3, rounds=1, slo_s=0.2)
            reports.append(await measured(served.url, plan=plan, finds_knee=False))

        async def stall() -> None:
            nonlocal stalls
            await until(lambda: served.engine.statistics().admission.admitted >= 6)  # the load has begun
            stalls = True
            await until(lambda: sum(served.engine.statistics().admission.refused.values()) > 0)
            gate.open()

        tasks.start_soon(stall)
        await measure()
        theirs = by_route(await counts(served), "/v1/embeddings")
    (level,) = reports[0]["levels"]
    assert level["requests"]["rejected"] == theirs["429"] > 0
    assert level["requests"]["answered"] == theirs["200"] - 3
    assert level["requests"]["failed"] == 0
    assert sum(level["sent"].values()) == level["requests"]["due"] == 60
    assert level["rejected_p50_ms"] is not None


async def test_images_rankings_and_mixes_are_answered() -> None:
    letters = LetterModel(BOTH_LANES, read_image=lambda data: f"image {data[-9:].hex()}")
    inputs = Inputs(mix={"texts": 0.5, "images": 0.5}, texts_per_request=Range(2, 2), image_size=ImageSize(40, 30))
    async with serving(letters) as served:
        report = await measured(served.url, inputs)
        assert by_route(await counts(served), "/v1/embeddings")["200"] == 50 + 4
    (level,) = report["levels"]
    kinds = level["kinds"]
    assert set(kinds) == {"texts", "images"}
    assert sum(kind["requests"]["answered"] for kind in kinds.values()) == level["requests"]["answered"]
    assert level["server"]["coalesced_items"] == 0
    ranking = Inputs(mix={"rerank": 1.0}, documents=4)
    async with serving(LetterModel(CROSS_ENCODER)) as served:
        report = await measured(served.url, ranking)
        assert by_route(await counts(served), "/v1/rerank") == {"200": 50 + 3}
        assert report["levels"][0]["server"]["items"] == 50 * 4
    assert report["tokens_per_word"]["rerank"]["source"] == "usage"


async def test_texts_of_the_user_are_sent_as_they_are() -> None:
    model = LetterModel()
    lines = ["one", "two words", "three"]
    async with serving(model) as served:
        await measured(served.url, Inputs(mix={"texts": 1.0}, lines=lines))
    sent = [text for batch in model.preprocessed for text in batch]
    assert set(sent) == set(lines)


async def test_servers_with_tls_and_keys_are_measured(certificates: Certificates) -> None:
    async with serving(certificates=certificates, api_keys=("secret",)) as served:
        address = Address.of(served.url, certificates.roots)
        report = await measured(served.url, address=address, target={"api_key": "secret"})
    assert report["outcomes"] == {"200": 50}
    assert "secret" not in str(report)


async def test_a_server_below_a_prefix_is_measured() -> None:
    async with serving(root_path="/below") as served:
        report = await measured(f"{served.url}/below/v1")
    assert report["outcomes"] == {"200": 50}
    assert report["url"].endswith("/below")


async def test_another_server_is_measured_without_what_only_ours_says() -> None:
    def answering(asked: Asked) -> bytes:
        if asked.path != "/v1/embeddings":
            return answer(404, {"detail": "Not Found"})
        return answer(200, {"data": [{"embedding": [0.5]}]})

    async with fake_server(answering) as server:
        report = await measured(server.url)
    (level,) = report["levels"]
    assert report["outcomes"] == {"200": 50}
    assert (level["server"], level["stages_ms"], level["rates"]["tokens"]) == (None, None, None)
    assert report["tokens_per_word"]["texts"]["source"] == "assumed"


async def test_failures_are_counted_by_their_kind() -> None:
    seen = 0

    def answering(asked: Asked) -> bytes:
        nonlocal seen
        if asked.path != "/v1/embeddings":
            return answer(404)
        seen += 1
        if seen <= 3 or seen % 2:
            return answer(200)
        return answer(500) if seen % 4 else b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\n"

    async with fake_server(answering) as server:
        report = await measured(server.url, plan=Plan(rate=100, warmup_s=0.0, round_s=0.4, rounds=1))
    counts = report["levels"][0]["requests"]
    assert sum(report["outcomes"].values()) == counts["due"] == 40
    assert report["outcomes"]["200"] == 20
    assert report["outcomes"]["500"] + report["outcomes"]["broken"] == counts["failed"] == 20


async def test_a_sweep_measures_each_rate_and_finds_no_knee_where_there_is_none() -> None:
    async with serving() as served:
        plan = Plan(warmup_s=0.05, round_s=0.2, rounds=1, slo_s=20.0)
        report = await measured(served.url, plan=plan, sweep=[20.0, 60.0])
    assert [level["planned_rate"] for level in report["levels"]] == [20.0, 60.0]
    assert [level["sent"] for level in report["levels"]] == [{"200": 5}, {"200": 15}]
    assert report["knee"] is None


async def test_the_knee_of_a_server_that_admits_little_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its later requests are rejected, which ends the doubling at once."""

    def answering(asked: Asked) -> bytes:
        if asked.path != "/v1/embeddings":
            return answer(404)
        return answer(200) if len(server.asked) < 30 else answer(429, {}, Retry_After="1")

    monkeypatch.setattr("staged_pool.api.bench.level.LATE_S", math.inf)  # on a busy machine, too
    async with fake_server(answering) as server:
        plan = Plan(rate=40.0, warmup_s=0.0, round_s=0.3, rounds=1, slo_s=20.0)
        report = await measured(server.url, plan=plan, finds_knee=True)
    assert report["knee"]["held"] == 40.0
    assert report["knee"]["over"] > 40.0
    rates = [level["planned_rate"] for level in report["levels"]]
    assert rates == sorted(rates)
    assert max(rates) == 80.0


async def test_an_end_by_the_user_keeps_what_was_measured() -> None:
    async with serving() as served:
        address = Address.of(served.url)
        plan = Plan(rate=100.0, warmup_s=0.0, round_s=60.0, rounds=1)
        bench = Bench(
            Settings(address=address, target=Target(authority=address.authority), inputs=TEXTS, plan=plan, seed=1)
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(bench.run)
            await until(lambda: bool(bench.levels) and bench.levels[0].records.statuses[200] >= 60)
            bench.stop()
        report = bench.report()
        theirs = by_route(await counts(served), "/v1/embeddings")
    (level,) = report["levels"]
    assert (report["interrupted"], level["is_whole"]) == (True, False)
    assert level["requests"]["answered"] >= 60
    # The server need not have seen those that were on their way.
    assert level["sent"]["200"] + 3 <= sum(theirs.values()) <= sum(level["sent"].values()) + 3


async def test_a_trace_is_replayed_at_its_times_and_sizes() -> None:
    model = LetterModel(BOTH_LANES, read_image=lambda data: "image")
    rows = [Row(at_s=i * 0.02, route="/v1/embeddings", items=2, tokens=80, images=0, body_bytes=200) for i in range(10)]
    rows.append(Row(at_s=0.2, route="/v1/embeddings", items=1, tokens=50, images=1, body_bytes=9_000, bulk=True))
    trace = Trace.of(rows)
    plan = Plan(times=[row.at_s for row in rows], warmup_s=0.0, round_s=0.201, rounds=1)
    mix = Inputs(mix={"texts": 0.5, "images": 0.5}, image_size=ImageSize(40, 30))
    async with serving(model) as served:
        report = await measured(served.url, mix, plan, trace=trace)
    (level,) = report["levels"]
    assert level["sent"] == {"200": 11}
    assert level["plan"] == "the times of the trace"
    lengths = [len(text) for batch in model.preprocessed for text in batch if text != "image"][-20:]
    assert sum(lengths) / 20 == pytest.approx(40, abs=8)
    assert [row["due"] for row in level["timeline"]] == [11]


async def test_a_server_that_stops_answering_ends_no_measurement() -> None:
    asked = 0

    def answering(request: Asked) -> bytes:
        nonlocal asked
        asked += request.path == "/v1/embeddings"
        return answer(200) if asked <= 20 else CLOSE

    async with fake_server(answering) as server:
        report = await measured(server.url, plan=Plan(rate=100.0, warmup_s=0.0, round_s=0.4, rounds=1))
    assert report["outcomes"] == {"200": 17, "broken": 23}
    assert report["levels"][0]["server"] is None
