"""Blocks of arrays in Ray's object store: read without a copy, and freed by the end that has put them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

pytest.importorskip("ray", reason="needs the extra `ray`")

from perf.tools.ray_cluster import ServeCluster
from staged_pool.ray import object_store
from staged_pool.ray.object_store import ObjectStore, Received
from staged_pool.runtime.remote.store import ArraysLost
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


@pytest.mark.parametrize(
    "name",
    [
        b"",
        b"nonsense",
        msgspec.msgpack.encode((b"", b"", b"")),
        msgspec.msgpack.encode((bytes(27), b"", b"")),
        msgspec.msgpack.encode((bytes(29), b"", b"")),
        msgspec.msgpack.encode((bytes(28), bytes(1025), b"")),
        msgspec.msgpack.encode((bytes(28), b"", bytes(1025))),
        msgspec.msgpack.encode((bytes(28), b"")),
        msgspec.msgpack.encode((28, b"", b"")),
    ],
)
def test_a_wrong_name_ends_the_line(loop: asyncio.AbstractEventLoop, name: bytes) -> None:
    with pytest.raises(WireError, match="cannot be read"):
        loop.run_until_complete(ObjectStore().get(name))


@pytest.mark.parametrize("place", [0, 1], ids=["reference", "owner"])
def test_a_name_of_no_object_loses_its_arrays_or_ends_the_line(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    """Ray aborts a process that asks an owner which it cannot read."""
    monkeypatch.setattr(object_store, "GET_S", 2.0)

    async def move() -> None:
        ours = ObjectStore()
        name = await ours.put([DATA.data])
        assert name is not None
        parts = list(msgspec.msgpack.decode(name))
        parts[place] = bytes(255 - byte for byte in parts[place])
        with pytest.raises((WireError, ArraysLost)):
            await ObjectStore().get(msgspec.msgpack.encode(parts))

    loop.run_until_complete(move())
