"""Public incidents of servers that were alive by their probes, and answered no request.

Each is repeated on a real server, which must say so within two seconds, or not be hurt at all. The usual design, beside
it, says 200 for ever. docs/incidents.md has the table.
"""

from __future__ import annotations

import base64
import io
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import pytest
import structlog
from blockbuster import BlockBuster
from PIL import Image
from starlette.routing import Route

from staged_pool.api.http.listener import bind
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.model import ModelInput
from staged_pool.runtime.payloads import Payload, Row
from staged_pool.runtime.plugins.processor import PluginContext
from staged_pool.stages.errors import DeviceLost, ModelFailed
from staged_pool.stages.scheduling.service_time import EARLY_STALL_S, STALL_LEARNED_BATCHES
from staged_pool.stages.stage import StageOptions
from staged_pool.stages.supervise import RestartPolicy
from tests.conftest import BACKENDS
from tests.incidents import usual
from tests.incidents.probing import PROBE_S, embed, in_thread, kubelet, probe
from tests.models.tiny import build
from tests.runtime.plugins.hosting import Letters
from tests.servers.on_socket import server_on, serving
from tests.servers.process import ServerProcess, serve_command
from tests.servers.tiny_models import folder, tiny
from tests.support.gates import Gate
from tests.support.model import LetterModel
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


