"""The routes on a real engine with a known model, without sockets."""

from __future__ import annotations

import gc
import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import msgspec
import pytest
from blockbuster import BlockBuster
from prometheus_client.parser import text_string_to_metric_families

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.requests import Chat
from staged_pool.stages.errors import DeviceLost
from tests.servers.in_memory import InMemory, serving_in_memory
from tests.support.cards import CARD
from tests.support.gates import Gate
from tests.support.model import LetterModel, expected
from tests.support.waiting import until

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore:Async generator 'httpx:ResourceWarning"),  # the client's own, on trio
]

Logged = list[dict[str, Any]]


def finished(logged: Logged) -> dict[str, Any]:
    """The one line of the only request."""
    [line] = [event for event in logged if event["event"] == "request.finished"]
    return line


async def test_embeddings_are_those_of_the_engine() -> None:
    async with serving_in_memory() as served, served.client() as client:
        response = await client.post("/v1/embeddings", json={"input": ["a", "bc"]})
    assert response.status_code == 200
    assert [row["embedding"] for row in response.json()["data"]] == [expected(t).tolist() for t in ("a", "bc")]
    assert response.json()["usage"]["prompt_tokens"] == 3
    assert response.json()["model"] == "letters"


async def test_the_answer_says_where_the_time_went() -> None:
    async with serving_in_memory() as served, served.client() as client:
        response = await client.post("/v1/embeddings", json={"input": "a"})
    stages = re.findall(r"(\w+);dur=[\d.]+", response.headers["server-timing"])
    assert stages == ["parse", "preprocess", "queue", "device", "postprocess"]


async def test_one_line_is_logged_for_a_request_and_holds_none_of_its_input(logged: Logged) -> None:
    async with serving_in_memory() as served, served.client() as client:
        answer = await client.post(
            "/v1/embeddings?q=1", json={"input": ["secret", "b"]}, headers={"x-request-id": "r1"}
        )
    line = finished(logged)
    assert "secret" not in str(line)
    times = {name: line.pop(name) for name in list(line) if name.endswith("_ms")}
    assert set(times) == {f"{name}_ms" for name in ("parse", "preprocess", "queue", "device", "postprocess", "total")}
    assert all(value >= 0 for value in times.values())
    assert line == {
        "event": "request.finished",
        "log_level": "info",
        "method": "POST",
        "path": "/v1/embeddings",
        "status": 200,
        "path_taken": "general",
        "model": "letters",
        "items": 2,
        "tokens": 7,
        "answer_bytes": len(answer.content),
        "body_bytes": len(json.dumps({"input": ["secret", "b"]}, separators=(",", ":"))),
        "request_id": "r1",
    }


@pytest.mark.parametrize("given", ["abc-1", "x" * 128])
async def test_a_request_id_is_echoed(given: str) -> None:
    async with serving_in_memory() as served, served.client() as client:
        response = await client.post("/v1/embeddings", json={"input": "a"}, headers={"x-request-id": given})
    assert response.headers["x-request-id"] == given
    assert response.json()["id"] == f"embd-{given}"


@pytest.mark.parametrize("given", [b"x" * 129, b"a b", b"\xc3\xa9", b""])
async def test_a_bad_request_id_is_replaced(given: bytes) -> None:
    async with serving_in_memory() as served, served.client() as client:
        response = await client.get("/health", headers={b"x-request-id": given})
    assert re.fullmatch("[0-9a-f]{32}", response.headers["x-request-id"])


@pytest.mark.parametrize("content_type", ["text/plain", "*/*", "application/jsonp", "text/x+json"])
async def test_only_json_is_read(content_type: str) -> None:
    async with serving_in_memory() as served, served.client() as client:
        response = await client.post("/v1/embeddings", content=b"{}", headers={"content-type": content_type})
    assert response.status_code == 415
    assert response.json()["error"]["message"].startswith("Unsupported Media Type: Only 'application/json' is allowed")


