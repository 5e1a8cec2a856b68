"""Structure of a JPEG: its segments up to the end of the first image (ITU-T T.81, annex B)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

MAX_SEGMENTS: Final = 10_000
"""Segments of one JPEG that are walked over, about 1 us each. A segment holds up to 64 KB, so real files have hundreds
at most."""

_START_OF_IMAGE: Final = 0xD8
_END_OF_IMAGE: Final = 0xD9
_START_OF_SCAN: Final = 0xDA
_FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""Markers that begin a frame; the three left out are Huffman tables, an extension, and arithmetic conditioning."""

_BLOCKS: Final = (2**8, 2**12, 2**16, 2**20)
"""Bytes searched at a time, growing: a marker is mostly near, and entropy-coded data is long."""

_NO_MARKER: Final = np.zeros(256, dtype=bool)
_NO_MARKER[[0x00, 0x01, *range(0xD0, 0xD8), 0xFF]] = True
"""Bytes behind 0xFF that begin no segment: stuffed zeros, TEM, restarts inside a scan, and fill bytes."""


@dataclass(frozen=True, slots=True)
class JpegStructure:
    """Counts of one JPEG, up to the end of its first image."""

    segments: int
    scans: int
    bits: int | None
    """Bits of a sample; None where no frame was found."""


def read_structure(data: bytes) -> JpegStructure:
    """Walk over the segments of a JPEG, as libjpeg does, and stop where its first image ends.

    Whatever lies behind is not looked at: a phone's video, further images of a multi-picture file, gain maps, padding.
    Thumbnails lie inside segments, whose lengths are followed. A damaged or cut file is walked over as far as it goes.

    Args:
        data: The file. More than `MAX_SEGMENTS` are not walked over.
    """
    values = np.frombuffer(data, np.uint8)
    segments = scans = 0
    bits = None
    place = 2
    while segments <= MAX_SEGMENTS:
        found = _next_marker(values, place)
        if found is None:
            break
        marker, length = data[found + 1], int.from_bytes(data[found + 2 : found + 4], "big")
        if marker in (_START_OF_IMAGE, _END_OF_IMAGE) or length < 2:  # libjpeg gives up at a second start, too
            break
        segments += 1
        scans += marker == _START_OF_SCAN
        if marker in _FRAMES and found + 4 < len(data):
            bits = data[found + 4]
        place = found + 2 + length
    return JpegStructure(segments, scans, bits)


def _next_marker(values: np.ndarray[tuple[int], np.dtype[np.uint8]], place: int) -> int | None:
    """Find the next 0xFF that begins a segment; None where there is none.

    numpy lets other threads run meanwhile; `bytes.find` holds the interpreter's lock.
    """
    if place + 1 < len(values) and values[place] == 0xFF and not _NO_MARKER[values[place + 1]]:
        return place
    step = 0
    while place + 1 < len(values):
        block = _BLOCKS[min(step, len(_BLOCKS) - 1)]
        part = values[place : place + block + 1]
        hits = np.flatnonzero(part[:-1] == 0xFF)
        hits = hits[~_NO_MARKER[part[hits + 1]]]
        if len(hits):
            return place + int(hits[0])
        place += block
        step += 1
    return None
