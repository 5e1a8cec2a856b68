"""Batches over HTTP: their statuses, results, cancellation and expiry."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from staged_pool import asgi
from staged_pool.api.app.batch_service import Batches
from staged_pool.api.bulk.job import Window
from staged_pool.api.http.listener import bind
from staged_pool.runtime.config import EngineConfig
from staged_pool.stages.errors import ConfigError
from staged_pool.stages.scheduling.entries import Priority
from tests.api.batches.asking import Asking, request, requests
from tests.runtime.test_zero_shot import NLI
from tests.servers.engines import engine_on
from tests.servers.on_socket import Served, server_on, serving
from tests.support.cards import EMBEDDER
from tests.support.gates import Gate
from tests.support.model import LetterModel
from tests.support.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("servers_may_import")]

LINES = 300
"""Lines of a batch that is not done at once; see `narrow_window`."""


@pytest.fixture
def narrow_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few lines of a batch are under way at once: a file with more than those is soon made and read."""
    monkeypatch.setattr("staged_pool.api.batches.runner.BATCH_WINDOW", Window(lines=64))


@asynccontextmanager
async def asking(folder: Path, *models: LetterModel, **config: Any) -> AsyncIterator[tuple[Served, Asking]]:
    """A server with a folder for batches, and a client of it."""
    async with serving(*models, batch_dir=folder, **config) as served, served.client() as client:
        yield served, Asking(client)


async def test_a_batch_is_answered_as_the_route_answers(tmp_path: Path) -> None:
    async with asking(tmp_path) as (_, client):
        batch = await client.create(requests(40), metadata={"for": "a test"})
        assert batch["status"] == "validating"
        assert (batch["object"], batch["metadata"]) == ("batch", {"for": "a test"})
        assert batch["expires_at"] - batch["created_at"] == 86_400
        batch = await client.ended(batch["id"])
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
        assert batch["created_at"] <= batch["in_progress_at"] <= batch["finalizing_at"] <= batch["completed_at"]
        assert (batch["error_file_id"], batch["errors"], batch["failed_at"]) == (None, None, None)
        lines = {line["custom_id"]: line for line in await client.content(batch["output_file_id"])}
        assert len(lines) == 40
        for number in (0, 39):
            sent = await client.post("/v1/embeddings", {"input": f"text {number}"})
            line = lines[f"r{number}"]
            assert line["response"]["body"]["data"] == sent["data"]
            assert (line["response"]["status_code"], line["error"]) == (200, None)
        output = await client.get(f"/v1/files/{batch['output_file_id']}")
        assert (output["purpose"], output["filename"]) == ("batch_output", f"{batch['id']}_output.jsonl")


async def test_a_repeated_custom_id_fails_alone(tmp_path: Path) -> None:
    lines = [request("a", {"input": "one"}), request("b", {"input": "two"}), request("a", {"input": "three"})]
    async with asking(tmp_path) as (_, client):
        batch = await client.ended((await client.create(b"\n".join(lines)))["id"])
        assert (batch["status"], batch["request_counts"]) == ("completed", {"total": 3, "completed": 2, "failed": 1})
        answered = {line["custom_id"]: line for line in await client.content(batch["output_file_id"])}
        (failed,) = await client.content(batch["error_file_id"])
        sent = await client.post("/v1/embeddings", {"input": "one"})
    assert answered["a"]["response"]["body"]["data"] == sent["data"]
    assert (failed["custom_id"], failed["error"]["code"], failed["error"]["line"]) == ("a", "duplicate_custom_id", 3)


async def test_lines_choose_among_labels_of_their_own(tmp_path: Path) -> None:
    labels = {"candidate_labels": ["c", "acca"], "multi_label": True}
    bodies: dict[str, list[dict[str, Any]]] = {
        "/classify": [{"input": ["cc", "d"], **labels}, {"input": "cc", "candidate_labels": []}],
        "/predict": [
            {"inputs": ["cc", "d"], "parameters": labels},
            {"inputs": "cc", "parameters": {"candidate_labels": []}},
        ],
    }
    async with asking(tmp_path, LetterModel(NLI)) as (_, client):
        for url, (good, bad) in bodies.items():
            lines = [request("good", good, url=url), request("bad", bad, url=url)]
            batch = await client.ended((await client.create(b"\n".join(lines), endpoint=url))["id"])
            assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
            (line,) = await client.content(batch["output_file_id"])
            sent, found = await client.post(url, good), line["response"]["body"]
            assert (found, len(found)) == (sent, 2) if url == "/predict" else found["data"] == sent["data"]
            (line,) = await client.content(batch["error_file_id"])
            assert line["response"]["status_code"] == (await client.send("POST", url, json=bad)).status_code
            assert ("candidate_labels" in str(line["response"]["body"])) is True