@pytest.mark.parametrize(
    "content_type", ["Application/JSON; charset=utf-8", "", " ; charset=utf-8", "application/vnd.api+json;v=1"]
)
async def test_json_may_have_parameters_and_types_that_are_written_as_it(content_type: str) -> None:
    async with serving_in_memory() as served, served.client() as client:
        response = await client.post("/v1/embeddings", content=b'{"input":"a"}', headers={"content-type": content_type})
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "param", "index"),
    [
        ({"input": ""}, 400, "input", 0),
        ({"input": []}, 400, "input", None),
        ({"input": ["a", 1]}, 400, "input", 1),
        ({"input": "a", "dimensions": 5}, 400, "dimensions", None),
        ({"input": "a", "model": "other"}, 404, "model", None),
        ({"input": ["a"] * 9}, 413, "input", None),
        ({"input": ["a", "NaN"]}, 424, None, 1),
    ],
)
async def test_an_error_of_the_engine_becomes_its_status(
    body: object, status: int, param: str | None, index: int | None, logged: Logged
) -> None:
    async with serving_in_memory(engine=EngineConfig(max_request_items=8)) as served, served.client() as client:
        response = await client.post("/v1/embeddings", json=body)
    assert response.status_code == status
    assert response.json()["error"]["code"] == status
    assert response.json()["error"]["param"] == param
    assert response.json()["error"].get("index") == index
    assert finished(logged)["status"] == status
    assert finished(logged)["error"]


async def test_a_full_engine_answers_429_with_a_retry_hint() -> None:
    gate = Gate()
    async with (
        serving_in_memory(LetterModel(on_preprocess=gate), engine=EngineConfig(max_requests=1)) as served,
        served.client() as client,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(lambda: client.post("/v1/embeddings", json={"input": "a"}))
        await gate.arrived()
        response = await client.post("/v1/embeddings", json={"input": "b"})
        gate.open()
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1


async def test_rejections_for_overload_share_their_log_lines(logged: Logged) -> None:
    gate = Gate()
    async with (
        serving_in_memory(LetterModel(on_forward=gate), engine=EngineConfig(max_requests=1)) as served,
        served.client() as client,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(lambda: client.post("/v1/embeddings", json={"input": "a"}))
        await gate.arrived()
        answers = [await client.post("/v1/embeddings", json={"input": "b"}) for _ in range(20)]
        gate.open()
    assert {answer.status_code for answer in answers} == {429}
    lines = [line for line in logged if line["event"] == "request.finished" and line["status"] == 429]
    assert 1 <= len(lines) < 20
    assert len(lines) + sum(line.get("rejections_left_out", 0) for line in lines) <= 20
    assert {line["reason"] for line in lines} == {"The server is at its limit of 1 requests in flight."}


async def test_a_request_that_takes_longer_than_its_client_waits_is_answered_504() -> None:
    gate = Gate()
    async with serving_in_memory(LetterModel(on_preprocess=gate)) as served, served.client() as client:
        headers = {"x-request-timeout": "0.01"}
        response = await client.post("/v1/embeddings", json={"input": "a"}, headers=headers)
        gate.open()
    assert response.status_code == 504


@pytest.mark.parametrize("headers", [{"x-request-timeout": "0.5"}, {"prefer": "respond-async, wait=0.5"}])
async def test_both_headers_set_the_time_that_a_client_waits(headers: dict[str, str]) -> None:
    gate = Gate()
    async with serving_in_memory(LetterModel(on_forward=gate)) as served, served.client() as client:
        response = await client.post("/v1/embeddings", json={"input": "a"}, headers=headers)
        gate.open()
    assert response.status_code == 504
    assert "stage" in response.json()["error"]["message"]


@pytest.mark.parametrize("timeout", ["0", "-1", "nan", "inf", "1e308", "soon", ""])
@pytest.mark.parametrize(
    ("header", "form", "param"),
    [("x-request-timeout", "{}", "X-Request-Timeout"), ("prefer", "wait={}", "Prefer: wait")],
)
async def test_a_timeout_must_be_a_number_of_seconds(timeout: str, header: str, form: str, param: str) -> None:
    async with serving_in_memory() as served, served.client() as client:
        response = await client.post("/v1/embeddings", json={"input": "a"}, headers={header: form.format(timeout)})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_a_bug_is_answered_500_and_logged_with_its_traceback(logged: Logged) -> None:
    class Broken(LetterModel):
        def tokenize(self, source: str | Chat, *, add_special_tokens: bool) -> Any:
            raise ZeroDivisionError("secret")

    async with serving_in_memory(Broken()) as served, served.client() as client:
        response = await client.post("/tokenize", json={"prompt": "a"})
    assert response.status_code == 500
    assert "secret" not in response.text
    assert any(event["event"] == "request.crashed" and event["exc_info"] for event in logged)


GOOD = {"input": ["a", "bc"]}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/embeddings", GOOD, 200),
        ("/v1/embeddings", {"input": ["a", ""]}, 400),
        ("/v1/embeddings", {"input": 1}, 400),
        ("/v1/embeddings", GOOD | {"model": "other"}, 404),
        ("/v1/embeddings", GOOD, 429),
        ("/v1/embeddings", GOOD, 504),
        ("/tokenize", {"prompt": "ab"}, 200),
        ("/nowhere", {}, 404),
    ],
)
async def test_a_request_leaves_nothing_to_the_garbage_collector(
    path: str, body: dict[str, Any], status: int, garbage: Callable[[], set[str]]
) -> None:
    """A collection stops every thread, for a tenth of a second where much has gathered."""
    gate = Gate()
    model = LetterModel(on_forward=gate) if status in {429, 504} else LetterModel()
    engine = EngineConfig(max_requests=1) if status in {429, 504} else EngineConfig()
    async with (
        serving_in_memory(model, engine=engine) as served,
        served.client() as client,
        anyio.create_task_group() as tasks,
    ):
        if status == 429:
            tasks.start_soon(lambda: client.post("/v1/embeddings", json=GOOD))
            await gate.arrived()
        garbage()
        headers = {"x-request-timeout": "0.01"} if status == 504 else {}
        answer = await client.post(path, json=body, headers=headers)
        gate.open()
        left = garbage()
    assert answer.status_code == status
    assert left == set()


