"""Isolation of the item that fails a batch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from staged_pool.stages.errors import Abandoned, ModelFailed, StagedPoolError
from staged_pool.stages.isolate import run_isolated

pytestmark = pytest.mark.anyio


pytestmark = pytest.mark.anyio


async def test_a_poisoned_payload_fails_alone_in_few_runs() -> None:
    runs: list[Sequence[int]] = []

    async def run(payloads: Sequence[int]) -> Sequence[int | StagedPoolError]:
        runs.append(payloads)
        if 13 in payloads:
            raise ValueError("unlucky")
        return [p * 2 for p in payloads]

    results = await run_isolated(run, range(32), stage="here")
    assert [r for r in results if not isinstance(r, ModelFailed)] == [p * 2 for p in range(32) if p != 13]
    assert isinstance(results[13], ModelFailed)
    assert len(runs) == 1 + 2 * 5


async def test_too_few_results_are_a_failure_not_a_mix_up() -> None:
    async def run(payloads: Sequence[int]) -> Sequence[int | StagedPoolError]:
        return list(payloads)[: len(payloads) - 1]

    results = await run_isolated(run, [1, 2], stage="here")
    assert all(isinstance(result, ModelFailed) for result in results)


async def test_a_call_that_was_abandoned_is_not_repeated_in_halves() -> None:
    calls = 0

    async def run(payloads: Sequence[int]) -> Sequence[int | StagedPoolError]:
        nonlocal calls
        calls += 1
        raise Abandoned("a call that does not end")

    results = await run_isolated(run, range(4), stage="here")
    assert calls == 1
    assert [type(result) for result in results] == [Abandoned] * 4


async def test_after_a_half_that_was_abandoned_the_other_one_is_not_run() -> None:
    runs: list[Sequence[int]] = []

    async def run(payloads: Sequence[int]) -> Sequence[int | StagedPoolError]:
        runs.append(payloads)
        if len(payloads) == 4:
            raise ValueError("one of them is bad")
        raise Abandoned("a call that does not end")

    results = await run_isolated(run, range(4), stage="here")
    assert runs == [range(4), range(2)]
    assert [type(result) for result in results] == [Abandoned] * 4