async def test_a_bad_line_fails_alone_and_says_why(tmp_path: Path) -> None:
    lines = [
        request("good", {"input": "a"}),
        b"{not json",
        b"[" * 5000 + b"]" * 5000,
        request("deep", {"input": "a"}).replace(b'"a"', b"[" * 5000 + b"]" * 5000),
        b"",
        request("", {"input": "a"}),
        request("other", {"input": "a"}, url="/v1/rerank"),
        request("get", {"input": "a"}, method="GET"),
        request("empty", {"input": []}),
        request("model", {"input": "NaN"}),
        request("also good", {"input": ["a", "b"]}),
    ]
    async with asking(tmp_path) as (_, client):
        batch = await client.ended((await client.create(b"\n".join(lines)))["id"])
        assert (batch["status"], batch["request_counts"]) == ("completed", {"total": 10, "completed": 2, "failed": 8})
        output = await client.content(batch["output_file_id"])
        assert {line["custom_id"] for line in output} == {"good", "also good"}
        errors = await client.content(batch["error_file_id"])
        faults = {line["error"]["line"]: line["error"]["code"] for line in errors if line["error"]}
        assert faults == {
            2: "invalid_json_line",
            3: "invalid_json_line",
            4: "invalid_json_line",
            6: "missing_custom_id",
            7: "mismatched_endpoint",
            8: "invalid_method",
        }
        (deep,) = (line["error"]["message"] for line in errors if line["error"] and line["error"]["line"] == 3)
        assert "nested too deeply: more than 128 lists and objects inside one another, from line 3, column 129" in deep
        statuses = {line["custom_id"]: line["response"]["status_code"] for line in errors if line["response"]}
        assert statuses == {"empty": 400, "model": 424}