@pytest.fixture
def garbage() -> Iterator[Callable[[], set[str]]]:
    """Collect garbage with `gc`; return the names of this project's types that were in it."""

    def collect() -> set[str]:
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        types = {type(each) for each in gc.garbage}
        gc.set_debug(0)
        gc.garbage.clear()
        gc.collect()
        return {one.__qualname__ for one in types if one.__module__.startswith("staged_pool.")}

    gc.disable()
    gc.collect()
    gc.freeze()  # ignore the objects that exist already
    try:
        yield collect
    finally:
        gc.enable()


async def test_a_cancelled_request_is_logged_as_abandoned(logged: Logged) -> None:
    gate = Gate()
    async with serving_in_memory(LetterModel(on_preprocess=gate)) as served, served.client() as client:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: client.post("/v1/embeddings", json={"input": "a"}))
            await gate.arrived()
            tasks.cancel_scope.cancel()
        gate.open()
    assert (finished(logged)["status"], finished(logged)["error"]) == (499, "abandoned")


async def test_tokenize_gives_ids_and_strings() -> None:
    async with serving_in_memory() as served, served.client() as client:
        response = await client.post("/tokenize", json={"prompt": "ab", "return_token_strs": True})
        unknown = await client.post("/tokenize", json={"prompt": "ab", "model": "other"})
    assert response.json() == {"count": 2, "max_model_len": 512, "tokens": [97, 98], "token_strs": ["a", "b"]}
    assert unknown.status_code == 404


async def test_the_first_model_listed_is_the_one_served() -> None:
    async with serving_in_memory() as served, served.client() as client:
        response = await client.get("/v1/models")
    assert response.json()["data"][0]["id"] == "letters"


