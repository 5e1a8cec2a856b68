"""An engine under memory pressure, told by its governor."""

from __future__ import annotations

import pytest

from staged_pool.runtime.memory.governor import Pressure
from staged_pool.stages.errors import Overloaded
from tests.runtime.images import ask, engine_on
from tests.support.cards import BOTH_LANES
from tests.support.model import LetterModel
from tests.support.stages import batch_stages

pytestmark = pytest.mark.anyio


async def test_both_lanes_keep_batches_small_while_memory_is_short() -> None:
    async with engine_on(LetterModel(BOTH_LANES)) as engine:
        for fullness, saves in ((0.86, True), (0.5, False)):
            engine.memory.update(fullness)
            assert [stage._former.saves_memory for stage in batch_stages(engine).values()] == [saves, saves]
            await ask(engine, "text")


async def test_requests_are_rejected_where_hardly_any_memory_is_left() -> None:
    async with engine_on(LetterModel(BOTH_LANES)) as engine:
        engine.memory.update(Pressure.REJECT / 100)
        with pytest.raises(Overloaded, match="short of memory"):
            await ask(engine, "text")
        engine.memory.update(0.0)
        await ask(engine, "text")
