"""Many random schedules of batches and other callers, whose answers have little memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

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
