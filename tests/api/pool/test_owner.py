"""The life of a pool: it opens once, at the first use, and ends once, in many ways."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest
import trio

from staged_pool.pool import Pool, owner
from staged_pool.pool.engine_thread import Backend
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.stages.errors import ConfigError, EngineStopped
from tests.api.pool.conftest import Open
from tests.api.pool.test_pool import in_flight, wait_until
from tests.servers.engines import engine_on
from tests.support.gates import Gate
from tests.support.model import LetterModel

NAME = "staged-pool event loop"


def loops() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


def test_a_pool_opens_at_its_first_use_and_once_for_all_threads(
    monkeypatch: pytest.MonkeyPatch, backend: Backend
) -> None:
    opened: list[EngineConfig] = []

    @asynccontextmanager
    async def opens(config: EngineConfig, *, plugins: object) -> AsyncIterator[Engine]:
        opened.append(config)
        async with engine_on(LetterModel(), config) as engine:
            yield engine

    monkeypatch.setattr(owner, "open_engine", opens)
    pool = Pool("model", backend=backend)
    assert not opened
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(pool.embed, "abcdefgh"))
    with pool as entered:
        assert entered is pool.open() is pool
    assert opened == [pool.config]
    assert not loops()


def test_a_failure_to_open_is_raised_and_the_next_use_tries_again(
    monkeypatch: pytest.MonkeyPatch, backend: Backend
) -> None:
    failures = ["the hub is not reached"]

    @asynccontextmanager
    async def opens(config: EngineConfig, *, plugins: object) -> AsyncIterator[Engine]:
        if failures:
            raise ConfigError(failures.pop())
        async with engine_on(LetterModel(), config) as engine:
            yield engine

    monkeypatch.setattr(owner, "open_engine", opens)
    pool = Pool("model", backend=backend)
    with pytest.raises(ConfigError, match="the hub is not reached"):
        pool.open()
    assert pool.embed("a").embeddings.shape == (1, 4)
    pool.close()
    assert not loops()


def test_a_model_that_is_not_there_is_named(backend: Backend) -> None:
    pool = Pool("no/such/folder", backend=backend, offline=True)
    for _ in range(2):
        with pytest.raises(ConfigError, match="no/such/folder"):
            pool.embed("a")
    pool.close()


def test_a_closed_pool_says_so(letters: Open) -> None:
    pool = letters()
    with pool:
        stream = pool.embed_stream(["a", "b"])
        next(stream)
    for use in (pool.open, pool.statistics, lambda: pool.embed("a"), lambda: pool.card, pool.__enter__):
        with pytest.raises(EngineStopped, match="The pool is closed: make another one"):
            use()
    pool.close()
    never_opened = letters()
    never_opened.close()
    with pytest.raises(EngineStopped, match="closed"):
        never_opened.embed("a")


def test_closing_waits_for_the_calls_of_other_threads(letters: Open) -> None:
    gate = Gate()
    pool = letters(LetterModel(on_forward=gate))
    with ThreadPoolExecutor(2) as threads:
        answer = threads.submit(pool.embed, "a")
        wait_until(lambda: in_flight(pool) == 1)
        closing = threads.submit(pool.close)
        wait_until(lambda: _is_closed(pool))
        assert not closing.done()
        gate.open()
        assert answer.result(30).embeddings.shape == (1, 4)
        closing.result(30)
    assert not loops()


def _is_closed(pool: Pool) -> bool:
    try:
        pool.statistics()
    except EngineStopped:
        return True
    return False


@pytest.mark.parametrize("how", ["the time of a drain", "an error in the block"])
def test_calls_that_closing_does_not_wait_for_fail(letters: Open, how: str) -> None:
    gate = Gate()
    pool = letters(LetterModel(on_forward=gate), drain_timeout_s=0.05)

    def fails() -> None:
        with pool:
            raise KeyError("the caller's own")

    with ThreadPoolExecutor(2) as threads:
        answer = threads.submit(pool.embed, "a")
        wait_until(lambda: in_flight(pool) == 1)
        closing = threads.submit(pool.close if how == "the time of a drain" else fails)
        with pytest.raises(EngineStopped):
            answer.result(30)
        gate.open()  # a forward that runs is not abandoned
        if how == "the time of a drain":
            closing.result(30)
        else:
            with pytest.raises(KeyError):
                closing.result(30)
    assert not loops()


def test_a_pool_that_nobody_closes_ends_when_it_is_collected(letters: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    letters()
    pool = Pool("model")
    pool.embed("a")
    (thread,) = loops()
    seen = weakref.ref(pool)
    del pool
    gc.collect()
    assert seen() is None
    thread.join(30)
    assert not loops()


def test_a_pool_that_is_collected_in_its_own_loop_ends_without_waiting_for_itself(letters: Open) -> None:
    letters()
    kept = [Pool("model")]
    kept[0].open()
    (thread,) = loops()

    async def drop(engine: Engine) -> None:
        kept.clear()

    kept[0].submit(drop).result(30)
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


def test_a_blocking_call_in_the_pools_own_loop_is_refused(letters: Open) -> None:
    pool = letters()

    async def blocks(engine: Engine) -> object:
        return pool.embed("a")

    with pytest.raises(RuntimeError, match="await the engine's methods"):
        pool.call(blocks)
    assert pool.embed("a").embeddings.shape == (1, 4)


@pytest.mark.parametrize("run", [asyncio.run, trio.run], ids=["in asyncio", "in trio"])
def test_a_pool_works_inside_a_running_event_loop(letters: Open, run: object) -> None:
    pool = letters()

    async def cell() -> tuple[int, ...]:
        return pool.embed(["a", "b"]).embeddings.shape

    assert (asyncio.run(cell()) if run is asyncio.run else trio.run(cell)) == (2, 4)