@pytest.mark.parametrize(
    ("content", "codes"),
    [
        (b"", ["empty_file"]),
        (b"\n \n\r\n", ["empty_file"]),
        (b"no\njson\n", ["invalid_json_line", "invalid_json_line"]),
        (requests(5), ["too_many_requests"]),
        (requests(3).decode().encode("utf-16"), ["invalid_encoding"]),
        (requests(3).decode().encode("utf-16-le"), ["invalid_encoding"]),
    ],
)
async def test_a_file_that_cannot_be_run_fails_with_its_lines(
    tmp_path: Path, content: bytes, codes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("staged_pool.api.batches.check.MOST_LINES", 4)
    async with asking(tmp_path) as (_, client):
        batch = await client.ended((await client.create(content))["id"])
        assert (batch["status"], batch["output_file_id"], batch["error_file_id"]) == ("failed", None, None)
        assert [fault["code"] for fault in batch["errors"]["data"]] == codes
        assert batch["failed_at"] >= batch["created_at"]
        file = await client.get(f"/v1/files/{batch['input_file_id']}")
        assert (await client.send("DELETE", f"/v1/files/{file['id']}")).json()["deleted"] is True


@pytest.mark.usefixtures("narrow_window")
async def test_a_cancelled_batch_gives_what_it_has_done_and_names_the_rest(tmp_path: Path) -> None:
    gate = Gate()
    async with asking(tmp_path, LetterModel(on_forward=gate)) as (served, client):
        try:
            batch = await client.create(requests(LINES))
            await gate.arrived()
            assert served.engine.statistics().priorities[Priority.BULK].requests > 0
            assert (await client.get(f"/v1/batches/{batch['id']}"))["request_counts"]["total"] == LINES
            for _ in range(2):  # a client may ask again
                assert (await client.post(f"/v1/batches/{batch['id']}/cancel"))["status"] == "cancelling"
        finally:
            gate.open()
        batch = await client.ended(batch["id"])
        assert (batch["status"], batch["cancelled_at"] >= batch["cancelling_at"]) == ("cancelled", True)
        counts = batch["request_counts"]
        assert 0 < counts["completed"] < counts["total"] == counts["completed"] + counts["failed"]
        done = [line["custom_id"] for line in await client.content(batch["output_file_id"])]
        rest = await client.content(batch["error_file_id"])
        assert {line["error"]["code"] for line in rest} == {"batch_cancelled"}
        assert sorted([*done, *(line["custom_id"] for line in rest)]) == sorted(f"r{n}" for n in range(LINES))
        answer = await client.send("POST", f"/v1/batches/{batch['id']}/cancel")
        assert answer.status_code == 200  # it is cancelled, as asked
        await served.assert_alive()


@pytest.mark.usefixtures("narrow_window")
async def test_a_batch_that_is_too_late_gives_what_it_has_done(tmp_path: Path) -> None:
    gate = Gate()
    async with asking(tmp_path, LetterModel(on_forward=gate)) as (served, client):
        try:
            batch = await client.create(requests(LINES), completion_window="2h")
            await gate.arrived()
            _batches(served).store.clock = lambda: float(batch["expires_at"])
            runner = _batches(served).runner
            await until(lambda: any(control.reason == "expired" for control in runner._running.values()))
        finally:
            gate.open()
        batch = await client.ended(batch["id"])
        assert (batch["status"], batch["expired_at"] >= batch["expires_at"]) == ("expired", True)
        assert batch["request_counts"]["completed"] > 0
        rest = await client.content(batch["error_file_id"])
        assert {line["error"]["code"] for line in rest} == {"batch_expired"}
        assert len(rest) == batch["request_counts"]["failed"] > 0


@pytest.mark.usefixtures("narrow_window")
async def test_a_batch_whose_output_has_no_room_fails_with_what_it_has_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("staged_pool.api.batches.runner.DISK_CHECK_S", 0.0)
    gates = [Gate(), Gate()]
    forwards = iter(gates)
    model = LetterModel(on_forward=lambda texts: next(forwards, lambda: None)())
    async with asking(tmp_path, model) as (served, client):
        try:
            batch = await client.create(requests(LINES))
            await gates[0].arrived()
            _batches(served).store.disk.limit_bytes = _batches(served).store.disk.held_bytes + 1000
            gates[0].open()
            runner = _batches(served).runner
            await gates[1].arrived()
            await until(lambda: any(control.reason == "full" for control in runner._running.values()))
        finally:
            for gate in gates:
                gate.open()
        batch = await client.ended(batch["id"])
        assert (batch["status"], batch["errors"]["data"][0]["code"]) == ("failed", "storage_full")
        counts = batch["request_counts"]
        assert counts["completed"] + counts["failed"] == LINES
        assert {line["error"]["code"] for line in await client.content(batch["error_file_id"])} == {"storage_full"}


async def test_interactive_requests_go_before_those_of_a_batch(tmp_path: Path) -> None:
    gate = Gate()
    model = LetterModel(on_forward=gate)
    engine = EngineConfig(max_batch_tokens=64)
    async with asking(tmp_path, model, engine=engine) as (_, client):
        try:
            batch = await client.create(requests(300))
            await gate.arrived()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(client.post, "/v1/embeddings", {"input": "at once"})
                await until(lambda: any("at once" in texts for texts in model.preprocessed))
                gate.open()
        finally:
            gate.open()
        place = next(place for place, texts in enumerate(model.forwarded) if "at once" in texts)
        await client.ended(batch["id"])
        assert place < len(model.forwarded) / 2


@pytest.mark.usefixtures("narrow_window")
async def test_a_server_that_ends_in_order_goes_on_with_its_batches_when_it_starts_again(tmp_path: Path) -> None:
    gate = Gate()
    async with asking(tmp_path, LetterModel(on_forward=gate)) as (served, client):
        try:
            first = await client.create(requests(LINES))
            second = await client.create(requests(10))
            await gate.arrived()
            served.server.registry.close("the server is draining")
            answer = await client.send("POST", "/v1/files", files={"file": ("a", b"a")}, data={"purpose": "batch"})
            assert answer.status_code == 503
            _batches(served).runner.stop()
        finally:
            gate.open()
    async with asking(tmp_path) as (_, client):
        batch = await client.ended(first["id"])
        assert batch["request_counts"] == {"total": LINES, "completed": LINES, "failed": 0}
        names = [line["custom_id"] for line in await client.content(batch["output_file_id"])]
        assert sorted(names) == sorted(f"r{number}" for number in range(LINES))
        assert (await client.ended(second["id"]))["status"] == "completed"


async def test_each_owner_has_one_batch_at_a_time(tmp_path: Path) -> None:
    gate = Gate()
    keys = ("one", "another")
    async with serving(LetterModel(on_forward=gate), batch_dir=tmp_path, api_keys=keys) as served:
        async with served.client() as client:
            one, another = (Asking(client, {"authorization": f"Bearer {key}"}) for key in keys)
            try:
                batches = [await each.create(requests(5)) for each in (one, one, another)]
                await one.until(batches[0]["id"], lambda batch: batch["status"] == "in_progress")
                await another.until(batches[2]["id"], lambda batch: batch["status"] == "in_progress")
                assert (await one.get(f"/v1/batches/{batches[1]['id']}"))["status"] == "validating"
            finally:
                gate.open()
            for owner, batch in zip((one, one, another), batches, strict=True):
                assert (await owner.ended(batch["id"]))["status"] == "completed"


async def test_files_and_batches_of_another_owner_do_not_exist(tmp_path: Path) -> None:
    keys = ("one", "another")
    async with serving(batch_dir=tmp_path, api_keys=keys) as served, served.client() as client:
        one, another = (Asking(client, {"authorization": f"Bearer {key}"}) for key in keys)
        batch = await one.ended((await one.create(requests(2)))["id"])
        files = [file["id"] for file in (await one.get("/v1/files"))["data"]]
        assert len(files) == 2
        for file in files:
            for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/content")):
                assert (await another.send(method, f"/v1/files/{file}{path}")).status_code == 404
        assert (await another.send("GET", f"/v1/batches/{batch['id']}")).status_code == 404
        assert (await another.send("POST", f"/v1/batches/{batch['id']}/cancel")).status_code == 404
        stolen = {"input_file_id": batch["input_file_id"], "endpoint": "/v1/embeddings"}
        assert (await another.send("POST", "/v1/batches", json=stolen)).status_code == 404
        assert (await another.get("/v1/files"))["data"] == (await another.get("/v1/batches"))["data"] == []
        assert (await Asking(client).send("GET", "/v1/files")).status_code == 401
        assert (await one.get(f"/v1/files/{files[0]}"))["id"] == files[0]


async def test_lists_have_pages(tmp_path: Path) -> None:
    async with asking(tmp_path) as (_, client):
        files = [(await client.upload(b"a", name=f"{number}"))["id"] for number in range(5)]
        newest = await client.get("/v1/files?limit=2")
        assert ([file["id"] for file in newest["data"]], newest["has_more"]) == (files[:2:-1], True)
        rest = await client.get(f"/v1/files?after={newest['last_id']}&purpose=batch")
        assert ([file["id"] for file in rest["data"]], rest["has_more"]) == (files[2::-1], False)
        assert [file["id"] for file in (await client.get("/v1/files?order=asc"))["data"]] == files
        assert (await client.get("/v1/files?purpose=batch_output"))["data"] == []
        for query, param in (("limit=0", "limit"), ("limit=x", "limit"), ("order=up", "order"), ("after=x", "after")):
            answer = await client.send("GET", f"/v1/files?{query}")
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert (await client.send("GET", "/v1/batches?limit=101")).status_code == 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/chat/completions"}, "endpoint"),
        ({"endpoint": 7}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "8d"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after"),
    ],
)
async def test_a_wrong_field_of_a_batch_is_named(tmp_path: Path, fields: dict[str, Any], param: str) -> None:
    async with asking(tmp_path) as (_, client):
        file = await client.upload(requests(1))
        body = {"input_file_id": file["id"], "endpoint": "/v1/embeddings", "completion_window": "24h"} | fields
        answer = await client.send("POST", "/v1/batches", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert (await client.get("/v1/batches"))["data"] == []


async def test_what_a_batch_needs_must_be_there(tmp_path: Path) -> None:
    async with asking(tmp_path, LetterModel(EMBEDDER)) as (_, client):
        done = await client.ended((await client.create(requests(1)))["id"])
        body = {"input_file_id": done["output_file_id"], "endpoint": "/v1/embeddings"}
        answer = await client.send("POST", "/v1/batches", json=body)
        assert (answer.status_code, "purpose batch" in answer.text) == (400, True)
        answer = await client.send("POST", "/v1/batches", json=body | {"input_file_id": "../../etc/passwd"})
        assert answer.status_code == 404
        body = {"input_file_id": done["input_file_id"], "endpoint": "/classify"}
        assert (await client.send("POST", "/v1/batches", json=body)).status_code == 404
        for method, path in (("GET", "/v1/batches/x"), ("POST", "/v1/batches/x/cancel"), ("GET", "/v1/batches/{id}")):
            assert (await client.send(method, path)).status_code == 404
        assert (await client.send("PUT", f"/v1/batches/{done['id']}")).status_code == 405
        assert (await client.send("GET", f"//openai/v1/batches/{done['id']}/")).status_code == 200


async def test_a_file_that_a_batch_reads_cannot_be_deleted(tmp_path: Path) -> None:
    gate = Gate()
    async with asking(tmp_path, LetterModel(on_forward=gate)) as (_, client):
        try:
            batch = await client.create(requests(5))
            await gate.arrived()
            answer = await client.send("DELETE", f"/v1/files/{batch['input_file_id']}")
            assert (answer.status_code, batch["id"] in answer.text) == (409, True)
        finally:
            gate.open()
        batch = await client.ended(batch["id"])
        for file in (batch["input_file_id"], batch["output_file_id"]):
            assert (await client.send("DELETE", f"/v1/files/{file}")).status_code == 200
            assert (await client.send("GET", f"/v1/files/{file}/content")).status_code == 404
    assert not [*(tmp_path / "files").iterdir()]


async def test_an_owner_has_a_limited_number_of_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("staged_pool.api.batches.store.MOST_UNFINISHED", 2)
    gate = Gate()
    async with asking(tmp_path, LetterModel(on_forward=gate)) as (_, client):
        try:
            body = {"input_file_id": (await client.create(requests(1)))["input_file_id"], "endpoint": "/v1/embeddings"}
            await client.post("/v1/batches", body)
            answer = await client.send("POST", "/v1/batches", json=body)
            assert (answer.status_code, "retry-after" in answer.headers) == (429, True)
        finally:
            gate.open()


async def test_without_a_folder_the_routes_say_which_flag_turns_them_on() -> None:
    async with serving(body_limit_bytes=1000) as served, served.client() as client:
        for method, path in (("POST", "/v1/files"), ("GET", "/v1/files/file-1/content"), ("POST", "/v1/batches")):
            answer = await client.request(method, path, content=b"x" * 5000 if method == "POST" else None)
            assert answer.status_code == 404
            assert "--batch-dir FOLDER" in answer.json()["error"]["message"]
        paths = (await client.get("/openapi.json")).json()["paths"]
        assert not [path for path in paths if "batches" in path]


async def test_two_servers_do_not_share_a_folder(tmp_path: Path) -> None:
    async with serving(batch_dir=tmp_path):
        with pytest.raises(ConfigError, match=r"batch_dir='.*': another server uses it"):
            await server_on(batch_dir=tmp_path).run(bind("127.0.0.1", 0))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"batch_dir='.*': cannot be used"):
        await server_on(batch_dir=tmp_path / "file").run(bind("127.0.0.1", 0))


async def test_a_mounted_server_has_them_too(tmp_path: Path) -> None:
    async with engine_on(LetterModel()) as engine:
        pool = asgi.app(engine, server=asgi.ServerConfig(batch_dir=tmp_path))
        host = Starlette(routes=[Mount("/pool", pool)])
        transport = httpx.ASGITransport(host)
        async with pool.running(), httpx.AsyncClient(transport=transport, base_url="http://test/pool") as client:
            asked = Asking(client)
            batch = await asked.ended((await asked.create(requests(3)))["id"])
            assert batch["request_counts"]["completed"] == 3


def _batches(served: Served) -> Batches:
    batches = served.server._batches
    assert batches is not None
    return batches