class Clock:
    """Time that passes when the test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def loops_may_block(nothing_blocks_the_event_loop: BlockBuster) -> None:
    """For servers in the usual designs, and for plugins that block."""
    nothing_blocks_the_event_loop.deactivate()


# A forward that never returns


async def test_a_wedged_device_is_not_ready_within_two_seconds() -> None:
    """A CUDA kernel hung for ever behind vLLM: `/health` was 200 the entire time, and replicas sat dead for hours.

    See https://github.com/vllm-project/vllm/pull/46811.
    """
    clock, wedge = Clock(), Gate()
    model = LetterModel(on_forward=lambda texts: wedge() if "wedge" in texts else None)
    async with serving(model, options=StageOptions(clock=clock)) as served, anyio.create_task_group() as tasks:
        for number in range(STALL_LEARNED_BATCHES):
            assert (await in_thread(embed, served.port, f"text {number}")).status == 200
        tasks.start_soon(in_thread, embed, served.port, "wedge")
        await wedge.arrived()
        assert (await in_thread(probe, served.port, "/ready")).passes
        clock.now += PROBE_S
        ready = await in_thread(probe, served.port, "/ready")
        assert (ready.status, ready.reason) == (
            503,
            "a forward of the text lane has run for 2.0 s, and at most 1.0 s were expected",
        )
        assert (await in_thread(probe, served.port)).passes, "the forward may still end: it is not killed for it"
        wedge.open()
        await until(lambda: served.in_flight == 0)
        assert (await in_thread(probe, served.port, "/ready")).passes


async def test_a_device_that_wedges_in_one_of_its_first_batches_is_not_ready_after_ten_seconds() -> None:
    """The kernel of the incident above hung for certain shapes, so it may hang early.

    See https://github.com/vllm-project/vllm/pull/46811.
    """
    clock, wedge = Clock(), Gate()
    model = LetterModel(on_forward=lambda texts: wedge() if "wedge" in texts else None)
    async with serving(model, options=StageOptions(clock=clock)) as served, anyio.create_task_group() as tasks:
        assert (await in_thread(embed, served.port, "a text")).status == 200
        tasks.start_soon(in_thread, embed, served.port, "wedge")
        await wedge.arrived()
        clock.now += EARLY_STALL_S
        assert (await in_thread(probe, served.port, "/ready")).passes
        clock.now += 0.1
        assert (await in_thread(probe, served.port, "/ready")).status == 503
        wedge.open()


async def test_a_device_that_stays_wedged_ends_the_server() -> None:
    """The engine hung with its requests in flight, and nothing ended it: only the log said so.

    See https://github.com/vllm-project/vllm/issues/39863.
    """
    wedge, listener = Gate(), bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server = server_on(LetterModel(on_forward=wedge), engine=EngineConfig(watchdog_s=0.1))
    answers = []

    async def ask() -> None:
        await until(lambda: not server.registry.not_ready)
        answers.append(await in_thread(embed, port, "wedge", limit_s=30))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        with pytest.raises(DeviceLost, match=r"did not answer within 0\.1 s"), anyio.fail_after(30):
            await server.run(listener)
    assert [each.status for each in answers] == [503]
    assert (await in_thread(probe, port)).failure == "connection refused", "a supervisor sees its end at once"
    wedge.open()


def test_a_worker_that_hangs_is_alive_for_ever(loops_may_block: None) -> None:
    """The probes of the tests above, on the design of the incidents."""
    wedge = Gate()
    worker = usual.OneWorker(wedge)
    routes = [Route("/health", usual.alive), Route("/v1/embeddings", worker.embed, methods=["POST"])]
    with usual.running(routes) as port:
        assert embed(port, "wedge").failure == "timeout"
        assert probe(port).passes, "no probe tells"
        wedge.open()


# An input that ends the worker of all


async def test_an_image_of_one_pixel_harms_nobody_else(one_pixel: str, sees: EngineConfig) -> None:
    """An image of 1x1 ended Infinity's `/v1/embeddings` until the pod was restarted; its health check stayed 200.

    See https://github.com/michaelfeil/infinity/issues/609.
    """
    async with serving(sees) as served, served.client() as client, kubelet(served.port, "/ready") as ready:
        broken = one_pixel[: len(one_pixel) // 2]
        for url in (one_pixel, f"data:image/jpeg;base64,{broken}", one_pixel):
            answer = await client.post("/v1/embeddings", json={"input": [{"image": url}]})
            assert answer.status_code in (200, 400)
        answer = await client.post("/v1/embeddings", json={"input": "a text"})
        assert answer.status_code == 200
        await until(lambda: bool(ready))
    assert [each for each in ready if not each.passes] == []


async def test_an_input_that_raises_in_preprocess_or_in_the_forward_fails_alone() -> None:
    """A worker of Infinity ended with its first exception, and requests piled up.

    See https://github.com/michaelfeil/infinity/pull/668.
    """
    model = Fragile()
    async with serving(model) as served, served.client() as client, kubelet(served.port, "/ready") as ready:
        for poison in ("preprocess", "forward"):
            texts = ["good", poison, "better"]
            statuses: dict[str, int] = {}

            async def ask(text: str, statuses: dict[str, int] = statuses) -> None:
                statuses[text] = (await client.post("/v1/embeddings", json={"input": text})).status_code

            async with anyio.create_task_group() as tasks:
                for text in texts:
                    tasks.start_soon(ask, text)
            assert statuses == {"good": 200, poison: 424, "better": 200}
        await until(lambda: bool(ready))
    assert [each for each in ready if not each.passes] == []


def test_a_worker_that_ends_with_an_exception_is_alive_for_ever(loops_may_block: None) -> None:
    """The probes of the tests above, on the design of the incidents."""

    def forward(text: str) -> str:
        if text == "poison":
            raise ValueError(text)
        return text

    worker = usual.OneWorker(forward)
    routes = [Route("/health", usual.alive), Route("/v1/embeddings", worker.embed, methods=["POST"])]
    with usual.running(routes) as port:
        assert embed(port, "good").status == 200
        assert embed(port, "poison", limit_s=0.2).failure == "timeout"
        assert embed(port, "good").failure == "timeout", "nobody is served any more"
        assert probe(port).passes, "no probe tells"


# A task that is dead for good


async def test_a_stage_whose_workers_are_dead_ends_the_server() -> None:
    """mlx-lm's generation thread died of an exception: `/v1/models` was 200, and every completion hung.

    See https://github.com/ml-explore/mlx-lm/issues/1505.
    """
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    restarts = RestartPolicy(max_crashes=3, first_delay_s=0.001)
    server = server_on(Fragile(), options=StageOptions(restarts=restarts))
    answers = []

    async def ask() -> None:
        await until(lambda: not server.registry.not_ready)
        for number in range(restarts.max_crashes + 2):
            answers.append(await in_thread(embed, port, f"rows {number}"))
            if answers[-1].status != 500:
                break

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        with pytest.raises(DeviceLost, match="the postprocess stage crashed 4 times"), anyio.fail_after(30):
            await server.run(listener)
    assert [each.failure for each in answers[:-1]] == [""] * (len(answers) - 1), "each got an answer"
    assert (await in_thread(probe, port)).failure == "connection refused"


# A dead process behind a living one


def test_a_front_whose_engine_process_died_is_not_ready_within_two_seconds(tmp_path: Path) -> None:
    """vLLM's engine process died, its API server answered probes with 200, and inference had stopped.

    tests/api/fleet kills it under load, on asyncio and trio.

    See https://github.com/vllm-project/vllm/issues/39863.
    """
    model = ("--model", str(folder("embedder")), "--dtype", "float32", "--torch-threads", "1")
    command = serve_command(*model, "--preprocess-limit", "1", "--api-servers", "1")
    with ServerProcess(command, tmp_path / "log") as server:
        server.wait_ready()
        assert embed(server.port, "a text", limit_s=30).status == 200
        (engine,) = [
            event["pid"]
            for event in server.events
            if event["event"] == "process.started" and event["child"] == "engine"
        ]
        os.kill(engine, signal.SIGKILL)
        server.wait_until(lambda: probe(server.port, "/ready").status == 503, within_s=PROBE_S)
        assert probe(server.port).passes, "the front is alive, and its engine process is started again"
        assert embed(server.port, "another", limit_s=30).status == 503, "and nobody waits for ever"


# User code that blocks the event loop


@pytest.mark.parametrize("loop", [pytest.param(each.values[0], id=each.id) for each in BACKENDS])
def test_a_plugin_that_blocks_the_event_loop_is_not_alive(
    loop: tuple[str, dict[str, Any]], logged: list[structlog.typing.EventDict], loops_may_block: None
) -> None:
    """Ray Serve's replicas passed health checks while user code blocked their event loop.

    See https://github.com/ray-project/ray/issues/61263.
    """
    held, blocks = Gate(), threading.Event()

    class Blocks(Letters):
        async def load(self, prompt: Any, context: PluginContext) -> Any:
            blocks.set()
            held()
            return await super().load(prompt, context)

    with (
        anyio.from_thread.start_blocking_portal(*loop) as portal,
        portal.wrap_async_context_manager(serving(Blocks())) as served,
    ):
        assert probe(served.port).passes
        body = b'{"data": {"text": "a"}}'
        blocking = threading.Thread(target=probe, args=(served.port, "/pooling"), kwargs={"body": body, "limit_s": 30})
        blocking.start()
        assert blocks.wait(30), "the hook runs"
        assert probe(served.port).failure == "timeout", "a supervisor restarts it"
        (event,) = [event for event in logged if event["event"] == "plugin.hook_blocks"]
        assert (event["plugin"], event["hook"]) == ("codes", "load"), "the log names the hook while it blocks"
        held.open()
        blocking.join(30)
        assert probe(served.port, limit_s=30).passes


class Fragile(LetterModel):
    """Raises an unexpected exception in the stage that a text names."""

    def preprocess(self, inputs: Sequence[ModelInput]) -> Any:
        prepared = super().preprocess(inputs)
        if any("preprocess" in text for text in self.preprocessed[-1]):
            raise KeyError("preprocess")
        return prepared

    def forward(self, payloads: Sequence[Payload], at_once: int = 1, /) -> list[Row | ModelFailed]:
        rows = super().forward(payloads, at_once)
        if any("forward" in text for text in self.forwarded[-1]):
            raise KeyError("forward")
        return [
            _Unreadable(row.values, row.payload) if isinstance(row, Row) and "rows" in text else row
            for row, text in zip(rows, self.forwarded[-1], strict=True)
        ]


class _Unreadable(Row):
    """A row that postprocess cannot count."""

    @property
    def numbers(self) -> int:
        raise KeyError("rows")


@pytest.fixture
def one_pixel() -> str:
    """The URL of an image of one pixel."""
    png = io.BytesIO()
    Image.new("L", (1, 1)).save(png, "PNG")
    return "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()


@pytest.fixture(scope="module")
def sees(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """A real model of texts and images."""
    return tiny(build("clip", tmp_path_factory.mktemp("sees") / "clip"))
