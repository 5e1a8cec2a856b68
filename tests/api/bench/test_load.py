"""Generators in virtual time: which times count, and what becomes of each request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import anyio
import numpy as np
import pytest

from staged_pool.api.bench.connection import BrokenAnswer, Reply
from staged_pool.api.bench.level import Level, Plan
from staged_pool.api.bench.load import RETRY_AFTER_S, Generator, Limits
from staged_pool.api.bench.records import BROKEN, NO_CONNECTION, NOT_SENT, OK, TIMED_OUT, UNFINISHED, Columns, Records
from staged_pool.api.bench.workload import Made
from tests.sim.clock import BACKENDS, Backend, run

MADE = Made(b"request", "texts", 2)

each_backend = pytest.mark.parametrize("backend", BACKENDS)


def reply(status: int = 200, head: bytes = b"", tokens: int = 7) -> Reply:
    body = b'{"data":[],"usage":{"prompt_tokens":%d}}' % tokens
    return Reply(status, b"HTTP/1.1 %d Any\r\n%s\r\n" % (status, head), body)


@dataclass
class World:
    """A server with one worker, in virtual time: requests wait for each other, in order."""

    service_s: float = 0.1
    answer: Callable[[int], Reply | Exception] = lambda number: reply()
    """The answer to each request by its number."""
    worker: anyio.Lock = field(default_factory=anyio.Lock)
    begun: int = 0
    opened: int = 0
    closed: int = 0
    records: Records = field(default_factory=Records)

    def connect(self) -> _Connection:
        self.opened += 1
        return _Connection(self)

    def columns(self) -> Columns:
        columns = self.records.columns()
        order = np.lexsort((columns.ended, columns.due))
        return columns.at(order)

    def generator(self, **limits: float) -> Generator:
        made = Limits(**limits)  # type: ignore[arg-type]
        return Generator(lambda: MADE, self.connect, self.records, made, anyio.current_time)

    def level(self, plan: Plan) -> Level:
        rng = np.random.default_rng(1)
        return Level(plan, lambda: MADE, self.connect, Limits(), rng, clock=anyio.current_time)


class _Connection:
    def __init__(self, world: World) -> None:
        self._world = world

    async def exchange(self, request: bytes) -> Reply:
        world = self._world
        assert request == MADE.content
        world.begun += 1
        number = world.begun
        async with world.worker:
            await anyio.sleep(world.service_s)
        answer = world.answer(number)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def close(self) -> None:
        self._world.closed += 1


def in_virtual_time(backend: Backend, main: Callable[[], Awaitable[None]]) -> None:
    assert run(main, backend=backend, seed=1) == []


@each_backend
def test_latencies_of_an_open_loop_count_from_when_requests_are_due(backend: Backend) -> None:
    world = World()

    async def main() -> None:
        start = anyio.current_time()
        await world.generator().open_loop([0.0, 0.0, 0.0, 1.0], start)
        assert anyio.current_time() - start == pytest.approx(1.1)

    in_virtual_time(backend, main)
    columns = world.columns()
    assert np.sort(columns.latency_s) == pytest.approx([0.1, 0.1, 0.2, 0.3])
    assert columns.status.tolist() == [OK] * 4
    assert columns.items.tolist() == [2] * 4
    assert columns.tokens.tolist() == [7] * 4
    assert max(world.records.lateness) == 0
    assert world.opened == world.closed == world.records.connections == 3


@each_backend
def test_a_slow_server_does_not_delay_the_next_requests(backend: Backend) -> None:
    """The error of closed loops, which an open loop must not have: a stall of 5 s holds up all that come in it."""
    world = World(answer=lambda number: reply())

    async def main() -> None:
        await world.worker.acquire()  # it stalls

        async def go_on() -> None:
            await anyio.sleep(5.0)
            world.worker.release()

        async def load() -> None:
            await world.generator().open_loop(list(range(10)), anyio.current_time())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(load)
            await go_on()

    in_virtual_time(backend, main)
    columns = world.columns()
    assert (columns.sent - columns.due).tolist() == pytest.approx([0] * 10)
    assert columns.latency_s[0] == pytest.approx(5.1)
    assert columns.latency_s[4] > 1
    assert columns.latency_s[9] == pytest.approx(0.1)


@each_backend
def test_each_outcome_has_its_place(backend: Backend) -> None:
    answers: list[Reply | Exception] = [
        reply(200), reply(429, b"retry-after: 3\r\n"), reply(500), BrokenAnswer("x"), OSError("x")
    ]  # fmt: skip
    world = World(answer=lambda number: answers[number - 1])

    async def main() -> None:
        await world.generator().open_loop([0.0, 1.0, 2.0, 3.0, 4.0], anyio.current_time())

    in_virtual_time(backend, main)
    assert world.columns().status.tolist() == [200, 429, 500, BROKEN, NO_CONNECTION]
    assert world.columns().tokens.tolist() == [7, -1, -1, -1, -1]
    assert dict(world.records.statuses) == {200: 1, 429: 1, 500: 1, BROKEN: 1, NO_CONNECTION: 1}


@each_backend
def test_a_client_waits_for_the_timeout_and_no_longer(backend: Backend) -> None:
    world = World(service_s=60.0)

    async def main() -> None:
        start = anyio.current_time()
        await world.generator(timeout_s=2.0).open_loop([0.0, 0.5], start)
        assert anyio.current_time() - start == pytest.approx(2.5)

    in_virtual_time(backend, main)
    assert world.columns().status.tolist() == [TIMED_OUT] * 2
    assert world.columns().latency_s.tolist() == pytest.approx([2.0, 2.0])


@each_backend
def test_no_more_connections_are_opened_than_allowed(backend: Backend) -> None:
    world = World(service_s=10.0)

    async def main() -> None:
        await world.generator(max_connections=2).open_loop([0.0, 0.1, 0.2, 0.3], anyio.current_time())

    in_virtual_time(backend, main)
    assert world.columns().status.tolist() == [200, 200, NOT_SENT, NOT_SENT]
    assert world.begun == world.opened == 2


@each_backend
@pytest.mark.parametrize("is_open", [True, False])
def test_the_end_by_the_user_leaves_no_request_uncounted(backend: Backend, is_open: bool) -> None:
    world = World(service_s=1.0)

    async def main() -> None:
        with anyio.move_on_after(3.5):
            if is_open:
                await world.generator().open_loop([0.0] * 8, anyio.current_time())
            else:
                await world.generator().closed_loop(8, 100.0)

    in_virtual_time(backend, main)
    assert world.records.statuses[UNFINISHED] == (5 if is_open else 8)
    assert world.records.statuses[OK] == 3
    assert len(world.records) == world.begun
    assert world.opened == 8
    assert world.closed >= 8


@each_backend
def test_clients_of_a_closed_loop_send_one_request_after_the_other(backend: Backend) -> None:
    world = World(service_s=0.1)

    async def main() -> None:
        start = anyio.current_time()
        await world.generator().closed_loop(2, 0.95)
        assert anyio.current_time() - start == pytest.approx(1.1)

    in_virtual_time(backend, main)
    assert world.records.statuses == {OK: 11}
    assert np.sort(world.columns().latency_s)[1:] == pytest.approx([0.2] * 10, abs=0.11)
    assert world.records.connections == 2
    assert max(world.records.lateness) == pytest.approx(0, abs=1e-9)


@each_backend
@pytest.mark.parametrize(
    ("head", "pause_s"),
    [(b"retry-after: 0.4\r\n", 0.4), (b"", RETRY_AFTER_S), (b"retry-after: Sat, 1 Jan\r\n", RETRY_AFTER_S)],
)
def test_a_client_of_a_closed_loop_heeds_a_rejection(backend: Backend, head: bytes, pause_s: float) -> None:
    world = World(service_s=0.1, answer=lambda number: reply(429, head))

    async def main() -> None:
        await world.generator().closed_loop(1, 3.0)

    in_virtual_time(backend, main)
    assert np.diff(world.columns().due) == pytest.approx(0.1 + pause_s)


@each_backend
def test_a_level_counts_its_rounds_and_not_its_warm_up(backend: Backend) -> None:
    world = World(service_s=0.1)
    plan = Plan(rate=5.0, warmup_s=2.0, round_s=3.0, rounds=2, slo_s=0.15, times=[i / 5 for i in range(40)])
    level = world.level(plan)
    in_virtual_time(backend, level.run)
    report = level.report()
    assert report["requests"] == {
        "due": 30, "answered": 30, "late": 0, "failed": 0, "rejected": 0, "not_sent": 0, "unfinished": 0
    }  # fmt: skip
    assert report["sent"] == {"200": 40}
    assert report["offered_rate"] == 5.0
    assert (report["seconds"], report["mode"], report["is_whole"]) == (6.0, "open", True)
    assert [each["due"] for each in report["rounds"]] == [15, 15]
    assert report["rates"]["answered"] == {"value": 5.0, "low": 5.0, "high": 5.0}
    assert report["rates"]["goodput"]["value"] == 5.0
    assert report["rates"]["items"]["value"] == 10.0
    assert report["rates"]["tokens"]["value"] == 35.0
    assert report["latency_ms"]["p50"] == 100.0
    assert report["latency_ms"]["p50_rounds"] == {"value": 100.0, "low": 100.0, "high": 100.0}
    assert report["latency_ms"]["p99"] is None
    assert [(row["at_s"], row["due"], row["p50_ms"]) for row in report["timeline"]] == [(s, 5, 100.0) for s in range(8)]
    assert report["stages_ms"] is None
    assert report["generator"]["is_bottleneck"] is False


@each_backend
def test_an_overloaded_level_has_late_answers_and_less_throughput_than_offered(backend: Backend) -> None:
    world = World(service_s=0.1)
    plan = Plan(rate=20.0, warmup_s=0.0, round_s=5.0, rounds=1, slo_s=1.05)
    level = world.level(plan)
    in_virtual_time(backend, level.run)
    report = level.report()
    assert report["requests"]["due"] == report["requests"]["answered"] == 100
    assert report["offered_rate"] == 20.0
    assert report["rates"]["answered"]["value"] == pytest.approx(10, abs=0.5)
    late = report["requests"]["late"]
    assert report["rates"]["goodput"]["value"] == pytest.approx((100 - late) / 5)
    assert 60 < late < 95


@each_backend
def test_a_level_that_the_user_ends_counts_its_time_so_far(backend: Backend) -> None:
    world = World(service_s=0.1)
    plan = Plan(times=[i / 5 for i in range(60)], warmup_s=1.0, round_s=3.0, rounds=3)
    level = world.level(plan)

    async def main() -> None:
        with anyio.move_on_after(5.05):
            await level.run()

    in_virtual_time(backend, main)
    report = level.report()
    assert report["is_whole"] is False
    assert report["seconds"] == pytest.approx(4.05)
    assert [each["due"] for each in report["rounds"]] == [15, 6]
    assert report["requests"]["answered"] == 20
    assert report["requests"]["unfinished"] == 1
    assert report["rates"]["answered"]["value"] == pytest.approx(5, abs=0.3)


@each_backend
def test_a_level_that_ends_in_its_warm_up_has_no_numbers(backend: Backend) -> None:
    world = World()
    level = world.level(Plan(clients=1))

    async def main() -> None:
        with anyio.move_on_after(1.0):
            await level.run()

    in_virtual_time(backend, main)
    report = level.report()
    assert report["requests"]["due"] == 0
    assert (report["rates"]["answered"], report["latency_ms"]["p50"], report["rounds"]) == (None, None, [])


@pytest.mark.parametrize(
    ("lateness_s", "latency_s", "is_bottleneck"),
    [(0.02, 0.05, True), (0.009, 0.05, False), (0.02, 0.5, False), (0.06, 0.5, True)],
)
def test_a_generator_that_is_late_says_so(lateness_s: float, latency_s: float, is_bottleneck: bool) -> None:
    level = World().level(Plan(rate=1, warmup_s=0))
    level.started = 0.0
    for second in range(20):
        level.records.add(MADE, second, second, second + latency_s, reply())
        level.records.lateness.append(lateness_s if second % 4 == 0 else 0.0)
    generator = level.report()["generator"]
    assert generator["is_bottleneck"] is is_bottleneck
    assert generator["lateness_p99_ms"] == pytest.approx(lateness_s * 1e3, rel=0.2)


def test_the_times_of_stages_are_means_and_the_rest_is_what_is_missing() -> None:
    level = World().level(Plan(rate=1, warmup_s=0))
    level.started = 0.0
    heads = [b"Server-Timing: parse;dur=10, queue;desc=x;dur=20\r\n", b"server-timing: parse;dur=30\r\n", b""]
    for second, head in enumerate(heads):
        level.records.add(MADE, second, second, second + 0.1, reply(head=head))
    level.records.add(MADE, 3, 3, 3.1, reply(429, b"server-timing: parse;dur=500\r\n"))
    assert level.report()["stages_ms"] == {"parse": 20.0, "queue": 10.0, "rest": 70.0}


def test_kinds_of_a_mix_have_numbers_of_their_own() -> None:
    level = World().level(Plan(rate=1, warmup_s=0))
    level.started = 0.0
    for second in range(9):
        made = Made(b"", "images" if second % 3 == 0 else "texts", 1)
        level.records.add(made, second, second, second + (1.0 if made.kind == "images" else 0.1), reply())
    kinds = level.report()["kinds"]
    assert {name: (each["requests"]["answered"], each["latency_ms"]["p50"]) for name, each in kinds.items()} == {
        "texts": (6, 100.0),
        "images": (3, 1000.0),
    }
