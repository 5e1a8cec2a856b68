"""Rings: blocks are read as they were written, never overlap, and their room is used again."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staged_pool.stages.ring import RingError, RingReader, RingWriter, open_memory

SIZE = 4096


@pytest.fixture
def ring() -> Iterator[tuple[RingWriter, RingReader]]:
    descriptor = open_memory(SIZE)
    yield RingWriter(descriptor), RingReader(descriptor)
    os.close(descriptor)


@given(steps=st.lists(st.tuples(st.integers(1, 1500), st.integers(0, 5)), max_size=60))
def test_blocks_keep_their_bytes_until_they_are_given_back_in_any_order(steps: list[tuple[int, int]]) -> None:
    descriptor = open_memory(SIZE)
    writer, reader = RingWriter(descriptor), RingReader(descriptor)
    os.close(descriptor)
    held: dict[int, bytes] = {}
    for number, (size, given_back) in enumerate(steps):
        data = bytes([number % 251]) * size
        start = writer.write([data[: size // 2], data[size // 2 :]])
        if start is None:
            assert held  # an empty ring has room for all that fits into it
        else:
            held[start] = data
        for place, expected in held.items():
            assert reader.read(place, len(expected)) == expected
        for place in list(held)[: given_back - 2]:
            writer.give_back(place)
            del held[place]
    for place in held:
        writer.give_back(place)
    assert writer.used_bytes == 0
    assert writer.write([b"x" * SIZE]) == 0


def test_a_block_that_is_too_large_finds_no_room(ring: tuple[RingWriter, RingReader]) -> None:
    assert ring[0].write([b"x" * (SIZE + 1)]) is None


def test_a_block_can_be_given_back_once(ring: tuple[RingWriter, RingReader]) -> None:
    start = ring[0].write([b"x"])
    assert start == 0
    ring[0].give_back(start)
    with pytest.raises(RingError, match="where there is none"):
        ring[0].give_back(start)


@pytest.mark.parametrize(("start", "size"), [(-1, 1), (0, SIZE + 1), (SIZE, 1), (0, -1)])
def test_nothing_beyond_the_ring_is_read(ring: tuple[RingWriter, RingReader], start: int, size: int) -> None:
    with pytest.raises(RingError, match="the ring has"):
        ring[1].read(start, size)


def test_no_process_can_change_the_size_of_the_memory() -> None:
    descriptor = open_memory(SIZE)
    for size in (0, 2 * SIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    os.close(descriptor)


def test_the_reader_cannot_write(ring: tuple[RingWriter, RingReader]) -> None:
    ring[0].write([b"abc"])
    assert ring[1].read(0, 3).readonly
