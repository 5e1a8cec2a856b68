"""Frames of HTTP/2 as they are cut, priced and cut down, before h2 sees them."""

from __future__ import annotations

import h2.exceptions
import pytest
from h2.errors import ErrorCodes

from staged_pool.api.http.http2.frames import (
    FRAME_BYTES,
    HEADER_BLOCK_BYTES,
    HEADERS_PRICE,
    PRICED_BYTES,
    SETTINGS_PRICE,
    EnhanceYourCalm,
    FrameCutter,
)
from tests.servers.http2_client import ACK, CONTINUATION, DATA, HEADERS, PING, PREFACE, SETTINGS, frame, setting


def cut(*pieces: bytes) -> list[bytes]:
    cutter = FrameCutter()
    frames: list[bytes] = []
    for piece in pieces:
        cutter.add(piece)
        while (whole := cutter.next()) is not None:
            frames.append(whole)
    return frames


@pytest.mark.parametrize("size", [1, 2, 8, 9, 10, 24, 1000])
def test_frames_come_out_whole_however_they_arrive(size: int) -> None:
    sent = [PREFACE, frame(PING, b"12345678"), frame(DATA, b"x" * 300, 0, 1), frame(DATA, b"", 1, 1)]
    wire = b"".join(sent)
    assert cut(*(wire[at : at + size] for at in range(0, len(wire), size))) == sent


def test_a_wrong_preface_is_known_by_its_first_byte() -> None:
    with pytest.raises(h2.exceptions.ProtocolError):
        cut(b"G")


def test_a_frame_that_is_too_long_is_known_by_its_head() -> None:
    with pytest.raises(h2.exceptions.FrameTooLargeError):
        cut(PREFACE, (FRAME_BYTES + 1).to_bytes(3, "big") + bytes(6))


def test_a_block_of_headers_is_bounded_over_all_its_frames() -> None:
    part = frame(CONTINUATION, bytes(FRAME_BYTES), 0, 1)
    count = HEADER_BLOCK_BYTES // FRAME_BYTES
    assert len(cut(PREFACE, frame(HEADERS, b"", 0, 1) + part * count)) == count + 2
    with pytest.raises(EnhanceYourCalm) as error:
        cut(PREFACE, frame(HEADERS, b"x", 0, 1) + part * count)
    assert error.value.error_code == ErrorCodes.ENHANCE_YOUR_CALM


def test_the_price_of_a_head_is_that_of_all_its_frames() -> None:
    cutter = FrameCutter()
    cutter.add(
        PREFACE + frame(HEADERS, bytes(512), 0, 1) + frame(CONTINUATION, bytes(256), 4, 1) + frame(PING, bytes(8))
    )
    prices = []
    while cutter.next() is not None:
        prices.append(cutter.price)
    assert prices == [0, HEADERS_PRICE + 2, 2, 1]
    assert cutter.block_price == HEADERS_PRICE + 4


@pytest.mark.parametrize(
    ("sent", "passed_on"),
    [
        (setting(1, 2**30), setting(1, 4096)),
        (setting(1, 4096), setting(1, 4096)),
        (setting(1, 0), setting(1, 0)),
        (setting(4, 2**31), setting(4, 2**31)),  # an error, which h2 finds
        (setting(0, 1), frame(SETTINGS)),
        (setting(7, 1), frame(SETTINGS)),
        (setting(2**16 - 1, 1), frame(SETTINGS)),
        (frame(SETTINGS, setting(9, 1)[9:] + setting(3, 7)[9:] + setting(1, 5000)[9:]),) * 1
        + (frame(SETTINGS, setting(3, 7)[9:] + setting(1, 4096)[9:]),),
        (frame(SETTINGS, b"", ACK), frame(SETTINGS, b"", ACK)),
        (frame(SETTINGS, bytes(5)), frame(SETTINGS, bytes(5))),  # an error, which h2 finds
    ],
)
def test_settings_cost_no_more_than_is_known_and_used(sent: bytes, passed_on: bytes) -> None:
    assert cut(PREFACE, sent) == [PREFACE, passed_on]


def test_a_frame_of_many_settings_costs_by_its_size_and_those_that_nobody_knows_are_dropped() -> None:
    cutter = FrameCutter()
    unknown = b"".join(setting(name, 7)[9:] for name in range(16, 2700))
    cutter.add(PREFACE + frame(SETTINGS, unknown + setting(3, 7)[9:]))
    cutter.next()
    assert cutter.next() == setting(3, 7)
    assert cutter.price == SETTINGS_PRICE + (len(unknown) + 6) // PRICED_BYTES
