"""Lines with a store: large arrays of items go through it, and nothing stays there."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.engine.front_desk import FrontDesk
from staged_pool.runtime.remote.port import IN_FRAME_BYTES
from staged_pool.runtime.requests import Image
from staged_pool.stages.errors import EngineStopped
from tests.runtime.remote.test_fronts import at_rest, outcome
from tests.servers.fronts import fronts_on
from tests.support.cards import BOTH_LANES
from tests.support.gates import Gate
from tests.support.model import LetterModel
from tests.support.stores import LocalStore, Pause, two_ends
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

LARGE = IN_FRAME_BYTES + 1


def image(letter: str, size: int = LARGE) -> Image:
    return Image((letter * size).encode())


async def test_large_images_go_through_the_store_and_small_ones_and_texts_do_not() -> None:
    read: list[str] = []
    front, engine = two_ends()
    model = LetterModel(card=BOTH_LANES, on_forward=read.extend)
    async with fronts_on(model, ring_bytes=0, stores=lambda: (front, engine)) as ((asked,), device, _, (joined,)):
        images = [image(letter) for letter in "abcdef"]
        await asked.embed(images)
        assert set(read) == {letter * LARGE for letter in "abcdef"}
        assert front.put_blocks == len(images)
        await asked.embed([image("s", 100)])
        await asked.embed(["a text"] * 50)
        assert front.put_blocks == len(images)
        await until(lambda: not front.blocks and at_rest(joined, asked, device))
    assert front.is_closed
    assert engine.is_closed


async def test_images_go_through_the_stream_while_the_store_has_no_room() -> None:
    read: list[str] = []
    front, engine = two_ends()
    front.has_room = False
    model = LetterModel(card=BOTH_LANES, on_forward=read.extend)
    async with fronts_on(model, ring_bytes=0, stores=lambda: (front, engine)) as ((asked,), device, _, (joined,)):
        await asked.embed([image("a"), image("b")])
        assert set(read) == {"a" * LARGE, "b" * LARGE}
        await until(lambda: at_rest(joined, asked, device))


async def test_later_messages_pass_arrays_that_are_slow_to_come() -> None:
    slow, outcomes = Pause(), list[Any]()
    front, engine = two_ends(engine=LocalStore(on_get=slow.wait))
    model = LetterModel(card=BOTH_LANES)
    async with fronts_on(model, ring_bytes=0, stores=lambda: (front, engine)) as ((asked,), device, _, (joined,)):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(outcome, asked.embed([image("a")]), outcomes)
            await slow.arrived()
            assert (await asked.embed("a text")).dense is not None
            assert not outcomes
            slow.open()
        assert outcomes[0].dense is not None
        await until(lambda: not front.blocks and at_rest(joined, asked, device))


@pytest.mark.parametrize("place", ["put", "get"])
async def test_a_request_that_leaves_while_its_arrays_move_leaves_nothing(place: str) -> None:
    gate, read = Pause(), list[str]()
    front, engine = two_ends(
        LocalStore(on_put=gate.wait if place == "put" else None),
        LocalStore(on_get=gate.wait if place == "get" else None),
    )
    model = LetterModel(card=BOTH_LANES, on_forward=read.extend)
    config = EngineConfig(channel_capacity=1)
    async with fronts_on(model, config, ring_bytes=0, stores=lambda: (front, engine)) as (
        (asked,),
        device,
        _,
        (joined,),
    ):
        async with anyio.create_task_group() as leaving:
            leaving.start_soon(asked.embed, [image("a"), image("b")])
            await gate.arrived()
            leaving.cancel_scope.cancel()
        gate.open()
        await until(lambda: not front.blocks and at_rest(joined, asked, device))
        assert not read
        await asked.embed([image("c")])
        assert read == ["c" * LARGE]


async def test_lost_arrays_fail_their_request_alone() -> None:
    front, engine = two_ends()
    config = EngineConfig(channel_capacity=1)
    model = LetterModel(card=BOTH_LANES)
    async with fronts_on(model, config, ring_bytes=0, stores=lambda: (front, engine)) as (
        (asked,),
        device,
        _,
        (joined,),
    ):
        engine.loses = True
        with pytest.raises(EngineStopped, match="were lost: no block 1"):
            await asked.embed([image("a")])
        engine.loses = False
        await asked.embed([image("b")])
        await until(lambda: not front.blocks and at_rest(joined, asked, device))
        assert not joined.ends


async def test_a_block_of_another_size_ends_the_line() -> None:
    front, engine = two_ends()
    gate, outcomes = Pause(), list[Any]()
    engine._on_get = gate.wait
    model = LetterModel(card=BOTH_LANES)
    async with fronts_on(model, ring_bytes=0, stores=lambda: (front, engine)) as ((asked,), _, _, (joined,)):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(outcome, asked.embed([image("a")]), outcomes)
            await gate.arrived()
            [name] = front.blocks
            front.blocks[name] = front.blocks[name][:-8]
            gate.open()
        assert isinstance(outcomes[0], EngineStopped)
        await until(lambda: len(joined.ends) == 2)
        assert any("has stored" in reason for reason in joined.ends)
        assert front.is_closed
        assert engine.is_closed


async def test_a_desk_that_drains_takes_no_more_and_finishes_what_it_has() -> None:
    gate, outcomes = Gate(), list[Any]()
    model = LetterModel(on_forward=gate)
    async with fronts_on(model) as ((asked,), device, desk, (joined,)), anyio.create_task_group() as tasks:
        tasks.start_soon(outcome, asked.embed("first"), outcomes)
        await gate.arrived()
        tasks.start_soon(desk.drain, 60.0)
        await until(lambda: joined.line.is_leaving)
        with pytest.raises(EngineStopped, match="draining"):
            await asked.embed("second")
        assert not outcomes
        gate.open()
        await until(lambda: bool(outcomes))
        assert outcomes[0].dense is not None
        assert isinstance(desk, FrontDesk)
        await until(lambda: not device.requests.open)
