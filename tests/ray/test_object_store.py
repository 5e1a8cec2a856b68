"""Blocks of arrays in Ray's object store: read without a copy, and freed by the end that has put them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("ray", reason="needs the extra `ray`")

from perf.tools.ray_cluster import ServeCluster
from staged_pool.ray.object_store import ObjectStore, Received
from staged_pool.stages.wire import WireError

pytestmark = pytest.mark.filterwarnings("default")  # Ray's own
DATA = np.arange(1_000_000, dtype=np.uint8)


@pytest.fixture(scope="module")
def loop(cluster: ServeCluster) -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def test_a_block_is_read_in_place_and_stays_when_it_is_freed(loop: asyncio.AbstractEventLoop) -> None:
    ours, received = ObjectStore(), Received()
    theirs = ObjectStore(received)

    async def move() -> None:
        name = await ours.put([DATA.data, b"1234567"])
        assert name is not None
        first, second = await theirs.get(name), await theirs.get(name)
        assert np.array_equal(first, np.concatenate([DATA, np.frombuffer(b"1234567", np.uint8)]))
        assert not first.flags.writeable
        assert not first.flags.owndata
        assert np.shares_memory(first, second)
        assert (received.blocks, received.bytes) == (2, 2 * (len(DATA) + 7))
        ours.free(name)
        for _ in range(40):  # more than the store has room for
            other = await ours.put([DATA.data] * 5)
            assert other is not None
            ours.free(other)
        assert np.array_equal(first[: len(DATA)], DATA)
        with pytest.raises(WireError, match="does not hold"):
            ours.free(name)

    loop.run_until_complete(move())


def test_the_end_of_a_line_drops_its_blocks(loop: asyncio.AbstractEventLoop) -> None:
    store = ObjectStore()

    async def move() -> None:
        for place in range(3):
            await store.put([DATA.data])
            assert store.held_blocks == place + 1
        store.close()
        assert store.held_blocks == 0
        await store.put([DATA.data])  # it was in its thread as the line ended
        assert store.held_blocks == 0

    loop.run_until_complete(move())


@pytest.mark.parametrize("name", [b"", b"nonsense", b"\x93\xc4\x00\xc4\x00"])
def test_a_wrong_name_ends_the_line(loop: asyncio.AbstractEventLoop, name: bytes) -> None:
    with pytest.raises(WireError, match="cannot be read"):
        loop.run_until_complete(ObjectStore().get(name))
