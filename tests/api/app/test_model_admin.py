"""Models that operators load, switch and unload while the server serves."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import anyio
import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from staged_pool.api.http.server import EXIT_OVERDUE, Server
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine import model_loading
from staged_pool.runtime.engine.engine_group import EngineGroup
from staged_pool.runtime.engine.model_loading import LoadThread
from staged_pool.runtime.models import encoder
from staged_pool.runtime.models.devices.kernel_choices import capabilities
from staged_pool.runtime.models.quantizing.int8 import why_no_int8
from staged_pool.runtime.threads.dedicated_threads import DedicatedThreads
from tests.models.tiny import build, edit_json
from tests.servers.on_socket import serving
from tests.support.waiting import until

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("servers_may_import")]

KEY = "operator"
ADMIN = {"Authorization": f"Bearer {KEY}"}
ROUTE = "/admin/models"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two embedding models and a reranker, and folders that cannot be loaded."""
    folder = tmp_path_factory.mktemp("admin")
    found = {kind: build(kind, folder / kind) for kind in ("bert-mean", "bert-cls", "ce-bert-1label")}
    broken = shutil.copytree(found["bert-mean"], folder / "broken")
    save_file({"other": torch.zeros(2)}, broken / "model.safetensors", {"format": "pt"})
    (folder / "empty").mkdir()
    deep = shutil.copytree(found["bert-mean"], folder / "deep")
    edit_json(deep / "config.json", num_hidden_layers=10**8)
    return {**found, "broken": broken, "empty": folder / "empty", "deep": deep}


def config(folder: Path, name: str, **settings: Any) -> EngineConfig:
    return EngineConfig(model=str(folder), served_name=name, dtype="float32", torch_threads=1, **settings)


