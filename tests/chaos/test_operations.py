"""Rows 49 to 60: faults inside the server, in its process, and in its machine.

Sustained overload and a long run of everything at once are measured, by `python -m perf overload` and
`python -m perf soak`; here are their first seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import httpx
import pytest

from staged_pool.api.commands.process import EXIT_CONFIG
from staged_pool.api.limits.server_state import GRACE_S
from staged_pool.runtime.config import EngineConfig
from staged_pool.stages.errors import DeadlineExceeded, OutOfMemory, StagedPoolError
from staged_pool.stages.meter import BUCKETS_S
from tests.chaos.child import answer, child
from tests.chaos.harness import UnderFire
from tests.chaos.program import EXIT_FAILED, FILES
from tests.conftest import BACKENDS
from tests.servers.byte_client import EMBED, post, statuses
from tests.servers.process import STEP_S, run_command
from tests.support.gates import Gate
from tests.support.model import expected
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


ASYNCIO = BACKENDS[:2]

POINTS = {
    "take parse": "parse",
    "take preprocess": "preprocess",
    "send batch": "preprocess",
    "take batch": "batch",
    "send postprocess": "batch",
    "take postprocess": "postprocess",
}
"""The stages, and places between them, in which a worker crashes."""


# In one event loop


@dataclass
class Asking:
    """Requests whose answers the test reads later."""

    fire: UnderFire
    tasks: anyio.abc.TaskGroup
    answers: dict[str, httpx.Response] = field(default_factory=dict)

    def ask(self, text: str, **headers: str) -> None:
        self.tasks.start_soon(self._ask, text, headers)

    async def _ask(self, text: str, headers: dict[str, str]) -> None:
        async with self.fire.served.client() as client:
            self.answers[text] = await client.post("/v1/embeddings", json={"input": text}, headers=headers)

    def statuses(self) -> dict[str, int]:
        return {text: answer.status_code for text, answer in self.answers.items()}


def only(text: str, action: Callable[[], object]) -> Callable[[Any], None]:
    """Act when this text is in the batch."""

    def act(texts: Any) -> None:
        if text in texts:
            action()

    return act


def crashes(fire: UnderFire) -> dict[str, int]:
    return {stage.name: stage.crashes for stage in fire.served.engine.statistics().stages if stage.crashes}


@pytest.mark.parametrize(("point", "stage"), POINTS.items())
async def test_row_49_a_worker_that_crashes_once_costs_its_own_request_and_is_restarted(
    point: str, stage: str, fire: UnderFire
) -> None:
    gate = Gate()
    bugs = [RuntimeError("a bug")]

    async def crash(reached: str) -> None:
        if reached == point and bugs:
            raise bugs.pop()

    fire.model.on_preprocess = only("neighbour", gate)
    async with anyio.create_task_group() as tasks:
        asking = Asking(fire, tasks)
        asking.ask("neighbour")
        await gate.arrived()
        fire.act = crash
        response = await fire.embed("victim")
        gate.open()
    assert response.status_code == 500
    assert f"the {stage} stage" in response.json()["error"]["message"]
    assert asking.statuses() == {"neighbour": 200}
    assert crashes(fire) == {stage: 1}
    assert (await fire.embed("later")).status_code == 200


async def test_row_50_a_batch_that_the_device_has_no_memory_for_is_halved_until_it_fits(fire: UnderFire) -> None:
    def allocate(texts: object) -> None:
        assert isinstance(texts, list)
        if len(texts) > 3:
            raise OutOfMemory("no memory")

    fire.model.on_forward = allocate
    texts = ["a" * n for n in range(1, 17)]
    tokens: list[int] = []
    for _ in range(2):
        fire.model.forwarded.clear()
        response = await fire.embed(*texts)
        assert [row["embedding"] for row in response.json()["data"]] == [expected(text).tolist() for text in texts]
        tokens.append(max(sum(map(len, batch)) for batch in fire.model.forwarded))
    assert tokens[1] <= tokens[0] / 2, "it begins with less"


async def test_row_50_one_input_that_the_device_has_no_memory_for_is_answered_503_alone(fire: UnderFire) -> None:
    def allocate(texts: object) -> None:
        assert isinstance(texts, list)
        if "huge" in texts:
            raise OutOfMemory("no memory")

    fire.model.on_forward = allocate
    async with anyio.create_task_group() as tasks:
        asking = Asking(fire, tasks)
        for text in ("one", "huge", "two"):
            asking.ask(text)
    assert asking.statuses() == {"one": 200, "huge": 503, "two": 200}
    assert "retry-after" in asking.answers["huge"].headers


async def overdue(fire: UnderFire) -> float:
    async with fire.served.client() as client:
        text = (await client.get("/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith("staged_pool_preprocess_overdue_calls{")]
    return float(lines[0].split()[1])


async def test_row_52_a_preprocess_thread_that_hangs_is_counted_and_the_last_one_turns_the_server_away() -> None:
    gates = {"first": Gate(), "second": Gate()}

    def hang(texts: Any) -> None:
        for text in texts:
            if text in gates:
                gates[text]()

    engine = EngineConfig(preprocess_limit=2, preprocess_alarm_s=0.4)
    async with UnderFire.opened(engine) as fire:
        async with fire.served.client() as client, anyio.create_task_group() as tasks:
            fire.model.on_preprocess = hang
            asking = Asking(fire, tasks)

            async def hung(count: int) -> None:
                with anyio.fail_after(STEP_S):
                    while await overdue(fire) != count:  # noqa: ASYNC110  # time passes, and nobody says so
                        await anyio.sleep(0.01)

            asking.ask("first")
            await gates["first"].arrived()
            await hung(1)
            assert fire.served.engine._tokenize.limiter.borrowed_tokens == 1  # type: ignore[attr-defined]
            assert (await client.get("/ready")).status_code == 200
            assert (await fire.embed("another")).status_code == 200
            asking.ask("second")
            await gates["second"].arrived()
            await hung(2)
            ready = await client.get("/ready")
            assert ready.status_code == 503
            assert "every preprocess thread" in ready.json()["reason"]
            assert (await fire.embed("late")).status_code == 503
            assert (await client.get("/health")).status_code == 200
            for gate in gates.values():
                gate.open()
            await hung(0)
        await fire.assert_unharmed()
    assert asking.statuses() == {"first": 200, "second": 200}


async def test_row_53_a_burst_beyond_the_limit_is_rejected_with_the_time_to_come_back_and_none_is_lost() -> None:
    allowed, sent = 8, 60
    gate = Gate()
    async with UnderFire.opened(EngineConfig(max_requests=allowed)) as fire:
        fire.model.on_preprocess = gate
        async with anyio.create_task_group() as tasks:
            asking = Asking(fire, tasks)
            for n in range(sent):
                asking.ask(f"burst {n}")
            await until(lambda: len(asking.answers) == sent - allowed)  # the rejected ones do not wait for the others
            gate.open()
        assert Counter(asking.statuses().values()) == {200: allowed, 429: sent - allowed}
        rejected = [answer for answer in asking.answers.values() if answer.status_code == 429]
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in rejected)
        assert len(fire.seen) == allowed
        await fire.assert_unharmed()


@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
async def test_row_57_a_step_of_the_wall_clock_changes_nothing(
    step_s: float, fire: UnderFire, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    fire.model.on_preprocess = only("inside", gate)
    wall_clock = time.time
    async with anyio.create_task_group() as tasks:
        asking = Asking(fire, tasks)
        asking.ask("inside", **{"x-request-timeout": "60"})
        await gate.arrived()
        monkeypatch.setattr(time, "time", lambda: wall_clock() + step_s)
        assert (await fire.embed("after", **{"x-request-timeout": "60"})).status_code == 200
        gate.open()
    assert asking.statuses() == {"inside": 200}
    await fire.assert_unharmed()


@pytest.mark.parametrize("point", ["take parse", "take batch", "send postprocess"])
async def test_row_58_everything_is_answered_after_the_event_loop_was_blocked(point: str, fire: UnderFire) -> None:
    blocks = [0.3]

    async def block(reached: str) -> None:
        if reached == point and blocks:
            time.sleep(blocks.pop())  # noqa: ASYNC251  # this is what is tested

    fire.act = block
    async with anyio.create_task_group() as tasks:
        asking = Asking(fire, tasks)
        for n in range(8):
            asking.ask(f"request {n}")
    assert set(asking.statuses().values()) == {200}
    assert blocks == []
    lag = fire.served.server.state.lag
    await until(lambda: sum(lag.snapshot().counts[bisect_right(BUCKETS_S, 0.1) :]) > 0)  # the metric shows it


@pytest.mark.parametrize("anyio_backend", ASYNCIO)
async def test_row_59_a_host_that_cancels_as_asyncio_does_gets_one_outcome_and_leaves_nothing(fire: UnderFire) -> None:
    """On asyncio only: trio has no cancellation but the one of its scopes."""
    gate = Gate()
    fire.model.on_preprocess = only("held", gate)
    engine = fire.served.engine
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.embed("held"), 0.05)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await engine.embed("held")
    task = asyncio.create_task(engine.embed("held"))
    await until(lambda: engine.statistics().admission.requests == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    statistics = engine.statistics()
    assert sum(statistics.cancelled.values()) + sum(statistics.expired.values()) == 3
    assert statistics.admission.requests == 0
    gate.open()


@pytest.mark.parametrize("anyio_backend", ASYNCIO)
async def test_row_59_a_host_that_cancels_at_any_moment_gets_the_answer_or_its_time_out(fire: UnderFire) -> None:
    """On asyncio only: trio has no cancellation but the one of its scopes."""
    rng = random.Random(59)
    engine = fire.served.engine
    outcomes: Counter[str] = Counter()

    async def embed(text: str, timeout_s: float) -> None:
        try:
            result = await asyncio.wait_for(engine.embed(text, normalize=False), timeout_s)
        except TimeoutError:
            outcomes["timed out"] += 1
        else:
            assert result.embeddings.tolist() == [expected(text).tolist()]
            outcomes["answered"] += 1

    for n in range(10):
        await asyncio.gather(*[embed(f"{n} {m}", rng.uniform(0.0002, 0.02)) for m in range(10)])
    assert outcomes.total() == 100


async def test_row_60_after_a_mixture_of_everything_nothing_is_left(fire: UnderFire) -> None:
    """Two seconds of it; hours of it are `python -m perf soak`."""
    rng = random.Random(60)
    served = fire.served
    bugs = [RuntimeError("a bug") for _ in range(3)]
    outcomes: Counter[tuple[str, object]] = Counter()

    async def act(point: str) -> None:
        chance = rng.random()
        if chance < 0.005 and bugs and point != "send parse":  # there it would be the caller's own task, and no crash
            raise bugs.pop()
        if chance < 0.02:
            time.sleep(0.005)  # noqa: ASYNC251  # a blocked event loop is part of it
        elif chance < 0.1:
            await anyio.sleep(0.002)

    async def good() -> object:
        text = "good " * rng.randint(1, 40)
        response = await fire.embed(text, "b")
        if response.status_code == 200:
            rows = [row["embedding"] for row in response.json()["data"]]
            assert rows == [expected(text).tolist(), expected("b").tolist()]
        return response.status_code

    async def hurried() -> object:
        return (await fire.embed("hurried", **{"x-request-timeout": f"{rng.uniform(0.0005, 0.02):.4f}"})).status_code

    async def poisoned() -> object:
        return (await fire.embed("good", "NaN")).status_code

    async def malformed() -> object:
        return statuses(await fire.talk(post(b'{"input"', "connection: close")))[0]

    async def noisy() -> object:
        await fire.talk(rng.randbytes(rng.randint(1, 2000)) + b"\r\n\r\n")
        return None

    async def leaving() -> object:
        async with await served.connect() as stream:
            await stream.send(EMBED[: rng.randint(1, len(EMBED))])
            await anyio.sleep(rng.uniform(0, 0.01))
        return None

    async def cancelling() -> object:
        with anyio.move_on_after(rng.uniform(0, 0.01)):
            with suppress(DeadlineExceeded):
                await served.engine.embed("cancelled")
        return None

    kinds: dict[Callable[[], Any], set[object]] = {
        good: {200}, hurried: {200, 504}, poisoned: {424}, malformed: {400}, noisy: {None}, leaving: {None},
        cancelling: {None},
    }  # fmt: skip

    async def client(until_s: float) -> None:
        while anyio.current_time() < until_s:
            kind = rng.choice(list(kinds))
            try:
                outcome = await kind()
            except StagedPoolError as error:
                outcome = type(error).__name__
            outcomes[kind.__name__, outcome] += 1

    fire.act = act
    async with anyio.create_task_group() as tasks:
        for _ in range(6):
            tasks.start_soon(client, anyio.current_time() + 1.0)
    allowed = {(kind.__name__, outcome) for kind, them in kinds.items() for outcome in them}
    unlucky = {(kind.__name__, outcome) for kind in kinds for outcome in (500, "StageFailed")}
    assert set(outcomes) <= allowed | unlucky, outcomes
    assert {name for name, _ in outcomes} == {kind.__name__ for kind in kinds}
    await until(lambda: sum(crashes(fire).values()) == 3 - len(bugs))  # the last one may just have happened


# In a process of its own


@pytest.fixture(params=["asyncio", "uvloop", "trio"])
def backend(request: pytest.FixtureRequest) -> str:
    """The event loop of the process."""
    return str(request.param)


def test_row_49_a_stage_that_crashes_again_and_again_is_named_by_ready_and_ends_the_process(
    backend: str, tmp_path: Path
) -> None:
    with child("crash", backend, tmp_path) as server:
        server.wait_ready()
        probe = server.connect()
        probe.sendall(b"GET /ready HTTP/1.1\r\nhost: test\r\ncontent-length: 1\r\nconnection: close\r\n\r\n")
        outcomes: Counter[int] = Counter()
        with suppress(OSError, ValueError):  # it listens no more, or closed without an answer
            while 503 not in outcomes:
                stream = server.send("a")
                if outcomes[500] == 9:  # it may be accepted and never answered, and the probe's time is running out
                    stream.settimeout(GRACE_S / 2)
                outcomes[answer(stream)[0]] += 1
        probe.sendall(b"x")  # the end of a request that had begun before; it must not come much later
        status, body = answer(probe)
        assert status == 503
        assert "the batch stage crashed 9 times" in body["reason"]
        assert outcomes[500] == 9
        assert set(outcomes) <= {500, 503}
        assert server.exit_code() == EXIT_FAILED


def test_row_50_a_lost_device_fails_everything_inside_and_ends_the_process(backend: str, tmp_path: Path) -> None:
    with child("plain", backend, tmp_path) as server:
        server.wait_ready()
        held = server.send("hold")
        server.wait_in_flight(1)
        assert answer(server.send("lose"))[0] == 503
        assert answer(held)[0] == 503
        server.open_gate()
        assert server.exit_code() == EXIT_FAILED


def test_row_51_a_device_that_hangs_fails_everything_inside_and_ends_the_process(backend: str, tmp_path: Path) -> None:
    with child("hang", backend, tmp_path) as server:
        server.wait_ready()
        held = server.send("hold")
        server.wait_in_flight(1)  # they would be tokenized together
        hung = server.send("hang")
        assert answer(hung)[0] == 503
        assert answer(held)[0] == 503
        server.open_gate()
        assert server.exit_code() == EXIT_FAILED, "the thread that hangs is left to itself"


def test_row_54_an_idle_server_ends_on_sigterm(backend: str, tmp_path: Path) -> None:
    with child("plain", backend, tmp_path) as server:
        server.wait_ready()
        idle = server.connect()
        idle.sendall(b"GET /health HTTP/1.1\r\nhost: test\r\n\r\n")
        assert b"HTTP/1.1 200" in idle.recv(2**16)
        server.process.send_signal(signal.SIGTERM)
        assert idle.recv(1) == b""
        assert server.exit_code() == 0


def test_row_54_a_loaded_server_answers_what_is_inside_and_rejects_the_rest(backend: str, tmp_path: Path) -> None:
    with child("plain", backend, tmp_path) as server:
        server.wait_ready()
        held = server.send("hold")
        server.wait_in_flight(1)
        server.process.send_signal(signal.SIGTERM)
        server.wait_ready(503)
        assert answer(server.send("late"))[0] == 503
        server.open_gate()
        assert answer(held)[0] == 200
        assert server.exit_code() == 0


def test_row_54_a_second_sigterm_ends_the_process_at_once(backend: str, tmp_path: Path) -> None:
    with child("plain", backend, tmp_path) as server:
        server.wait_ready()
        server.send("hold")
        server.wait_in_flight(1)
        server.process.send_signal(signal.SIGTERM)
        server.wait_ready(503)
        assert server.end() == 128 + signal.SIGTERM


def test_row_54_a_server_that_still_loads_ends_on_sigterm(backend: str, tmp_path: Path) -> None:
    with child("loading", backend, tmp_path) as server:
        assert server.ask("/health")[0] == 200
        assert server.ask("/ready")[0] == 503
        assert server.end() == 0


def test_row_54_a_client_that_does_not_read_its_answer_does_not_hold_up_the_end(backend: str, tmp_path: Path) -> None:
    with child("wide", backend, tmp_path) as server:
        server.wait_ready()
        stream = server.connect()
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stream.sendall(post(json.dumps({"input": ["a"] * 4}).encode()))
        assert stream.recv(12) == b"HTTP/1.1 200"
        assert server.end() == 0


def test_row_55_after_a_stop_the_expired_requests_are_answered_504_and_the_others_served(
    backend: str, tmp_path: Path
) -> None:
    with child("plain", backend, tmp_path) as server:
        server.wait_ready()
        patient, hurried = server.send("hold"), server.send("hold", "x-request-timeout: 0.8")
        server.wait_until(lambda: bool(server.admission["admitted"] == 2))
        server.process.send_signal(signal.SIGSTOP)
        time.sleep(0.9)  # the process is stopped meanwhile
        server.process.send_signal(signal.SIGCONT)
        assert answer(hurried)[0] == 504
        server.open_gate()
        assert answer(patient)[0] == 200
        server.assert_serves()


def test_row_56_a_server_without_file_descriptors_recovers_when_connections_close(backend: str, tmp_path: Path) -> None:
    with child("few files", backend, tmp_path) as server:
        server.wait_ready()
        streams = [server.connect() for _ in range(FILES + 10)]
        server.wait_until(lambda: server.open_files >= FILES - 2)
        for stream in streams:
            stream.close()
        server.wait_until(server.serves)  # requests in the kernel are closed without an answer, or answered late
        server.assert_serves()
        assert server.end() == 0
    said = (tmp_path / "log").read_bytes()
    assert said.count(b"\n") < 10_000  # trio says it 160 times a second, asyncio 16 times, uvloop not at all


def test_row_56_a_server_whose_log_nobody_reads_any_more_goes_on(backend: str, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    try:
        with child("plain", backend, tmp_path, stderr=writer) as server:
            os.close(writer)
            server.wait_ready()
            os.close(reader)
            for _ in range(3):
                server.assert_serves()
            assert answer(server.send(""))[0] == 400
            assert server.end() == 0
    finally:
        for descriptor in (reader, writer):
            with suppress(OSError):
                os.close(descriptor)


def test_row_56_a_server_whose_log_is_on_a_full_disk_goes_on(backend: str, tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full, child("plain", backend, tmp_path, stderr=full) as server:
        server.wait_ready()
        server.assert_serves()
        assert server.end() == 0


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_row_56_without_names_a_start_from_the_hub_ends_in_one_line(loop: str, tmp_path: Path) -> None:
    """The hub is the one name that a server without images asks for; `.invalid` never resolves (RFC 6761)."""
    arguments = ("serve", "--port", "0", "--backend", loop, "--model", "organisation/model", "--log-format", "json")
    done = run_command(*arguments, HF_ENDPOINT="https://hub.invalid", HF_HUB_OFFLINE="0", HF_HOME=str(tmp_path))
    assert done.returncode == EXIT_CONFIG, done.stderr
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "it is not in the hub's local cache, and the hub cannot be reached" in error
