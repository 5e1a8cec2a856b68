"""Plugins over HTTP: `/pooling` with data as vLLM has it, routes of plugins, timings, metrics and departures."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import anyio
import anyio.lowlevel
import httpx
import pytest
import structlog
from anyio.abc import TaskGroup
from blockbuster import BlockBuster
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from staged_pool.runtime.plugins.processor import AsgiApp, PluginContext, Process, Processor
from tests.runtime.plugins.hosting import AwaitedLetters, Letters, is_idle, statistics
from tests.servers.in_memory import serving_in_memory
from tests.servers.on_socket import serving
from tests.support.gates import Gate
from tests.support.model import LetterModel, expected
from tests.support.waiting import until

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore:Async generator 'httpx:ResourceWarning"),  # the client's own, on trio
]


class Words(Processor):
    """Vectors of words, by the served model."""

    def preprocess(self, loaded: Any, context: PluginContext) -> Any:
        return loaded.split()

    def postprocess(self, rows: Any, context: PluginContext) -> Any:
        return [row.values["dense"] for row in rows]


class WithRoutes(Letters):
    """Letters with routes of its own."""

    def routes(self, process: Process) -> AsgiApp:
        async def codes(request: Request) -> JSONResponse:
            return JSONResponse(await process({"text": request.path_params["text"]}))

        async def echo(request: Request) -> JSONResponse:
            body = await request.body()
            return JSONResponse({"body": body.decode(), "root": request.scope["root_path"]}, status_code=201)

        async def fails(request: Request) -> JSONResponse:
            raise KeyError("secret")

        async def breaks(request: Request) -> StreamingResponse:
            async def pieces() -> Any:
                yield b"begun"
                raise KeyError("secret")

            return StreamingResponse(pieces())

        paths = {"/codes/{text}": codes, "/echo": echo, "/fails": fails, "/breaks": breaks}
        return Starlette(routes=[Route(path, call, methods=["GET", "POST"]) for path, call in paths.items()])


async def test_pooling_takes_data_as_vllm_does() -> None:
    async with serving_in_memory(LetterModel(), Letters()) as served, served.client() as client:
        response = await client.post("/pooling", json={"data": {"text": "ab"}, "task": "plugin", "model": "codes"})
        assert response.status_code == 200
        answer = response.json()
        assert answer["data"]["codes"] == [97, 98]
        assert isinstance(answer["created_at"], int)
        assert answer["request_id"] == f"pooling-{response.headers['x-request-id']}"
        assert answer.keys() == {"request_id", "created_at", "data"}
        timing = dict(re.findall(r"(\w+);dur=([\d.]+)", response.headers["server-timing"]))
        assert {"hook_parse", "hook_load", "hook_preprocess", "hook_postprocess"} <= timing.keys()


@pytest.mark.parametrize("fields", [{}, {"task": "plugin"}, {"model": "letters"}, {"plugin": "codes"}, {"model": ""}])
async def test_data_alone_selects_the_only_plugin(fields: dict[str, str]) -> None:
    async with serving_in_memory(LetterModel(), Letters()) as served, served.client() as client:
        response = await client.post("/pooling", json={"data": {"text": "z"}, **fields})
        assert response.json()["data"]["codes"] == [122]


@pytest.mark.parametrize(
    ("given", "headers", "request_id"),
    [
        ({"request_id": "mine"}, {}, "pooling-mine"),
        ({"request_id": "mine"}, {"x-request-id": "theirs"}, "pooling-theirs"),
        ({}, {"x-request-id": "theirs"}, "pooling-theirs"),
    ],
)
async def test_the_answer_has_the_id_of_the_client(
    given: dict[str, str], headers: dict[str, str], request_id: str
) -> None:
    letters = Letters()
    async with serving_in_memory(letters) as served, served.client() as client:
        response = await client.post("/pooling", json={"data": {"text": "z"}, **given}, headers=headers)
        assert response.json()["request_id"] == request_id
    assert letters.contexts[0].id not in ("mine", "theirs")  # nothing is kept under a client's id


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"task": "plugin"}, 400, "data: this field is required for the task 'plugin'"),
        ({"data": None, "task": "plugin"}, 400, "data: this field is required"),
        ({"data": {}, "plugin": "words"}, 400, "plugin: there is no plugin of this name; name one of codes"),
        ({"data": {}, "plugin": 7}, 400, "plugin"),
        ({"data": {}, "model": "nope"}, 404, "The model `nope` does not exist"),
        ({"data": {"other": 1}}, 500, "plugin `codes` failed in its hook `parse` (KeyError)"),
        ({"input": "a", "model": "codes"}, 400, "`codes` is a plugin"),
        ({"data": {}, "task": "embed", "model": "codes"}, 400, "`codes` is a plugin"),
    ],
)
async def test_wrong_requests_get_an_error_that_names_the_fault(
    body: dict[str, Any], status: int, message: str
) -> None:
    async with serving_in_memory(LetterModel(), Letters()) as served, served.client() as client:
        response = await client.post("/pooling", json=body)
        assert response.status_code == status
        assert message in response.json()["error"]["message"]
        assert (await client.post("/pooling", json={"input": "still"})).status_code == 200


async def test_data_without_a_plugin_is_rejected_with_the_remedy() -> None:
    async with serving_in_memory(LetterModel()) as served, served.client() as client:
        response = await client.post("/pooling", json={"data": {"text": "a"}})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "data")
        assert "--plugin NAME" in response.json()["error"]["message"]


async def test_models_beside_a_plugin_are_asked_as_before() -> None:
    async with serving_in_memory(LetterModel(), Letters(), Words()) as served, served.client() as client:
        for path, body in (("/v1/embeddings", {"input": "a"}), ("/pooling", {"input": "a"})):
            assert (await client.post(path, json=body)).status_code == 200
        several = await client.post("/pooling", json={"data": "two words"})
        assert several.json()["error"]["message"] == "plugin: several plugins are served; name one of codes, words"
        response = await client.post("/pooling", json={"data": "two words", "plugin": "words"})
        assert response.json()["data"] == [expected("two").tolist(), expected("words").tolist()]
        assert (await client.post("/m/words/pooling", json={"data": "a"})).status_code == 200
        assert (await client.post("/invocations", json={"data": "a", "plugin": "words"})).status_code == 200


async def test_every_route_about_the_server_answers_with_a_plugin_alone(
    nothing_blocks_the_event_loop: BlockBuster,
) -> None:
    nothing_blocks_the_event_loop.deactivate()  # process metrics read /proc
    async with serving_in_memory(Letters()) as served, served.client() as client:
        for path in ("/v1/models", "/ready", "/info", "/models", "/api/tags", "/stages", "/metrics", "/openapi.json"):
            assert (await client.get(path)).status_code == 200
        response = await client.post("/v1/embeddings", json={"input": "a"})
        assert response.status_code == 404
        assert "codes (plugin)" in response.json()["error"]["message"]


async def test_metrics_have_the_hooks(nothing_blocks_the_event_loop: BlockBuster) -> None:
    nothing_blocks_the_event_loop.deactivate()
    async with serving_in_memory(Letters()) as served, served.client() as client:
        await client.post("/pooling", json={"data": {"text": "a"}})
        text = (await client.get("/metrics")).text
    assert 'staged_pool_plugin_hook_seconds_count{hook="load",model="codes"} 1.0' in text
    assert 'staged_pool_plugin_open_requests{model="codes"} 0.0' in text


async def test_an_output_that_is_no_json_is_named() -> None:
    class Opaque(Letters):
        def postprocess(self, rows: Any, context: PluginContext) -> Any:
            return {"rows": object()}

    async with serving_in_memory(Opaque()) as served, served.client() as client:
        response = await client.post("/pooling", json={"data": {"text": "a"}})
        assert response.status_code == 500
        assert "the output of the plugin `codes` is no JSON" in response.json()["error"]["message"]


class Odd(dict[str, int]):
    """A dictionary that does not tell its entries."""

    def items(self) -> Any:
        raise SystemExit(3)


async def test_an_output_that_cannot_be_walked_is_named_and_one_that_grows_in_json_is_rejected() -> None:
    class Grows(Letters):
        def postprocess(self, rows: Any, context: PluginContext) -> Any:
            if rows == [ord("a")]:
                return {"rows": [Odd(a=1)]}
            value: list[Any] = [1.0]
            for _ in range(50):
                value = [value, value]
            return value

    async with serving_in_memory(Grows()) as served, served.client() as client:
        response = await client.post("/pooling", json={"data": {"text": "a"}})
        assert response.status_code == 500
        message = "the output of the plugin `codes` cannot be written: SystemExit"
        assert message in response.json()["error"]["message"]
        served.registry.answers.limit_bytes = 10**9
        response = await client.post("/pooling", json={"data": {"text": "b"}})
        assert response.status_code == 413
        assert "The output of the plugin `codes` would take more than" in response.json()["error"]["message"]


async def test_a_plugin_has_routes_of_its_own(
    logged: list[structlog.typing.EventDict], nothing_blocks_the_event_loop: BlockBuster
) -> None:
    nothing_blocks_the_event_loop.deactivate()
    async with serving(LetterModel(), WithRoutes()) as served, served.client() as client:
        response = await client.get("/plugins/codes/codes/ab", headers={"x-request-id": "mine"})
        assert response.json()["codes"] == [97, 98]
        assert response.headers["x-request-id"] == "mine"
        response = await client.post("/plugins/codes/echo", content=b"body")
        assert (response.status_code, response.json()) == (201, {"body": "body", "root": "/plugins/codes"})
        assert (await client.get("/plugins/codes/none")).status_code == 404
        assert (await client.get("/plugins/none/codes/a")).status_code == 404
        assert "route" in (await client.get("/plugins/none/codes/a")).json()["error"]["message"]
        response = await client.get("/plugins/codes/codes/ab", headers={"x-priority": "none"})
        assert response.status_code == 400
        metrics = (await client.get("/metrics")).text
    assert 'route="/plugins/codes/"' in metrics
    (event,) = [event for event in logged if event.get("path") == "/plugins/codes/echo"]
    assert (event["status"], event["body_bytes"]) == (201, 4)


@pytest.mark.parametrize("path", ["fails", "breaks"])
async def test_a_route_that_fails_leaves_the_server_alive(path: str) -> None:
    async with serving(LetterModel(), WithRoutes()) as served, served.client() as client:
        try:
            response = await client.get(f"/plugins/codes/{path}")
        except httpx.RemoteProtocolError:
            assert path == "breaks"  # the head was sent already, so the connection is closed
        else:
            assert response.status_code == 500
            assert "secret" not in response.text
        assert (await client.get("/plugins/codes/codes/a")).status_code == 200


async def test_routes_of_plugins_need_the_key() -> None:
    async with serving(LetterModel(), WithRoutes(), api_keys=("secret",)) as served, served.client() as client:
        assert (await client.get("/plugins/codes/codes/a")).status_code == 401
        assert (await client.post("/pooling", json={"data": {"text": "a"}})).status_code == 401
        headers = {"authorization": "Bearer secret"}
        assert (await client.get("/plugins/codes/codes/a", headers=headers)).status_code == 200


@pytest.mark.parametrize("hook", ["parse", "load", "preprocess", "postprocess"])
async def test_a_client_that_disconnects_in_an_awaited_hook_is_noticed_once(hook: str) -> None:
    letters = AwaitedLetters(waits_in=hook)
    async with serving(letters) as served:
        async with await served.connect() as stream:
            body = b'{"data": {"text": "abc"}}'
            await stream.send(b"POST /pooling HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
            await until(lambda: letters.waiting == 1)
        await until(lambda: is_idle(served.engine) and letters.contexts[0].state is None)
        assert letters.left == [hook]
        assert dict(statistics(served.engine).cancelled) == {hook: 1}


@pytest.mark.parametrize("hook", ["parse", "preprocess", "forward", "postprocess"])
async def test_a_client_that_disconnects_in_a_thread_is_noticed_once(hook: str) -> None:
    gate = Gate()
    letters = Letters(at=lambda name: gate() if name == hook else None)
    async with serving(letters) as served:
        async with await served.connect() as stream:
            body = b'{"data": {"text": "abc"}}'
            await stream.send(b"POST /pooling HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
            await gate.arrived()
        await until(lambda: served.in_flight == 0)
        gate.open()
        await until(lambda: is_idle(served.engine) and len(letters.left) == 1 and letters.contexts[0].state is None)
        assert letters.left == ["preprocess" if hook == "forward" else hook]


async def test_a_deadline_of_http_reaches_the_hooks() -> None:
    letters = AwaitedLetters(waits_in="load")
    async with serving_in_memory(letters) as served, served.client() as client:
        body = {"data": {"text": "abc"}}
        response = await client.post("/pooling", json=body, headers={"x-request-timeout": "0.05"})
        assert response.status_code == 504
        await until(lambda: letters.left == ["load"])


async def test_a_slow_hook_delays_no_text() -> None:
    gate = Gate()
    letters = Letters(at=lambda name: gate() if name == "preprocess" else None)
    async with serving_in_memory(LetterModel(), letters) as served, served.client() as client:
        async with anyio.create_task_group() as tasks:
            for _ in range(20):

                async def ask(answers: list[int]) -> None:
                    answers.append((await client.post("/pooling", json={"data": {"text": "a"}})).status_code)

                answers: list[int] = []
                tasks.start_soon(ask, answers)
            await gate.arrived()
            response = await client.post("/v1/embeddings", json={"input": "text"})
            assert response.status_code == 200
            gate.open()


class _Sized(Letters):
    """Letters with batches of one key for each letter."""

    def batch_key(self, item: str) -> str:
        return item

    def forward(self, batch: Sequence[str]) -> Sequence[int]:
        assert len(set(batch)) == 1
        return super().forward(batch)


async def test_only_inputs_of_one_key_share_a_batch() -> None:
    async with serving_in_memory(_Sized()) as served, served.client() as client:
        response = await client.post("/pooling", json={"data": {"text": "abab"}})
        assert response.json()["data"]["codes"] == [97, 98, 97, 98]


async def test_a_client_that_leaves_a_route_of_a_plugin_cancels_its_work() -> None:
    class Waits(AwaitedLetters, WithRoutes):
        pass

    letters = Waits(waits_in="load")
    async with serving(letters) as served:
        async with await served.connect() as stream:
            await stream.send(b"GET /plugins/codes/codes/abc HTTP/1.1\r\nhost: a\r\n\r\n")
            await until(lambda: letters.waiting == 1)
        await until(lambda: is_idle(served.engine) and letters.left == ["load"])


class Working(Words):
    """Words with routes that start tasks of their own, and one that answers in pieces."""

    def __init__(self, tasks: TaskGroup) -> None:
        self._tasks = tasks
        self.go = anyio.Event()
        self.done = 0
        self.seen: list[int] = []
        self.held: Callable[[], int] = int
        self.arrived: Callable[[], Awaitable[None]] = anyio.lowlevel.checkpoint

    def routes(self, process: Process) -> AsgiApp:
        async def work(results: int, after: anyio.Event) -> None:
            await after.wait()
            for _ in range(results):
                await process("two words")
            self.done += 1

        async def later(request: Request) -> JSONResponse:
            self._tasks.start_soon(work, 3, self.go)
            return JSONResponse({"queued": True})

        async def over(request: Request) -> JSONResponse:
            now = anyio.Event()
            now.set()
            self._tasks.start_soon(work, 1, now)
            await self.arrived()
            return JSONResponse({"queued": True})

        async def pieces(request: Request) -> StreamingResponse:
            async def lines() -> AsyncIterator[bytes]:
                for number in range(6):
                    await process("two words")
                    self.seen.append(self.held())
                    if number % 2:
                        yield b"%d\n" % number

            return StreamingResponse(lines())

        paths = {"/later": later, "/over": over, "/pieces": pieces}
        return Starlette(routes=[Route(path, call, methods=["GET"]) for path, call in paths.items()])


async def test_a_task_that_a_route_has_left_behind_holds_no_memory(logged: list[structlog.typing.EventDict]) -> None:
    async with anyio.create_task_group() as tasks:
        words = Working(tasks)
        async with serving(LetterModel(), words) as served, served.client() as client:
            answers = served.server.memory.budget.answers
            for _ in range(3):
                assert (await client.get("/plugins/working/later")).json() == {"queued": True}
            await until(lambda: [event.get("path") for event in logged].count("/plugins/working/later") == 3)
            words.go.set()
            await until(lambda: words.done == 3)
            assert answers.held_bytes == 0


async def test_a_task_that_works_while_its_request_ends_holds_no_memory() -> None:
    gate = Gate()
    async with anyio.create_task_group() as tasks:
        words = Working(tasks)
        words.arrived = gate.arrived
        async with serving(LetterModel(on_forward=gate), words) as served, served.client() as client:
            answers = served.server.memory.budget.answers
            try:
                assert (await client.get("/plugins/working/over")).json() == {"queued": True}
            finally:
                gate.open()
            await until(lambda: words.done == 1)
            assert answers.held_bytes == 0


async def test_a_route_that_answers_in_pieces_holds_the_results_of_one_piece() -> None:
    async with anyio.create_task_group() as tasks:
        words = Working(tasks)
        async with serving(LetterModel(), words) as served, served.client() as client:
            answers = served.server.memory.budget.answers
            words.held = lambda: answers.held_bytes
            assert (await client.get("/plugins/working/pieces")).text == "1\n3\n5\n"
            await until(lambda: answers.held_bytes == 0)
        one, two, *further = words.seen
        assert 0 < one < two
        assert further == [one, two] * 2
