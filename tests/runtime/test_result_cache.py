"""The cache of results: bounded, exact, and of what the device gave."""

from __future__ import annotations

from collections import OrderedDict

import anyio
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from staged_pool.runtime.caching.result_cache import ResultCache
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.engine import Engine
from staged_pool.runtime.payloads import Row, SparseVector, TokenSequence
from staged_pool.runtime.requests import DENSE_ONLY, Output
from staged_pool.runtime.statistics import ResultCacheStatistics
from staged_pool.stages.errors import ConfigError, ModelFailed
from tests.runtime.images import engine_on
from tests.runtime.test_coalescing import busy_engine
from tests.support.gates import Gate
from tests.support.model import LetterModel, expected
from tests.support.waiting import until

ENTRY_BYTES = 640
"""Bytes that count for an entry beside its numbers."""
PAYLOAD = TokenSequence([1], DENSE_ONLY)


def a_row(*values: float) -> Row:
    return Row({Output.DENSE: np.array(values, np.float32)}, PAYLOAD)


def dense(row: Row | None) -> list[float]:
    assert row is not None
    values = row.values[Output.DENSE]
    assert not isinstance(values, SparseVector)
    return [float(value) for value in values]


keys = st.sampled_from([bytes([key]) * 16 for key in range(6)])


@given(st.lists(st.tuples(st.sampled_from(["get", "keep", "clear"]), keys, st.integers(1, 300)), max_size=80))
def test_it_keeps_what_was_used_last_up_to_its_bytes(script: list[tuple[str, bytes, int]]) -> None:
    limit = 3 * ENTRY_BYTES
    cache, kept, hits, misses = ResultCache(limit), OrderedDict[bytes, int](), 0, 0

    def size(length: int) -> int:
        return ENTRY_BYTES + 4 * length

    for step, key, length in script:
        if step == "clear":
            cache.clear()
            kept.clear()
        elif step == "get":
            found = cache.get(key, PAYLOAD)
            if key in kept:
                hits += 1
                kept.move_to_end(key)
                assert dense(found) == [float(key[0])] * kept[key]
            else:
                misses += 1
                assert found is None
        else:
            cache.keep(key, a_row(*[key[0]] * length))
            if key not in kept and size(length) <= limit:
                kept[key] = length
                while sum(map(size, kept.values())) > limit:
                    kept.popitem(last=False)
        assert cache.statistics == ResultCacheStatistics(
            hits=hits, misses=misses, entries=len(kept), bytes=sum(map(size, kept.values())), max_bytes=limit
        )


def test_the_first_row_of_an_identity_stays() -> None:
    cache = ResultCache(10**6)
    cache.keep(b"a", a_row(1.0))
    cache.keep(b"a", a_row(2.0))
    assert dense(cache.get(b"a", PAYLOAD)) == [1.0]


def test_a_row_that_is_kept_holds_nothing_else_and_cannot_be_written_to() -> None:
    cache = ResultCache(10**6)
    batch = np.arange(6, dtype=np.float32).reshape(2, 3)
    sparse = SparseVector(np.array([3, 5], np.int32), np.array([0.5, 1.5], np.float32))
    cache.keep(b"a", Row({Output.DENSE: batch[1], Output.SPARSE: sparse}, PAYLOAD))
    batch[:] = 0.0
    found = cache.get(b"a", PAYLOAD)
    assert found is not None
    vector, weights = found.values[Output.DENSE], found.values[Output.SPARSE]
    assert not isinstance(vector, SparseVector)
    assert isinstance(weights, SparseVector)
    assert vector.tolist() == [3.0, 4.0, 5.0]
    assert vector.base is None
    for array in (vector, weights.indices, weights.values):
        assert not array.flags.writeable
    assert cache.statistics.bytes == ENTRY_BYTES + 3 * 4 + 2 * 8
    assert sparse.values.flags.writeable, "whoever asked first has a row of its own"


def shown(engine: Engine) -> tuple[int, int, int]:
    cache = engine.statistics().result_cache
    assert cache is not None
    return cache.hits, cache.misses, cache.entries


def test_a_row_of_a_scope_counts_with_its_key() -> None:
    cache = ResultCache(10**6)
    cache.keep((b"a", ("tenant", None)), a_row(1.0))
    cache.keep(b"a", a_row(2.0))
    assert dense(cache.get((b"a", ("tenant", None)), PAYLOAD)) == [1.0]
    assert dense(cache.get(b"a", PAYLOAD)) == [2.0]
    assert cache.statistics.bytes == 2 * (ENTRY_BYTES + 4) + 192