async def test_an_unknown_route_is_404_and_names_the_nearest(logged: Logged) -> None:
    async with serving_in_memory() as served, served.client() as client:
        response = await client.post("/v1/embedings")
    assert (response.status_code, response.json()["detail"]) == (404, "Not Found")
    assert "POST /v1/embedings" in response.json()["error"]["message"]
    assert "Did you mean /v1/embeddings" in response.json()["error"]["message"]
    assert finished(logged)["error"] == "route"


@pytest.mark.parametrize(("method", "path", "allow"), [("GET", "/tokenize", "POST"), ("PUT", "/ready", "GET, HEAD")])
async def test_a_wrong_method_is_answered_with_the_right_ones(method: str, path: str, allow: str) -> None:
    async with serving_in_memory() as served, served.client() as client:
        response = await client.request(method, path)
    assert (response.status_code, response.headers["allow"]) == (405, allow)


async def test_ready_shows_the_model() -> None:
    async with serving_in_memory() as served, served.client() as client:
        response = await client.get("/ready")
    assert (response.status_code, response.json()) == (
        200,
        {"ready": True, "models": [json.loads(msgspec.json.encode(CARD))]},
    )


async def test_before_the_engine_is_there_probes_answer_and_requests_are_put_off(
    nothing_blocks_the_event_loop: BlockBuster,
) -> None:
    nothing_blocks_the_event_loop.deactivate()  # process metrics read /proc
    async with InMemory().client() as client:
        health = await client.get("/health")
        ready = await client.get("/ready")
        embeddings = await client.post("/v1/embeddings", json={"input": "a"})
        stages = await client.get("/stages")
        metrics = await client.get("/metrics")
    assert health.status_code == 200
    assert abs(health.json()["unix"] - time.time()) < 3600
    assert (ready.status_code, ready.json()) == (503, {"ready": False, "reason": "loading the model"})
    assert embeddings.status_code == stages.status_code == 503
    assert int(embeddings.headers["retry-after"]) == int(ready.headers["retry-after"]) == 5
    assert "staged_pool_ready 0.0" in metrics.text


async def test_a_closed_registry_admits_nobody_and_asks_clients_to_close_their_connections() -> None:
    async with serving_in_memory() as served, served.client() as client:
        served.registry.close("the server is draining")
        ready = await client.get("/ready")
        embeddings = await client.post("/v1/embeddings", json={"input": "a"})
    assert ready.json()["reason"] == "the server is draining"
    assert (embeddings.status_code, embeddings.headers["connection"]) == (503, "close")


