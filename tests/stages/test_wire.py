"""Frames: what one end writes the other reads, however the bytes are split; anything else ends the link."""

from __future__ import annotations

import struct
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staged_pool.stages.wire import MOST_BYTES, VERSION, Frame, FrameLimits, FrameReader, WireError, frame

KINDS = {1: FrameLimits(head=100, raw=0), 2: FrameLimits(head=MOST_BYTES, raw=1000)}


def any_size(_: int) -> FrameLimits:
    return FrameLimits(MOST_BYTES, MOST_BYTES)


FRAMES = st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=40), st.lists(st.binary(max_size=40), max_size=3)))


@given(sent=FRAMES, cuts=st.lists(st.integers(0, 400)))
def test_frames_are_read_as_they_were_written_however_they_are_split(
    sent: list[tuple[int, bytes, list[bytes]]], cuts: list[int]
) -> None:
    stream = b"".join(bytes(part) for kind, head, raw in sent for part in frame(kind, head, *raw))
    places = sorted({0, len(stream), *(min(cut, len(stream)) for cut in cuts)})
    reader = FrameReader(any_size)
    got = [one for start, end in pairwise(places) for one in reader.feed(stream[start:end])]
    assert got == [Frame(kind, head, b"".join(raw)) for kind, head, raw in sent]
    assert reader.held_bytes == 0


def test_a_cut_frame_is_held() -> None:
    reader = FrameReader(any_size)
    whole = b"".join(bytes(part) for part in frame(1, b"head", b"raw"))
    assert list(reader.feed(whole[:-1])) == []
    assert reader.held_bytes == len(whole) - 1


def test_a_peer_of_another_version_is_told_apart_by_its_first_byte() -> None:
    with pytest.raises(WireError, match=f"version {VERSION + 1}; this process reads version {VERSION}"):
        list(FrameReader(any_size).feed(bytes([VERSION + 1])))


def test_a_frame_that_announces_too_much_is_not_waited_for() -> None:
    announced = struct.pack("!BBIQ", VERSION, 1, 4, MOST_BYTES)
    with pytest.raises(WireError, match="at most"):
        list(FrameReader(any_size).feed(announced))


@pytest.mark.parametrize(
    ("kind", "head", "raw", "says"),
    [
        (1, 101, 0, "a head of 101 bytes in a frame of kind 1; at most 100 are read"),
        (1, 1, 1, "a block of arrays of 1 bytes in a frame of kind 1; at most 0 are read"),
        (2, 1 << 20, 1001, "a block of arrays of 1001 bytes in a frame of kind 2; at most 1000 are read"),
        (3, 0, 0, "kind 3 is unknown"),
    ],
)
def test_a_frame_beyond_the_limits_of_its_kind_is_not_held(kind: int, head: int, raw: int, says: str) -> None:
    def limits_of(asked: int) -> FrameLimits:
        if asked not in KINDS:
            raise WireError(f"kind {asked} is unknown")
        return KINDS[asked]

    reader = FrameReader(limits_of)
    assert len(list(reader.feed(b"".join(frame(1, bytes(100)) + frame(2, bytes(101), bytes(1000)))))) == 2
    header = struct.pack("!BBIQ", VERSION, kind, head, raw)
    assert list(reader.feed(header[:-1])) == []
    with pytest.raises(WireError, match=says):
        list(reader.feed(header[-1:]))
    assert reader.held_bytes == len(header)
