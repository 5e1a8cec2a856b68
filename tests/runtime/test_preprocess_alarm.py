"""The alarm about preprocess calls that do not end, in virtual time."""

from __future__ import annotations

from typing import Any

import anyio
import trio
import trio.testing

from staged_pool.stages.stage import StageOptions
from tests.runtime.images import ask, engine_on, image
from tests.support.cards import BOTH_LANES
from tests.support.gates import Gate
from tests.support.model import LetterModel

ALARM_S = 30.0


def test_a_call_that_begins_between_two_looks_is_told_of_when_it_is_overdue(logged: list[Any]) -> None:
    clock = trio.testing.MockClock()

    def alarms() -> list[int]:
        return [event["calls"] for event in logged if event["event"] == "preprocess_images.overdue"]

    async def pass_time(seconds: float) -> None:
        clock.jump(seconds)
        await trio.testing.wait_all_tasks_blocked()

    async def main() -> None:
        gates = {"A": Gate(), "B": Gate()}
        model = LetterModel(BOTH_LANES, on_preprocess=lambda letters: gates[letters[0]]())
        options = StageOptions(clock=clock.current_time)
        async with (
            engine_on(model, options=options, preprocess_alarm_s=ALARM_S, image_preprocess_limit=2) as engine,
            anyio.create_task_group() as tasks,
        ):
            await pass_time(ALARM_S + 1)
            for letter, gate in gates.items():  # the second begins while the first runs
                tasks.start_soon(ask, engine, image(letter))
                await gate.arrived()
                await pass_time(ALARM_S / 3)
            assert alarms() == []
            assert engine.statistics().overdue_preprocess_calls == 0
            await pass_time(ALARM_S / 3 + 1)
            assert alarms() == [1]
            await pass_time(ALARM_S / 3)
            assert alarms() == [1, 2]
            for gate in gates.values():
                gate.open()

    trio.run(main, clock=clock)