async def test_the_snapshot_shows_what_is_in_flight() -> None:
    gate = Gate()
    async with (
        serving_in_memory(LetterModel(on_preprocess=gate)) as served,
        served.client() as client,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(lambda: client.post("/v1/embeddings", json={"input": "a"}))
        await gate.arrived()
        snapshot = (await client.get("/stages")).json()["models"]["letters"]
        gate.open()
    assert snapshot["admission"]["requests"] == 1
    assert [stage["name"] for stage in snapshot["stages"]] == ["parse", "preprocess", "batch", "postprocess"]
    assert snapshot["stages"][1]["busy"] == 1


async def test_metrics_are_prometheus_text_and_add_up(nothing_blocks_the_event_loop: BlockBuster) -> None:
    nothing_blocks_the_event_loop.deactivate()
    async with serving_in_memory() as served, served.client() as client:
        await client.post("/v1/embeddings", json={"input": ["a", "bc"]})
        await client.post("/v1/embeddings", json={"input": []})
        await client.get("/a/path/of/the/clients/choice")
        text = (await client.get("/metrics")).text
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["staged_pool_ready",] == 1
    assert samples["staged_pool_stage_items_total", "batch", "letters"] == 2
    assert samples["staged_pool_stage_wait_seconds_count", "batch", "letters"] > 0
    assert samples["staged_pool_stage_wait_seconds_bucket", "+Inf", "batch", "letters"] > 0
    assert samples["staged_pool_device_tokens_total", "letters"] == 3
    assert samples["staged_pool_batches_total", "demand", "letters"] >= 1
    assert samples["staged_pool_admission_inside", "letters", "requests"] == 0
    assert samples["staged_pool_lane_tokens", "letters", "text"] == 0
    assert samples["staged_pool_http_requests_total", "/v1/embeddings", "200", "general", "letters"] == 1
    assert samples["staged_pool_http_requests_total", "/v1/embeddings", "400", "general", "letters"] == 1
    assert samples["staged_pool_http_requests_total", "", "404", "general", "other"] == 1
    assert samples["staged_pool_http_request_duration_seconds_count", "/v1/embeddings", "letters"] == 2
    assert samples["staged_pool_request_items_sum", "/v1/embeddings", "letters"] == 2
    assert samples["staged_pool_request_tokens_sum", "/v1/embeddings", "letters"] == 3
    assert samples["staged_pool_batch_items_sum", "letters", "text"] == 2
    assert samples["staged_pool_refused_total", "delay", "letters"] == 0
    assert samples["process_resident_memory_bytes",] > 0
    assert "choice" not in text


async def test_two_servers_in_one_process_count_for_themselves(nothing_blocks_the_event_loop: BlockBuster) -> None:
    nothing_blocks_the_event_loop.deactivate()
    async with InMemory().client() as one, InMemory().client() as other:
        await one.get("/health")
        text = (await other.get("/metrics")).text
    assert '/health"' not in text


async def test_a_broken_engine_makes_the_server_unready() -> None:
    def lose(texts: object) -> None:
        raise DeviceLost("gone")

    async with serving_in_memory(LetterModel(on_forward=lose)) as served, served.client() as client:
        response = await client.post("/v1/embeddings", json={"input": "a"})
        await until(lambda: served.engine.fault is not None)
        ready = await client.get("/ready")
    assert response.status_code == 503
    assert (ready.status_code, "gone" in ready.json()["reason"]) == (503, True)


@pytest.mark.parametrize(("given", "status"), [("interactive", 200), ("Bulk", 200), ("low", 400), ("", 400)])
async def test_a_request_says_how_urgent_it_is(given: str, status: int) -> None:
    async with serving_in_memory() as served, served.client() as client:
        response = await client.post("/v1/embeddings", json={"input": "a"}, headers={"x-priority": given})
    assert response.status_code == status
    if status == 400:
        assert response.json()["error"]["message"] == "X-Priority: expected interactive or bulk"


@pytest.mark.parametrize(
    ("given", "logged_as"),
    [(f"00-{'ab' * 16}-{'cd' * 8}-01", "ab" * 16), (f"00-{'AB' * 16}-{'cd' * 8}-01", None), ("x", None)],
)
async def test_the_trace_of_the_client_is_logged(given: str, logged_as: str | None, logged: Logged) -> None:
    async with serving_in_memory() as served, served.client() as client:
        await client.post("/v1/embeddings", json={"input": "a"}, headers={"traceparent": given})
    assert finished(logged).get("trace_id") == logged_as


async def test_a_large_answer_is_sent_in_pieces_and_is_whole() -> None:
    texts = ["a" * length for length in range(1, 100)] * 100
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": json.dumps({"input": texts}).encode(), "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/embeddings",
        "raw_path": b"/v1/embeddings",
        "headers": [(b"content-type", b"application/json")],
        "http_version": "1.1",
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
    }
    async with serving_in_memory(engine=EngineConfig(max_request_items=20_000, max_tokens=10**8)) as served:
        await served.application(scope, receive, send)
    head, *pieces = sent
    body = b"".join(piece["body"] for piece in pieces)
    assert len(pieces) > 2
    assert [piece.get("more_body", False) for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    assert dict(head["headers"])[b"content-length"] == str(len(body)).encode()
    rows = json.loads(body)["data"]
    assert [row["index"] for row in rows] == list(range(len(texts)))
    assert rows[-1]["embedding"] == expected(texts[-1]).tolist()
