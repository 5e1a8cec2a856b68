"""Traces of a server of several processes: fronts write the spans of requests, the engine process those of batches."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.samples import Sample

from tests.servers.process import ServerProcess, serve_command
from tests.servers.tiny_models import folder
from tests.servers.trace_receiver import attributes, collecting_in_threads
from tests.support.openmetrics import openmetrics_families

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_requests_of_fronts_and_batches_of_the_engine_process_have_spans(backend: str, tmp_path: Path) -> None:
    with collecting_in_threads() as collector:
        flags = ("--backend", backend, "--trace-endpoint", collector.url, "--trace-ratio", "0", "--api-servers", "2")
        model = ("--model", str(folder("embedder")), "--torch-threads", "1", "--preprocess-limit", "1")
        with ServerProcess(serve_command(*model, *flags), tmp_path / "log") as server:
            server.wait_ready()
            for span in range(1, 5):
                _ask(server, f"00-{TRACE}-{span:016x}-01")
            _ask(server, f"00-{TRACE}-{9:016x}-00")
            durations = _durations(server, count=5)
            assert server.end() == 0
    requests = collector.requests
    assert [span.parent_span_id.hex() for span in requests] == [f"{span:016x}" for span in range(1, 5)]
    for span in requests:
        below = collector.below(span)
        assert list(below) == ["parse", "preprocess", "queue", "device", "postprocess"]
        times = [(each.start_time_unix_nano, each.end_time_unix_nano) for each in below.values()]
        assert times == sorted(times)
    batches = [span for span in collector.spans if span.name == "batch text"]
    linked = [(link.trace_id.hex(), link.span_id) for span in batches for link in span.links]
    assert sorted(linked) == sorted((TRACE, span.span_id) for span in requests)
    models = {attributes(span)["gen_ai.response.model"] for span in (*requests, *batches)}
    assert len(models) == 1
    assert len({resource["process.pid"] for resource in collector.resources}) >= 2
    exemplars = [sample.exemplar for sample in durations if sample.exemplar is not None]
    assert {exemplar.labels["trace_id"] for exemplar in exemplars} == {TRACE}


def _ask(server: ServerProcess, traceparent: str) -> None:
    headers = {"traceparent": traceparent, "content-type": "application/json"}
    body = json.dumps({"input": f"a text for {traceparent}"}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}/v1/embeddings", body, headers)
    with urllib.request.urlopen(request, timeout=30) as response:
        assert response.status == 200


def _durations(server: ServerProcess, *, count: int) -> list[Sample]:
    """Return the durations of a route, once the fronts have reported `count` requests."""
    headers = {"accept": "application/openmetrics-text"}
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}/metrics", headers=headers)
    found: list[Sample] = []

    def all_reported() -> bool:
        with urllib.request.urlopen(request, timeout=30) as response:
            families = openmetrics_families(response.read().decode())
        durations = families["staged_pool_http_request_duration_seconds"].samples
        found[:] = [sample for sample in durations if sample.labels["route"] == "/v1/embeddings"]
        return sum(sample.value for sample in found if sample.name.endswith("_count")) == count

    server.wait_until(all_reported)
    return found
