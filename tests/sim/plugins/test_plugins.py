"""Many random schedules of a plugin with bad hooks."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import anyio
import pytest

from staged_pool.runtime.plugins import model
from staged_pool.runtime.plugins.call import PluginCall
from staged_pool.runtime.plugins.host import PluginHost, PluginSession
from staged_pool.stages.user_code import UserCode
from tests.sim.clock import BACKENDS, Backend
from tests.sim.plugins.plan import draw, from_json
from tests.sim.plugins.running import run_plugins
from tests.sim.running import collect_garbage, prepared
from tests.sim.world import to_json

BLOCK = 100
BLOCKS = [(BACKENDS[first // BLOCK % 2], first) for first in range(0, 400, BLOCK)]


@pytest.fixture(autouse=True)
def nothing_blocks_the_event_loop() -> None:
    """Do not watch for blocking calls: the simulator has no sockets, threads or real time."""


@pytest.mark.parametrize(("backend", "first"), BLOCKS)
def test_a_bad_hook_fails_its_request_and_each_is_released_once(backend: Backend, first: int) -> None:
    failed, outcomes = {}, list[str]()
    with prepared():
        for seed in range(first, first + BLOCK):
            report = run_plugins(draw(seed), backend)
            outcomes += report.outcomes.elements()
            if report.violations:
                failed[seed] = report.violations
        collect_garbage()
    assert not failed
    assert outcomes.count("answered") > len(outcomes) / 4, "these worlds are too hostile to prove anything"


async def _lets_everything_pass(self: UserCode, *_: Any) -> None: ...


def _awaits_of_user_code_have_no_boundary() -> Any:
    return mock.patch.object(UserCode, "__aexit__", _lets_everything_pass)


def _calls_of_user_code_have_no_boundary() -> Any:
    return mock.patch.object(UserCode, "__exit__", return_value=None)


def _every_cancellation_is_an_error() -> Any:
    return mock.patch("staged_pool.stages.user_code.was_asked_for", return_value=False)


def _an_ended_request_does_not_wait_for_its_hook() -> Any:
    original = PluginHost.end

    def end(self: PluginHost, call: PluginCall, *, left: bool) -> None:
        call.runs = False
        original(self, call, left=left)

    return mock.patch.object(PluginHost, "end", end)


def _ended_requests_are_forgotten_while_a_hook_runs() -> Any:
    return mock.patch.object(PluginHost, "release_ended")


def _a_request_that_is_left_stays_open() -> Any:
    return mock.patch.object(PluginSession, "__exit__", return_value=None)


def _generators_are_taken_beyond_the_limit() -> Any:
    return mock.patch.object(model, "islice", lambda values, most: itertools.islice(values, 2 * most))


@contextlib.contextmanager
def _the_state_of_a_request_is_kept() -> Iterator[None]:
    async def tell_left(self: PluginHost, context: Any) -> None:
        await anyio.lowlevel.checkpoint()

    with mock.patch.object(PluginHost, "_tell_left", tell_left):
        yield


@pytest.mark.parametrize(
    "bug",
    [
        _awaits_of_user_code_have_no_boundary,
        _calls_of_user_code_have_no_boundary,
        _every_cancellation_is_an_error,
        _an_ended_request_does_not_wait_for_its_hook,
        _ended_requests_are_forgotten_while_a_hook_runs,
        _a_request_that_is_left_stays_open,
        _generators_are_taken_beyond_the_limit,
        _the_state_of_a_request_is_kept,
    ],
)
def test_a_planted_bug_is_noticed(bug: Callable[[], Any]) -> None:
    with prepared(), bug():
        assert any(run_plugins(draw(seed), BACKENDS[seed % 2]).violations for seed in range(200))
        collect_garbage()


def test_a_world_reads_back_from_its_json() -> None:
    for seed in range(50):
        assert from_json(json.loads(json.dumps(to_json(draw(seed))))) == draw(seed)
