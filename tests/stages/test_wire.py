"""Frames: what one end writes the other reads, however the bytes are split; anything else ends the link."""

from __future__ import annotations

import struct
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staged_pool.stages.wire import MOST_BYTES, VERSION, Frame, FrameReader, WireError, frame

FRAMES = st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=40), st.lists(st.binary(max_size=40), max_size=3)))


@given(sent=FRAMES, cuts=st.lists(st.integers(0, 400)))
def test_frames_are_read_as_they_were_written_however_they_are_split(
    sent: list[tuple[int, bytes, list[bytes]]], cuts: list[int]
) -> None:
    stream = b"".join(bytes(part) for kind, head, raw in sent for part in frame(kind, head, *raw))
    places = sorted({0, len(stream), *(min(cut, len(stream)) for cut in cuts)})
    reader = FrameReader()
    got = [one for start, end in pairwise(places) for one in reader.feed(stream[start:end])]
    assert got == [Frame(kind, head, b"".join(raw)) for kind, head, raw in sent]
    assert reader.held_bytes == 0


def test_a_cut_frame_is_held() -> None:
    reader = FrameReader()
    whole = b"".join(bytes(part) for part in frame(1, b"head", b"raw"))
    assert list(reader.feed(whole[:-1])) == []
    assert reader.held_bytes == len(whole) - 1


def test_a_peer_of_another_version_is_told_apart_by_its_first_byte() -> None:
    with pytest.raises(WireError, match=f"version {VERSION + 1}; this process reads version {VERSION}"):
        list(FrameReader().feed(bytes([VERSION + 1])))


def test_a_frame_that_announces_too_much_is_not_waited_for() -> None:
    announced = struct.pack("!BBIQ", VERSION, 1, 4, MOST_BYTES)
    with pytest.raises(WireError, match="at most"):
        list(FrameReader().feed(announced))
