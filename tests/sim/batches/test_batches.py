"""Many random schedules of batches and other callers, whose answers have little memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from unittest import mock

import anyio.to_thread
import pytest

from staged_pool.api.bulk import job
from staged_pool.api.bulk.batch_lines import BatchAnswer
from staged_pool.runtime.memory.answers import AnswerMemory
from staged_pool.runtime.memory.budget import ByteAccount
from staged_pool.stages.errors import TooLarge
from tests.sim.batches.plan import draw, from_json
from tests.sim.batches.running import run_batches
from tests.sim.clock import BACKENDS, Backend
from tests.sim.running import collect_garbage, prepared
from tests.sim.world import to_json

BLOCK = 40
BLOCKS = [(BACKENDS[first // BLOCK % 2], first) for first in range(0, 80, BLOCK)]


@pytest.fixture(autouse=True)
def nothing_blocks_the_event_loop() -> None:
    """Do not watch for blocking calls: the simulator has no sockets, threads or real time."""


@pytest.mark.parametrize(("backend", "first"), BLOCKS)
def test_every_line_has_one_right_answer_and_no_memory_is_left(backend: Backend, first: int) -> None:
    failed, outcomes = {}, list[str]()
    with prepared():
        for seed in range(first, first + BLOCK):
            simulation = run_batches(draw(seed), backend)
            outcomes += simulation.outcomes.values()
            if simulation.violations:
                failed[seed] = simulation.violations
        collect_garbage()
    assert not failed
    assert outcomes.count("200") > len(outcomes) / 2, "these worlds are too hostile to prove anything"
    assert outcomes.count("413")


def test_a_world_reads_back_from_its_json() -> None:
    world = draw(7)
    assert from_json(json.loads(json.dumps(to_json(world)))) == world


def _answers_keep_their_memory() -> Any:
    return mock.patch.object(BatchAnswer, "give_back")


def _rejected_lines_ask_again_at_once() -> Any:
    return mock.patch.object(AnswerMemory, "lacks_room", False)


def _none_is_ever_too_large() -> Any:
    original = AnswerMemory._grow

    def grow(self: AnswerMemory, needed: int) -> Any:
        error = original(self, min(needed, self._account.limit_bytes))
        return None if isinstance(error, TooLarge) else error

    return mock.patch.object(AnswerMemory, "_grow", grow)


def _a_release_serves_nobody() -> Any:
    original = ByteAccount._serve
    return mock.patch.object(
        ByteAccount, "_serve", lambda self: original(self) if not self.held_bytes or self._gathering is None else None
    )


def _rows_of_an_earlier_try_still_count() -> Any:
    return mock.patch.object(AnswerMemory, "begin")


@pytest.mark.parametrize(
    "bug",
    [
        _answers_keep_their_memory,
        _rejected_lines_ask_again_at_once,
        _none_is_ever_too_large,
        _a_release_serves_nobody,
        _rows_of_an_earlier_try_still_count,
    ],
)
def test_a_planted_bug_is_noticed(bug: Callable[[], Any]) -> None:
    with prepared(), bug():
        assert any(run_batches(draw(seed), BACKENDS[seed % 2]).violations for seed in range(100))
        collect_garbage()


def _the_reader_fails_if_nobody_takes_its_lines() -> Any:
    async def read(self: Any, send: Any) -> None:
        async with send:
            while lines := await anyio.to_thread.run_sync(self._reader.read):
                await send.send(lines)

    return mock.patch.object(job._Run, "_read", read)


def _those_who_wait_take_the_last_eighth() -> Any:
    none = property(lambda _: 0, lambda *_: None)
    return mock.patch.object(ByteAccount, "_gathered_bytes", none, create=True)


def _world_of(number: int, *, seed: int) -> dict[str, Any]:
    """Return the world of a number, with other delays."""
    return {**to_json(draw(number)), "seed": seed}


KEPT: list[tuple[Callable[[], Any], Backend, int | dict[str, Any]]] = [
    (_the_reader_fails_if_nobody_takes_its_lines, "asyncio", {"seed": 1, "jobs": [{"cancelled_at": 0.0}]}),
    *(
        (_the_reader_fails_if_nobody_takes_its_lines, "asyncio", seed)
        for seed in (
            1000757, 1001194, 1001350, 1002165, 1003791, 1003967,
            1006555, 1006979, 1007328, 1009738, 1009796, 1009942,
        )
    ),
    (_those_who_wait_take_the_last_eighth, "asyncio", _world_of(1000114, seed=10003)),
    (_those_who_wait_take_the_last_eighth, "asyncio", _world_of(1000114, seed=10018)),
]  # fmt: skip
"""Worlds that have found a bug once, or their seeds, with what plants it again."""


@pytest.mark.parametrize(("bug", "backend", "given"), KEPT)
def test_a_world_that_has_found_a_bug_finds_it_again(
    bug: Callable[[], Any], backend: Backend, given: int | dict[str, Any]
) -> None:
    world = draw(given) if isinstance(given, int) else from_json(given)
    with prepared():
        assert not run_batches(world, backend).violations
        with bug():
            assert run_batches(world, backend).violations
        collect_garbage()