@pytest.mark.anyio
@pytest.mark.parametrize("shared", [False, True])
async def test_tenants_and_salts_have_results_of_their_own(shared: bool) -> None:
    model = LetterModel()
    asked = [{"tenant": "a"}, {"tenant": "b"}, {}, {"tenant": "a", "cache_salt": "x"}, {"cache_salt": "x"}]
    async with engine_on(model, result_cache_mb=1, share_between_tenants=shared) as engine:
        for each in asked * 2:
            await engine.embed("same", **each)  # type: ignore[arg-type]
        hits, misses, entries = shown(engine)
    assert len(model.forwarded) == misses == entries == (2 if shared else 5)
    assert hits == 10 - misses


@pytest.mark.anyio
async def test_an_input_that_comes_again_does_not_go_through_the_device_again() -> None:
    model = LetterModel()
    async with engine_on(model, result_cache_mb=1) as engine:
        first = await engine.embed(["one", "two"])
        again = await engine.embed(["two", "three", "one"])
        assert shown(engine) == (2, 3, 3)
        device = engine.statistics().device
        assert (device.items, device.tokens) == (3, 11)
    assert model.forwarded[1:] == [["three"]]
    assert_array_equal(again.embeddings, [expected("two"), expected("three"), expected("one")])
    assert again.embeddings[2].tobytes() == first.embeddings[0].tobytes()
    assert again.usage.prompt_tokens == 11, "tokens of what is asked for, wherever the answer comes from"


@pytest.mark.anyio
async def test_what_is_made_of_the_row_is_made_anew() -> None:
    model = LetterModel()
    async with engine_on(model, result_cache_mb=1) as engine:
        whole = await engine.embed("same")
        cut = await engine.embed("same", dimensions=2)
        assert_array_equal(cut.embeddings, whole.embeddings[:, :2])
        cut.embeddings[:] = 0.0
        plain = await engine.embed("same", normalize=False)
        plain.embeddings[:] = 0.0
        assert_array_equal((await engine.embed("same", normalize=False)).embeddings, whole.embeddings)
    assert model.forwarded == [["same"]]


@pytest.mark.anyio
async def test_a_failure_is_not_kept() -> None:
    model = LetterModel()
    async with engine_on(model, result_cache_mb=1) as engine:
        for _ in range(2):
            with pytest.raises(ModelFailed):
                await engine.embed("NaN")
        assert shown(engine) == (0, 2, 0)
    assert model.forwarded == [["NaN"]] * 2


@pytest.mark.anyio
async def test_it_can_be_emptied_while_the_engine_runs() -> None:
    gate = Gate()
    model = LetterModel(on_forward=gate)
    async with busy_engine(model, gate, result_cache_mb=1) as (engine, callers):
        engine.clear_result_cache()
        gate.open()
        await engine.embed("busy")
        await until(lambda: "first" in callers.outcomes)
        assert callers.result("first").embeddings.tolist() == [expected("busy").tolist()]
        engine.clear_result_cache()
        assert shown(engine)[2] == 0
        await engine.embed("busy")
    assert model.forwarded == [["busy"], ["busy"]]


@pytest.mark.anyio
async def test_rows_are_kept_for_later_requests_after_the_caller_has_left() -> None:
    gate = Gate()
    model = LetterModel(on_forward=gate)
    async with busy_engine(model, gate, result_cache_mb=1) as (engine, callers):
        callers.scopes["first"].cancel()
        callers.ask("next", "busy")
        await callers.waiting(1)
        gate.open()
        assert_array_equal((await engine.embed("busy")).embeddings, [expected("busy")])
    assert model.forwarded == [["busy"]]


@pytest.mark.anyio
async def test_a_kept_row_waits_for_no_forward() -> None:
    gate = Gate()
    model = LetterModel()
    async with engine_on(model, result_cache_mb=1, coalesce=False) as engine, anyio.create_task_group() as tasks:
        await engine.embed("known")
        model.on_forward = gate
        tasks.start_soon(engine.embed, "unknown")
        await gate.arrived()
        assert_array_equal((await engine.embed("known")).embeddings, [expected("known")])
        gate.open()


@pytest.mark.anyio
async def test_without_memory_for_it_there_is_none() -> None:
    model = LetterModel()
    async with engine_on(model) as engine:
        await engine.embed("same")
        await engine.embed("same")
        assert engine.statistics().result_cache is None
        engine.clear_result_cache()
    assert model.forwarded == [["same"], ["same"]]


@pytest.mark.parametrize("value", [-1, 1.5, True])
def test_an_impossible_size_of_memory_is_rejected(value: int) -> None:
    with pytest.raises(ConfigError, match="result_cache_mb"):
        EngineConfig(result_cache_mb=value)
