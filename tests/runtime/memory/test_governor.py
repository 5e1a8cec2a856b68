"""The memory governor: less is done at once the nearer the real figures come to the limit."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.run import run_engine
from staged_pool.runtime.machine.memory import Machine
from staged_pool.runtime.memory import governor as module
from staged_pool.runtime.memory.governor import (
    CHECK_INTERVAL_S,
    IDLE_S,
    LEAST_BUDGET_BYTES,
    TRIM_GROWTH_BYTES,
    MemoryGovernor,
    NoRoom,
    Pressure,
)
from staged_pool.runtime.threads.device import DeviceThreads
from staged_pool.stages.errors import Overloaded
from tests.support.logs import captured_logs
from tests.support.model import LetterModel
from tests.support.stages import batch_stages
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

GIB = 2**30


class Figures(Machine):
    """A machine whose figures the test says."""

    def __init__(self, *, limit: int = 4 * GIB, resident: int = 0, full: float = 0.0) -> None:
        super().__init__(Path("/nowhere"))
        self.limit, self.resident, self.full = limit, resident, full
        self.mappable: int | None = None

    def limit_bytes(self) -> int:
        return self.limit

    def mappable_bytes(self) -> int | None:
        return self.mappable

    def resident_bytes(self) -> int:
        return self.resident

    def fullness(self, limit_bytes: int) -> float:
        return self.full


def test_requests_get_what_models_and_caches_leave() -> None:
    figures = Figures(limit=4 * GIB, resident=0)
    governor = MemoryGovernor(machine=figures)
    governor.measure()
    assert governor.limit_bytes == 4 * GIB
    assert governor.budget.limit_bytes == int(0.85 * 4 * GIB)
    figures.resident, figures.limit = GIB, 3 * GIB  # loaded; and less is left on the machine, of which it has taken it
    governor.measure(reserved_bytes=GIB)
    assert governor.limit_bytes == 4 * GIB
    assert governor.budget.limit_bytes == int(0.85 * 4 * GIB) - 2 * GIB


def test_libraries_that_loading_has_mapped_count_for_a_limit_of_the_process() -> None:
    figures = Figures(limit=4 * GIB)
    governor = MemoryGovernor(3 * GIB, figures)
    governor.measure()
    assert governor.limit_bytes == 3 * GIB
    figures.resident, figures.mappable = GIB, GIB  # the model; and as much as a limit of address space leaves
    governor.measure()
    assert governor.limit_bytes == 2 * GIB
    assert governor.budget.limit_bytes == int(0.85 * 2 * GIB) - GIB


def test_a_limit_that_is_asked_for_counts() -> None:
    governor = MemoryGovernor(2 * GIB, Figures(limit=8 * GIB))
    governor.measure()
    assert governor.limit_bytes == 2 * GIB


def test_a_load_takes_from_what_requests_may_have_until_it_ends() -> None:
    governor = MemoryGovernor(machine=Figures(limit=8 * GIB, resident=GIB, full=0.125))
    governor.measure()
    before = governor.budget.limit_bytes
    with governor.reserved(2 * GIB, "The weights of a"):
        assert governor.budget.limit_bytes == before - 2 * GIB
        with governor.reserved(GIB, "The weights of b"):
            governor.measure()  # as when a third model comes
            assert governor.budget.limit_bytes == before - 3 * GIB
        with pytest.raises(ZeroDivisionError), governor.reserved(GIB, "The weights of c"):
            raise ZeroDivisionError
    assert (governor.loading_bytes, governor.budget.limit_bytes) == (0, before)


def test_a_load_that_does_not_fit_beside_others_reserves_nothing() -> None:
    figures = Figures(limit=8 * GIB, resident=GIB, full=0.125)
    governor = MemoryGovernor(machine=figures)
    governor.measure()
    with governor.reserved(4 * GIB, "The weights of a"):
        with pytest.raises(NoRoom, match=r"^The weights of b take 3,758 MB of memory, and 3,221 MB of 8,590 MB"):
            with governor.reserved(7 * GIB // 2, "The weights of b"):
                raise AssertionError("it does not fit")
        assert governor.loading_bytes == 4 * GIB
    with governor.reserved(7 * GIB // 2, "The weights of b"):
        assert governor.loading_bytes == 7 * GIB // 2
    figures.resident = 0
    with governor.reserved(100 * GIB, "The weights of c"):  # the system tells nothing, so it is let in
        assert governor.budget.limit_bytes == LEAST_BUDGET_BYTES


def test_where_little_is_left_it_says_so_and_goes_on() -> None:
    governor = MemoryGovernor(GIB, Figures(resident=GIB))
    with captured_logs() as logged:
        governor.measure()
    assert [entry["event"] for entry in logged] == ["memory.little_left"]
    assert governor.budget.limit_bytes == LEAST_BUDGET_BYTES


@pytest.mark.parametrize(
    ("full", "pressure"),
    [
        (0.84, Pressure.NONE),
        (0.85, Pressure.SMALLER_BATCHES),
        (0.93, Pressure.NO_KEEP_ALIVE),
        (0.99, Pressure.REJECT),
        (1.2, Pressure.REJECT),
    ],
)
def test_the_nearer_the_limit_the_more_is_given_up(full: float, pressure: Pressure) -> None:
    governor = MemoryGovernor(GIB, Figures())
    told: list[Pressure] = []
    governor.listen(told.append, lambda: True)
    with captured_logs() as logged:
        assert governor.update(full) == (pressure > Pressure.NONE), "freed memory goes back"
        governor.update(full)
    assert governor.pressure == pressure
    assert told == ([pressure] if pressure else []), "once"
    assert [entry["level"] for entry in logged] == ([pressure.name] if pressure else [])
    governor.update(0.1)
    assert governor.pressure == Pressure.NONE
    assert told == ([pressure, Pressure.NONE] if pressure else [])


def test_freed_memory_goes_back_once_nobody_has_a_request() -> None:
    governor, busy = MemoryGovernor(GIB, Figures()), True
    leave = governor.listen(lambda pressure: None, lambda: busy)
    looks = round(IDLE_S / CHECK_INTERVAL_S)
    assert not any(governor.update(0.1) for _ in range(3 * looks))
    busy = False
    assert [governor.update(0.1) for _ in range(2 * looks)].index(True) == looks - 1
    assert not governor.update(0.1), "once in each time of rest"
    leave()


@pytest.mark.parametrize(("grown", "times"), [(TRIM_GROWTH_BYTES, 0), (TRIM_GROWTH_BYTES + 1, 1)])
def test_little_is_left_where_it_is(monkeypatch: pytest.MonkeyPatch, grown: int, times: int) -> None:
    trimmed: list[int] = []
    figures = Figures(resident=GIB)
    monkeypatch.setattr(module, "give_back_freed_memory", lambda: trimmed.append(figures.resident))
    governor = MemoryGovernor(4 * GIB, figures)
    governor.measure()
    figures.resident += grown
    governor._trim()
    governor._trim()
    assert len(trimmed) == times
    figures.resident -= grown  # later growth is measured from here
    governor.measure()
    governor.update(0.9)
    governor._trim()
    assert len(trimmed) == times + 1, "near the limit all of it goes back"


async def test_it_looks_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed = anyio.Event()
    monkeypatch.setattr(module, "give_back_freed_memory", lambda: anyio.from_thread.run_sync(trimmed.set))
    governor = MemoryGovernor(GIB, Figures(full=0.86))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(governor.watch)
        with anyio.fail_after(30):
            await trimmed.wait()
        tasks.cancel_scope.cancel()
    assert governor.pressure == Pressure.SMALLER_BATCHES


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't start new thread")])
async def test_a_measurement_without_memory_ends_nothing(error: Exception) -> None:
    figures, failures, looked = Figures(full=0.9), [error], anyio.Event()

    def fullness(limit_bytes: int) -> float:
        if failures:
            raise failures.pop()
        return 0.9

    figures.fullness = fullness  # type: ignore[method-assign]
    governor = MemoryGovernor(GIB, figures)
    governor.listen(lambda pressure: looked.set(), lambda: True)
    with captured_logs() as logged, anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(governor.watch)
            await looked.wait()
            tasks.cancel_scope.cancel()
    assert [entry["event"] for entry in logged] == ["memory.exhausted", "memory.pressure"]


async def test_an_engine_takes_less_and_then_nothing() -> None:
    governor = MemoryGovernor(GIB, Figures())
    model, config = LetterModel(), EngineConfig(max_batch_tokens=5000, result_cache_mb=1)
    async with (
        DeviceThreads("test device", watchdog_s=30).running() as device,
        run_engine(config, model, device=device, memory=governor) as engine,
    ):
        await engine.embed("kept")
        cache = engine.statistics().result_cache
        assert cache is not None
        assert cache.entries == 1
        (stage,) = batch_stages(engine).values()
        former = stage._former
        governor.update(0.9)
        saves = [former.saves_memory]
        cache = engine.statistics().result_cache
        assert cache is not None
        assert cache.entries == 0
        await engine.embed("still answered")
        governor.update(0.97)
        with pytest.raises(Overloaded, match="short of memory: 97% of its limit"):
            await engine.embed("rejected")
        with pytest.raises(Overloaded):
            await engine.tokenize("rejected, too")
        governor.update(0.5)
        saves.append(former.saves_memory)
        assert saves == [True, False]
        await engine.embed("answered again")


async def test_those_who_wait_for_the_end_of_a_load_are_served_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHECK_INTERVAL_S", 0.001)
    governor = MemoryGovernor(machine=Figures(limit=8 * GIB, resident=GIB, full=0.125))
    governor.measure()
    answers = governor.budget.answers
    calm, holding = answers.limit_bytes, answers.hold()
    async with anyio.create_task_group() as tasks:
        with governor.reserved(4 * GIB, "The weights of a"):
            assert answers.limit_bytes < calm
            assert answers.most_bytes == pytest.approx(calm, abs=2), "what comes back still counts"
            tasks.start_soon(governor.watch)
            tasks.start_soon(holding.gather, calm // 2 + GIB // 4)
            await until(lambda: answers.waiting == 1)
            assert answers.limit_bytes < calm // 2 + GIB // 4
            assert holding.held_bytes == 0
        await until(lambda: holding.held_bytes > 0)
        tasks.cancel_scope.cancel()
    assert (answers.limit_bytes, answers.most_bytes, answers.waiting) == (calm, calm, 0)