@contextmanager
def held_loads(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Hold each load in its thread until the event is set."""
    gate, load = threading.Event(), model_loading._load

    def held(*given: Any) -> Any:
        assert gate.wait(60)
        return load(*given)

    monkeypatch.setattr(model_loading, "_load", held)
    try:
        yield gate
    finally:
        gate.set()


def impatient(group: EngineGroup[Any], threads: DedicatedThreads) -> LoadThread:
    """Give a load one second for each step."""
    return LoadThread(threads, 1.0, group._governor, group._overdue)


async def vector(client: httpx.AsyncClient, name: str = "it", text: str = "a text") -> Any:
    answer = await client.post("/v1/embeddings", json={"model": name, "input": text})
    assert answer.status_code == 200, answer.text
    return np.array(answer.json()["data"][0]["embedding"])


async def states(client: httpx.AsyncClient) -> list[tuple[str, str]]:
    answer = await client.get(ROUTE, headers=ADMIN)
    assert answer.status_code == 200, answer.text
    return [(model["name"], model["state"]) for model in answer.json()["data"]]


def load(name: str, folder: Path, **more: Any) -> dict[str, Any]:
    return {"name": name, "model": str(folder), "dtype": "float32", **more}


async def counters(client: httpx.AsyncClient) -> dict[str, float]:
    """Return every sample of a counter or a histogram with the label `model`."""
    lines = (await client.get("/metrics")).text.splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if 'model="' in line and not line.startswith("#")]
    ends = ("_total", "_bucket", "_sum", "_count")
    return {name: float(value) for name, value in pairs if name.partition("{")[0].endswith(ends)}


async def test_a_switch_under_load_fails_no_request_and_mixes_no_vectors(folders: dict[str, Path]) -> None:
    async with serving(config(folders["bert-mean"], "it"), admin_api_keys=(KEY,)) as served, served.client() as client:
        old = await vector(client)
        seen: list[tuple[bool, bool]] = []
        switched = stop = False

        async def keep_asking() -> None:
            async with served.client() as own:
                while not stop:
                    begun_after = switched
                    got = await vector(own)
                    seen.append((bool(np.allclose(got, old, atol=1e-4)), begun_after))
                    assert seen[-1][0] or np.allclose(got, new[0] if new else got, atol=1e-4)

        new: list[Any] = []
        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(keep_asking)
            await until(lambda: len(seen) > 20)
            before = await counters(client)
            answer = await client.post(ROUTE, headers=ADMIN, json=load("it", folders["bert-cls"]))
            switched = True
            assert answer.status_code == 200, answer.text
            assert answer.json()["state"] == "ready"
            new.append(await vector(client))
            at_switch = len(seen)
            await until(lambda: len(seen) > at_switch + 20)
            after = await counters(client)
            stop = True
        assert not np.allclose(old, new[0], atol=1e-2)
        assert any(is_old for is_old, _ in seen)
        assert [is_old for is_old, begun_after in seen if begun_after and is_old] == []
        assert {name: after.get(name) for name in before if after.get(name, -1) < before[name]} == {}
        assert await states(client) == [("it", "ready")]


async def test_requests_in_flight_finish_on_the_old_model(folders: dict[str, Path]) -> None:
    async with serving(config(folders["bert-mean"], "it"), admin_api_keys=(KEY,)) as served, served.client() as client:
        old = await vector(client)
        engine = served.engine
        done: list[str] = []
        async with anyio.create_task_group() as tasks:
            with engine.visit():  # as a request that is in flight for long

                async def switch() -> None:
                    answer = await client.post(ROUTE, headers=ADMIN, json=load("it", folders["bert-cls"]))
                    assert answer.status_code == 200, answer.text
                    done.append("switched")

                tasks.start_soon(switch)
                await until(lambda: served.engine is not engine)
                assert not np.allclose(await vector(client), old, atol=1e-2)  # requests go to the new one
                assert await states(client) == [("it", "draining"), ("it", "ready")]
                still = (await engine.embed("a text")).embeddings[0]  # and the old one still answers
                np.testing.assert_allclose(still, old, atol=1e-4)
                assert done == []
        assert done == ["switched"]
        assert await states(client) == [("it", "ready")]


async def test_a_model_joins_under_its_own_name_and_leaves(folders: dict[str, Path]) -> None:
    async with serving(config(folders["bert-mean"], "it"), admin_api_keys=(KEY,)) as served, served.client() as client:
        scores = {"query": "a", "documents": ["b", "c"], "model": "org/rank"}
        assert (await client.post("/rerank", json=scores)).status_code == 404
        body = load("org/rank", folders["ce-bert-1label"], **{"max-batch-items": 3})
        answer = await client.post(ROUTE, headers=ADMIN, json=body)
        assert answer.status_code == 200, answer.text
        shown = answer.json()
        assert (shown["name"], shown["state"], shown["pinned"], shown["last_used"]) == (
            "org/rank",
            "ready",
            False,
            None,
        )
        assert shown["weights_bytes"] > 10_000
        assert served.engines["org/rank"].config.max_batch_items == 3
        assert (await client.post("/rerank", json=scores)).status_code == 200
        assert (await client.get(f"{ROUTE}/org/rank", headers=ADMIN)).json()["last_used"] is not None
        assert [model["id"] for model in (await client.get("/v1/models")).json()["data"]] == ["it", "org/rank"]
        assert 'model="org/rank"' in (await client.get("/metrics")).text
        gone = await client.delete(f"{ROUTE}/org/rank", headers=ADMIN)
        assert gone.status_code == 200, gone.text
        assert 'model="org/rank"' not in (await client.get("/metrics")).text
        unknown = await client.post("/rerank", json=scores)
        assert unknown.status_code == 404
        assert "Served: it" in unknown.text
        assert await states(client) == [("it", "ready")]


async def test_only_an_operators_key_opens_the_routes(folders: dict[str, Path]) -> None:
    model = config(folders["bert-mean"], "it")
    async with (
        serving(model, admin_api_keys=(KEY,), api_keys=("user",)) as served,
        served.client() as client,
    ):
        for headers in ({}, {"Authorization": "Bearer user"}, {"api-key": "user"}):
            for method, path in (("GET", ROUTE), ("POST", ROUTE), ("DELETE", f"{ROUTE}/it"), ("GET", "/admin/other")):
                assert (await client.request(method, path, headers=headers)).status_code == 401, (method, path)
            assert (await client.get(f"/m/it{ROUTE}", headers=headers)).status_code == 401
        assert (await client.get(ROUTE, headers=ADMIN)).status_code == 200
        assert (await client.get("/v1/models", headers=ADMIN)).status_code == 401
        assert (await client.get("/v1/models", headers={"Authorization": "Bearer user"})).status_code == 200
    async with serving(model) as served, served.client() as client:
        for answer in (await client.get(ROUTE), await client.post(ROUTE, json={}), await client.delete(f"{ROUTE}/it")):
            assert answer.status_code == 404
            assert "--admin-api-key" in answer.text


WRONG: list[tuple[Any, str, str]] = [
    ([], "", "object"),
    ({"model": "x"}, "name", "is missing"),
    ({"name": 3, "model": "x"}, "name", "must be a text"),
    ({"name": "it"}, "model", "is missing"),
    ({"name": "it", "model": ["x"]}, "model", "must be a text"),
    ({"name": " it", "model": "x"}, "name", "printable"),
    ({"name": "i\nt", "model": "x"}, "name", "printable"),
    ({"name": "it", "model": "x", "pin": "yes"}, "pin", "true or false"),
    ({"name": "it", "model": "x", "max-batch-items": "many"}, "max-batch-items", "a whole number"),
    ({"name": "it", "model": "x", "max-batch-items": 0}, "max-batch-items", "must be"),
    ({"name": "it", "model": "x", "max-batch-items": True}, "max-batch-items", "a whole number"),
    ({"name": "it", "model": "x", "max_batch_items": 3}, "max_batch_items", "did you mean max-batch-items?"),
    ({"name": "it", "model": "x", "dtype": "float16", "device": "cpu"}, "device", "at the start"),
    ({"name": "it", "model": "x", "trust-remote-code": True}, "trust-remote-code", "at the start"),
    ({"name": "it", "model": "x", "allow-media-path": "/"}, "allow-media-path", "at the start"),
    ({"name": "it", "model": "x", "plugin": ["p"]}, "plugin", "at the start"),
    ({"name": "it", "model": "x", "served-name": "y"}, "served-name", "`name`"),
    ({"name": "it", "model": "x", "tune": "again", "deterministic": True}, "tune", "nothing is measured"),
    ({"name": "it", "model": "x", "port": 1}, "port", "no setting"),
]


async def test_a_wrong_request_is_told_so_and_changes_nothing(folders: dict[str, Path]) -> None:
    async with serving(config(folders["bert-mean"], "it"), admin_api_keys=(KEY,)) as served, served.client() as client:
        engine = served.engine
        for body, param, words in WRONG:
            answer = await client.post(ROUTE, headers=ADMIN, json=body)
            assert answer.status_code == 400, (body, answer.text)
            error = answer.json()["error"]
            assert words in error["message"], (body, error)
            assert not param or error["param"] == param, (body, error)
        for wait in ("-1", "x", "nan", "1e9"):
            answer = await client.post(f"{ROUTE}?wait={wait}", headers=ADMIN, json=load("it", folders["bert-cls"]))
            assert answer.status_code == 400, answer.text
        assert (await client.post(ROUTE, headers=ADMIN, content=b"{")).status_code == 400
        assert (await client.put(ROUTE, headers=ADMIN, json={})).status_code == 405
        assert served.engine is engine
        assert await states(client) == [("it", "ready")]


async def test_a_failed_load_leaves_everything_as_it_was(folders: dict[str, Path]) -> None:
    async with serving(config(folders["bert-mean"], "it"), admin_api_keys=(KEY,)) as served, served.client() as client:
        old, engine = await vector(client), served.engine
        for folder in (folders["broken"], folders["empty"], folders["empty"] / "missing"):
            answer = await client.post(ROUTE, headers=ADMIN, json=load("it", folder))
            assert answer.status_code == 400, answer.text
            assert (await client.get("/ready")).status_code == 200
            assert await states(client) == [("it", "ready"), ("it", "failed")]
            shown = (await client.get(f"{ROUTE}/it", headers=ADMIN)).json()
            assert shown["reason"] == answer.json()["error"]["message"]
        assert served.engine is engine
        np.testing.assert_array_equal(await vector(client), old)
        assert (await client.post(ROUTE, headers=ADMIN, json=load("it", folders["bert-cls"]))).status_code == 200
        assert await states(client) == [("it", "ready")]


async def test_a_folder_that_asks_for_more_than_its_weights_have_is_refused_and_holds_nobody_up(
    folders: dict[str, Path],
) -> None:
    async with serving(config(folders["bert-mean"], "it"), admin_api_keys=(KEY,)) as served, served.client() as client:
        memory = served.server.memory
        before = memory.budget.limit_bytes
        answer = await client.post(ROUTE, headers=ADMIN, json=load("deep", folders["deep"]))
        assert answer.status_code == 400, answer.text
        message = answer.json()["error"]["message"]
        assert message == "config.json: num_hidden_layers=100000000, but the weights have 3 layers"
        assert (memory.loading_bytes, memory.budget.limit_bytes) == (0, before)
        assert (await client.get("/health")).status_code == 200
        await vector(client)
        assert (await client.post(ROUTE, headers=ADMIN, json=load("new", folders["bert-cls"]))).status_code == 200
        await vector(client, "new")


async def test_requests_and_probes_are_answered_beside_a_load_that_hangs_and_later_loads_are_told(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(config(folders["bert-mean"], "it"), admin_api_keys=(KEY,)) as served, served.client() as client:
        with held_loads(monkeypatch), monkeypatch.context() as patched:
            patched.setattr(EngineGroup, "_loader", impatient)
            answers: dict[str, httpx.Response] = {}

            async def ask(name: str) -> None:
                async with served.client() as own:
                    answers[name] = await own.post(ROUTE, headers=ADMIN, json=load(name, folders["bert-cls"]))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask, "first")
                await until(lambda: len(served.server._admin.records) == 2)  # type: ignore[union-attr]
                tasks.start_soon(ask, "second")
                assert (await client.get("/health")).status_code == 200
                assert (await client.get("/ready")).status_code == 200
                await vector(client)
            assert [answers[name].status_code for name in ("first", "second")] == [504, 504]
            assert "load-timeout = 1: the model was not loaded" in answers["first"].json()["error"]["message"]
            assert "an earlier load has passed its deadline" in answers["second"].json()["error"]["message"]
            assert await states(client) == [("it", "ready"), ("first", "failed"), ("second", "failed")]
            await vector(client)
        await until(lambda: not any("loader" in thread.name for thread in threading.enumerate()))
        assert (await client.post(ROUTE, headers=ADMIN, json=load("first", folders["bert-cls"]))).status_code == 200


async def test_the_record_of_a_failed_load_is_dropped_by_a_delete(folders: dict[str, Path]) -> None:
    async with serving(config(folders["bert-mean"], "it"), admin_api_keys=(KEY,)) as served, served.client() as client:
        assert (await client.post(ROUTE, headers=ADMIN, json=load("new", folders["broken"]))).status_code == 400
        assert await states(client) == [("it", "ready"), ("new", "failed")]
        assert (await client.delete(f"{ROUTE}/new", headers=ADMIN)).json()["state"] == "failed"
        assert await states(client) == [("it", "ready")]
        assert (await client.delete(f"{ROUTE}/new", headers=ADMIN)).status_code == 404


async def test_a_model_that_loads_blocks_its_name_and_nothing_else(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(config(folders["bert-mean"], "it"), admin_api_keys=(KEY,)) as served, served.client() as client:
        with held_loads(monkeypatch) as gate:
            body = load("new", folders["bert-cls"])
            answer = await client.post(f"{ROUTE}?wait=0", headers=ADMIN, json=body)
            assert answer.status_code == 202
            assert answer.json()["state"] == "loading"
            for method, path in (("POST", ROUTE), ("DELETE", f"{ROUTE}/new")):
                again = await client.request(method, path, headers=ADMIN, json=body)
                assert again.status_code == 409, again.text
                assert "loading" in again.text
                assert int(again.headers["retry-after"]) > 0
            assert (await client.get("/ready")).status_code == 200
            assert await states(client) == [("it", "ready"), ("new", "loading")]
            unknown = await client.post("/v1/embeddings", json={"model": "new", "input": "a"})
            assert unknown.status_code == 404
            await vector(client)
            gate.set()
            await until(lambda: "new" in served.engines)
        await vector(client, "new")


async def test_of_concurrent_loads_under_one_name_one_goes_on(folders: dict[str, Path]) -> None:
    async with serving(config(folders["bert-mean"], "it"), admin_api_keys=(KEY,)) as served:
        found: list[int] = []

        async def ask(kind: str) -> None:
            async with served.client() as client:
                answer = await client.post(ROUTE, headers=ADMIN, json=load("it", folders[kind]))
                found.append(answer.status_code)

        async with anyio.create_task_group() as tasks:
            for kind in ("bert-cls", "bert-mean", "bert-cls"):
                tasks.start_soon(ask, kind)
        assert sorted(found) == [200, 409, 409]
        await served.assert_alive()


async def test_a_client_that_leaves_does_not_end_its_load(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(config(folders["bert-mean"], "it"), admin_api_keys=(KEY,)) as served, served.client() as client:
        with held_loads(monkeypatch) as gate:
            async with anyio.create_task_group() as tasks:

                async def ask() -> None:
                    async with served.client() as own:
                        await own.post(ROUTE, headers=ADMIN, json=load("new", folders["bert-cls"]))

                tasks.start_soon(ask)
                await until(lambda: len(served.server._admin.records) == 2)  # type: ignore[union-attr]
                tasks.cancel_scope.cancel()
            gate.set()
            await until(lambda: "new" in served.engines)
        await vector(client, "new")


async def test_the_only_model_stays(folders: dict[str, Path]) -> None:
    async with serving(config(folders["bert-mean"], "it"), admin_api_keys=(KEY,)) as served, served.client() as client:
        answer = await client.delete(f"{ROUTE}/it", headers=ADMIN)
        assert answer.status_code == 409
        assert "only model" in answer.text
        await vector(client)


ROOM = 2**20
"""Bytes for three of the tiny models."""


async def test_models_that_were_not_used_for_longest_make_room(folders: dict[str, Path]) -> None:
    model = config(folders["bert-mean"], "start")
    async with (
        serving(model, admin_api_keys=(KEY,), models_memory_bytes=ROOM) as served,
        served.client() as client,
    ):
        for name in ("a", "b"):
            assert (await client.post(ROUTE, headers=ADMIN, json=load(name, folders["bert-mean"]))).status_code == 200
        assert list(served.engines) == ["start", "a", "b"]
        await vector(client, "b")
        await vector(client, "a")
        assert served.engines["b"].idle_s < served.engines["start"].idle_s  # but the start is pinned
        answer = await client.post(ROUTE, headers=ADMIN, json=load("new", folders["bert-mean"]))
        assert answer.status_code == 200, answer.text
        assert list(served.engines) == ["start", "a", "new"]
        shown = (await client.get(ROUTE, headers=ADMIN)).json()
        assert shown["weights_bytes"] <= shown["models_memory_bytes"] == ROOM
        gone = await client.post("/v1/embeddings", json={"model": "b", "input": "a"})
        assert gone.status_code == 404
        assert "Served: start, a, new" in gone.text


async def test_a_model_in_int8_is_loaded_and_listed(folders: dict[str, Path]) -> None:
    if reason := why_no_int8(capabilities()):
        pytest.skip(reason)
    async with serving(config(folders["bert-mean"], "it"), admin_api_keys=(KEY,)) as served, served.client() as client:
        answer = await client.post(ROUTE, headers=ADMIN, json={**load("new", folders["bert-cls"]), "dtype": "int8"})
        assert answer.status_code == 200, answer.text
        listed = (await client.get(ROUTE, headers=ADMIN)).json()
        assert listed["weights_bytes"] == sum(model["weights_bytes"] for model in listed["data"])
        assert all(model["weights_bytes"] > 0 for model in listed["data"])


async def test_a_busy_model_does_not_make_room(folders: dict[str, Path]) -> None:
    model = config(folders["bert-mean"], "start", drain_timeout_s=0.05)
    async with (
        serving(model, admin_api_keys=(KEY,), models_memory_bytes=ROOM) as served,
        served.client() as client,
    ):
        for name in ("a", "b"):
            assert (await client.post(ROUTE, headers=ADMIN, json=load(name, folders["bert-mean"]))).status_code == 200
        with served.engines["a"].visit():
            answer = await client.post(ROUTE, headers=ADMIN, json=load("new", folders["bert-mean"]))
            assert answer.status_code == 507, answer.text
            assert "`a` would have to leave" in answer.json()["error"]["message"]
        assert sorted(served.engines) == ["a", "b", "start"]
        for name in ("start", "a", "b"):
            await vector(client, name)


async def test_a_load_for_which_there_is_no_memory_is_rejected_before_it_begins(folders: dict[str, Path]) -> None:
    async with (
        serving(config(folders["bert-mean"], "it"), admin_api_keys=(KEY,), models_memory_bytes=ROOM) as served,
        served.client() as client,
    ):
        for name in ("a", "b", "c", "d"):
            answer = await client.post(ROUTE, headers=ADMIN, json=load(name, folders["bert-mean"], pin=True))
        assert answer.status_code == 507, answer.text
        assert "--models-memory is 1Mi" in answer.text
        kept, failed = list(served.engines), [("c", "failed"), ("d", "failed")]
        assert await states(client) == [*((name, "ready") for name in kept), *failed]


async def test_a_load_beyond_the_memory_limit_of_the_process_is_rejected(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(config(folders["bert-mean"], "it"), admin_api_keys=(KEY,)) as served, served.client() as client:
        monkeypatch.setattr(type(served.server.memory), "room_bytes", 1000)
        answer = await client.post(ROUTE, headers=ADMIN, json=load("new", folders["bert-cls"]))
        assert answer.status_code == 507, answer.text
        assert "memory limit" in answer.json()["error"]["message"]
        assert await states(client) == [("it", "ready"), ("new", "failed")]
        await vector(client)


async def test_the_description_has_the_routes_and_their_key(folders: dict[str, Path]) -> None:
    async with serving(config(folders["bert-mean"], "it"), admin_api_keys=(KEY,)) as served, served.client() as client:
        described = (await client.get("/openapi.json")).json()
        assert set(described["paths"][ROUTE]) == {"get", "post"}
        assert set(described["paths"]["/admin/models/{name}"]) == {"get", "delete"}
        post = described["paths"][ROUTE]["post"]
        assert post["security"] == [{"key": []}]
        assert {"200", "202", "400", "401", "409", "504", "507"} <= set(post["responses"])
        assert "security" not in described["paths"]["/v1/models"]["get"]
        assert json.dumps(described).count(KEY) == json.dumps(described).replace("operators", "").count(KEY)
    async with serving(config(folders["bert-mean"], "it")) as served, served.client() as client:
        assert ROUTE not in (await client.get("/openapi.json")).json()["paths"]


@pytest.mark.parametrize("lead_s", [0.0, 0.1])
async def test_a_drain_waits_for_requests_of_models_that_make_room(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, lead_s: float
) -> None:
    began, gate, compute = threading.Event(), threading.Event(), encoder.compute

    def held(*given: Any) -> Any:
        began.set()
        assert gate.wait(60)
        return compute(*given)

    forced: list[int] = []
    monkeypatch.setattr(Server, "_end_process_after", lambda *_, exit_code: forced.append(exit_code))
    settings: dict[str, Any] = {"admin_api_keys": (KEY,), "models_memory_bytes": ROOM, "drain_lead_s": lead_s}
    async with (
        serving(config(folders["bert-mean"], "it"), **settings) as served,
        served.client() as client,
        anyio.create_task_group() as tasks,
    ):
        server, admin = served.server, cast(Any, served.server._admin)
        assert (await client.post(ROUTE, headers=ADMIN, json=load("it", folders["bert-mean"], pin=False))).is_success
        admin.limit_bytes = 1.5 * admin.records[0].weights_bytes
        monkeypatch.setattr(encoder, "compute", held)
        tasks.start_soon(vector, client)
        await until(began.is_set)
        monkeypatch.setattr(encoder, "compute", compute)  # for the warm-up of the next model
        tasks.start_soon(partial(client.post, ROUTE, headers=ADMIN, json=load("new", folders["bert-mean"])))
        await until(lambda: not server.registry.engines)
        tasks.start_soon(server.close)
        await until(lambda: server.registry.leaving)
        await anyio.wait_all_tasks_blocked()
        assert not server._stop_http.is_set(), "the request is in flight"
        gate.set()
    assert set(forced) <= {EXIT_OVERDUE}


async def test_a_drain_ends_the_wait_for_a_load(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with held_loads(monkeypatch) as gate:
        answers: list[httpx.Response] = []
        async with anyio.create_task_group() as tasks:
            gate.set()
            async with serving(config(folders["bert-mean"], "it"), admin_api_keys=(KEY,)) as served:
                gate.clear()

                async def ask() -> None:
                    async with served.client() as client:
                        body = load("new", folders["bert-cls"])
                        answers.append(await client.post(ROUTE, headers=ADMIN, json=body))

                tasks.start_soon(ask)
                await until(lambda: len(served.server._admin.records) == 2)  # type: ignore[union-attr]
                await served.server.close()
                await until(lambda: bool(answers))
                gate.set()
        assert answers[0].status_code == 503
