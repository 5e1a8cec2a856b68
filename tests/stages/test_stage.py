"""The base of the stages: supervised workers, and ends that close."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest

from staged_pool.stages.channel import Channel
from staged_pool.stages.exception_groups import only_error
from staged_pool.stages.stage import Stage, StageOptions
from staged_pool.stages.supervise import RestartPolicy, StageBroken

pytestmark = pytest.mark.anyio

OPTIONS = StageOptions(restarts=RestartPolicy(max_crashes=2, window_s=100.0, first_delay_s=0.0, max_delay_s=0.0))


class Doubling(Stage):
    """Sends twice the number that it gets."""

    def __init__(self, workers: int = 1, crash: Callable[[int], object] = lambda _: None) -> None:
        super().__init__("doubling", workers=workers, options=OPTIONS)
        self.numbers, self.doubled = Channel[int]("doubling", 100), Channel[int]("behind", 100)
        self._crash = crash

    async def _work(self) -> None:
        async for number in self.numbers.receiver:
            self._crash(number)
            await self.doubled.sender.send(2 * number)

    def close(self) -> None:
        self.numbers.receiver.close()
        self.doubled.sender.close()

    async def results(self) -> list[int]:
        """Return all results, and close the ends that are the test's own."""
        self.numbers.sender.close()
        found = [number async for number in self.doubled.receiver]
        self.doubled.receiver.close()
        return found


async def test_a_stage_ends_with_its_receiver_and_closes_its_outlet() -> None:
    stage = Doubling(workers=3)
    for number in range(20):
        assert stage.numbers.sender.send_nowait(number)
    stage.numbers.sender.close()
    await stage.run()
    assert sorted(await stage.results()) == [2 * number for number in range(20)]


async def test_a_crashed_worker_is_restarted_and_loses_its_own_message_alone() -> None:
    def crash(number: int) -> None:
        if number == 1:
            raise ValueError("one")

    stage = Doubling(crash=crash)
    for number in range(3):
        stage.numbers.sender.send_nowait(number)
    stage.numbers.sender.close()
    await stage.run()
    assert await stage.results() == [0, 4]
    assert stage.meter.crashes == 1


async def test_a_stage_that_crashes_too_often_gives_up_at_once_and_closes_its_ends() -> None:
    def crash(number: int) -> None:
        raise ValueError("each")

    stage = Doubling(crash=crash)
    said: list[Exception] = []
    stage.gave_up = said.append
    for number in range(10):
        stage.numbers.sender.send_nowait(number)
    with pytest.raises((StageBroken, ExceptionGroup)) as caught:
        await stage.run()
    assert isinstance(only_error(caught.value), StageBroken)
    assert [type(error) for error in said] == [StageBroken]
    with pytest.raises(anyio.BrokenResourceError):
        await stage.numbers.sender.send(1)
    assert await stage.results() == []


async def test_the_end_of_the_next_stage_ends_this_one_without_a_restart() -> None:
    stage = Doubling()
    stage.doubled.receiver.close()
    stage.numbers.sender.send_nowait(1)
    said: list[Exception] = []
    stage.gave_up = said.append
    with pytest.raises((anyio.BrokenResourceError, ExceptionGroup)) as caught:
        await stage.run()
    assert isinstance(only_error(caught.value), anyio.BrokenResourceError)
    stage.numbers.sender.close()
    assert (stage.meter.crashes, said) == (0, [])
