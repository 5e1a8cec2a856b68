"""Structure of a JPEG: its segments up to the end of the first image (ITU-T T.81, annex B)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

MAX_SEGMENTS: Final = 10_000
"""Limit of segments of one JPEG, about 1 us each. A segment has up to 64 KB, so real files have at most hundreds."""

_START_OF_IMAGE: Final = 0xD8
_END_OF_IMAGE: Final = 0xD9
_START_OF_SCAN: Final = 0xDA
_FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""Markers that begin a frame. The other three are Huffman tables, an extension, and arithmetic conditioning."""
_PROGRESSIVE: Final = frozenset({0xC2, 0xC6, 0xCA, 0xCE})

_QUANTIZATION: Final = 0xDB
_EXIF: Final = 0xE1
_COMMENT: Final = 0xFE
_UNREAD: Final = (frozenset(range(0xE0, 0xF0)) | {_COMMENT}) - {0xE0, 0xEE}
"""Comments and segments of applications, except JFIF and Adobe, which define the channels."""

_BLOCKS: Final = (2**8, 2**12, 2**16, 2**20)
"""Bytes searched at a time: few first, since most markers are near, then more for long entropy-coded data."""

_NO_MARKER: Final = np.zeros(256, dtype=bool)
_NO_MARKER[[0x00, 0x01, *range(0xD0, 0xD8), 0xFF]] = True
"""Bytes after 0xFF that begin no segment: stuffed zeros, TEM, restarts inside a scan, and fill bytes."""


@dataclass(slots=True)
class JpegStructure:
    """Segments of one JPEG, counted up to the end of its first image."""

    segments: int = 0
    scans: int = 0
    bits: int | None = None
    """Bits of a sample. None: there is no frame."""
    samples: int = 0
    """Samples of all channels, in whole blocks of 8 x 8. Channels at half the size have fewer than pixels."""
    scanned: int = 0
    """Samples that all scans decode together."""
    buffered: bool = False
    """Several scans make up the image: the decoder holds two bytes for each sample until the last."""
    table_bytes: int = 0
    """Bytes of quantization tables."""
    exif: bytes | None = None
    """EXIF data as in `PIL.Image.Image.info`."""
    xmp: bytes | None = None
    """XMP data as in `PIL.Image.Image.info`."""
    read: list[tuple[int, int]] = field(default_factory=list)
    """Start and end of each part that a decoder needs, in bytes of the file."""


def read_structure(data: bytes) -> JpegStructure:
    """Read the segments of a JPEG up to the end of its first image.

    libjpeg stops there, too. Data after that is ignored: a phone's video, further images of a multi-image file, gain
    maps, padding. Thumbnails are inside segments, and skipped with them. A damaged or incomplete file is read as far as
    possible.

    Args:
        data: The content of the file. At most `MAX_SEGMENTS` segments, and one more, are read.
    """
    found = JpegStructure(read=[(0, min(2, len(data)))])
    channels: dict[int, int] = {}
    exif: list[bytes] = []
    scanning = False
    for marker, place, end in _segments(data):
        if scanning:  # the entropy-coded data of the scan ends here
            found.read[-1] = (found.read[-1][0], place)
        if marker in _UNREAD:
            content = data[place + 4 : end] if marker == _EXIF else b""
            if content.startswith(b"Exif\0\0"):
                exif.append(content[6:])
            elif content.startswith(b"http://ns.adobe.com/xap/1.0/\0"):
                found.xmp = content.split(b"\0", 1)[1]
        elif found.read[-1][1] == place:
            found.read[-1] = (found.read[-1][0], end)
        else:
            found.read.append((place, end))
        if marker is None:
            break
        found.segments += 1
        scanning = marker == _START_OF_SCAN
        if marker == _QUANTIZATION:
            found.table_bytes += end - place
        elif marker in _FRAMES and end > place + 4:
            found.bits = data[place + 4]
            channels = channels or _read_frame(data[place + 4 : end])
            found.samples = sum(channels.values())
            found.buffered |= marker in _PROGRESSIVE
        elif scanning:
            found.scans += 1
            scanned = data[place + 5 : end : 2][: data[place + 4] if end > place + 4 else 0]
            found.scanned += sum(channels.get(channel, 0) for channel in scanned)
            found.buffered |= len(scanned) < len(channels)
        if found.segments > MAX_SEGMENTS:
            break
    found.exif = b"Exif\0\0" + b"".join(exif) if exif else None
    return found


def decodable(data: bytes, structure: JpegStructure) -> bytes:
    """Remove the parts that no decoder needs: comments, profiles, fill bytes, and data after the end.

    Pillow would read each of these in Python before it decodes.
    """
    if structure.read == [(0, len(data))]:
        return data
    whole = memoryview(data)
    return b"".join(whole[start:end] for start, end in structure.read)


def _segments(data: bytes) -> Iterator[tuple[int | None, int, int]]:
    """Yield the marker, start and end of each segment. The last one has the marker None."""
    values = np.frombuffer(data, np.uint8)
    place = 2
    while (found := _next_marker(values, place)) is not None:
        marker, length = data[found + 1], int.from_bytes(data[found + 2 : found + 4], "big")
        if marker in (_START_OF_IMAGE, _END_OF_IMAGE) or length < 2:  # libjpeg also stops at a second start
            yield None, found, min(found + 4, len(data))
            return
        place = found + 2 + length
        yield marker, found, min(place, len(data))
    yield None, len(data), len(data)


def _read_frame(frame: bytes) -> dict[int, int]:
    """Read the number of samples of each channel from a frame's segment (section B.2.2)."""
    height, width = int.from_bytes(frame[1:3], "big"), int.from_bytes(frame[3:5], "big")
    parts = [frame[start : start + 3] for start in range(6, len(frame) - 2, 3)][: frame[5] if len(frame) > 5 else 0]
    across, down = (max((each for each in edge if each), default=1) for edge in _factors(parts))
    samples: dict[int, int] = {}
    for part, wide, high in zip(parts, *_factors(parts), strict=True):
        blocks_across, blocks_down = -(-width * wide // (8 * across)), -(-height * high // (8 * down))
        samples[part[0]] = 64 * blocks_across * blocks_down
    return samples


def _factors(parts: list[bytes]) -> tuple[list[int], list[int]]:
    return [part[1] >> 4 for part in parts], [part[1] & 15 for part in parts]


def _next_marker(values: np.ndarray[tuple[int], np.dtype[np.uint8]], place: int) -> int | None:
    """Find the next 0xFF that begins a segment. None: there is none.

    numpy releases the interpreter's lock meanwhile, and `bytes.find` does not.
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
