"""Orientation of an image, from the undecoded EXIF or XMP data that Pillow keeps.

Pillow's own reader copies every value of an EXIF directory. In a file of a few megabytes, thousands of entries may
share one large value, which becomes gigabytes. This reader reads only the entry of the orientation.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

UPRIGHT: Final = 1
"""Orientation of an image that is stored upright. Also the default, if none can be read."""

_TAG: Final = 0x0112
_HEADER: Final = re.compile(rb"\A(?:Exif\x00\x00){0,2}(II\*\x00|II\x00\*|MM\x00\*|MM\*\x00)")
"""Beginning of EXIF: its name, then the header of a TIFF. Pillow accepts both orders of the second pair of bytes."""

_UNIT_BYTES: Final = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8}
"""Bytes of one value of an entry, by its type. Entries of other types are ignored."""
_NUMBERS: Final = {3: "H", 4: "L", 5: "LL", 6: "b", 8: "h", 9: "l", 10: "ll", 11: "f", 12: "d", 13: "L", 16: "Q"}
"""Types of entries with numbers, and their `struct` formats: a rational number is two."""

_XMP: Final = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
_XMP_TEXT: Final = re.compile(r'tiff:Orientation(?:="|>)([0-9])')


def read_orientation(info: Mapping[Any, Any]) -> int:
    """Read the orientation, 1 to 8. Other numbers in a file are returned unchanged.

    EXIF has precedence over XMP, as in `PIL.ImageOps.exif_transpose`. A damaged entry counts as none.

    Args:
        info: `PIL.Image.Image.info`: `exif` and `xmp` are bytes, and text chunks of a PNG are `str`.
    """
    exif = info.get("exif")
    if exif is None and isinstance(text := info.get("Raw profile type exif"), str):
        try:
            exif = bytes.fromhex("".join(text.split("\n")[3:]))
        except ValueError:
            return UPRIGHT
    if isinstance(exif, bytes) and (found := _in_exif(exif)) is not None:
        return found
    return _in_xmp(info)


def _in_exif(data: bytes) -> int | None:
    """Read the orientation in the first directory. None: there is none."""
    head = _HEADER.match(data)
    if head is None:
        return UPRIGHT if data.removeprefix(b"Exif\0\0") else None
    start, order = head.start(1), "<" if head[1].startswith(b"II") else ">"
    try:
        (offset,) = struct.unpack_from(f"{order}L", data, start + 4)
        (count,) = struct.unpack_from(f"{order}H", data, start + offset)
    except struct.error:
        return None
    first = start + offset + 2
    count = min(count, (len(data) - first) // 12)
    tags = np.ndarray((count,), f"{order}u2", data, first, (12,)) if count else np.zeros(0)
    for place in np.flatnonzero(tags == _TAG).tolist():
        kind, values, where = struct.unpack_from(f"{order}HLL", data, first + 12 * place + 2)
        size = _UNIT_BYTES.get(kind, 0) * values
        if size:
            return _value(data, kind, order, first + 12 * place + 8 if size <= 4 else start + where, size)
    return None


def _value(data: bytes, kind: int, order: str, where: int, size: int) -> int | None:
    """Read the first number of an entry, as Pillow does. None: the entry lies outside of the data."""
    if where + size > len(data):
        return None
    if kind not in _NUMBERS:
        return UPRIGHT
    number, *below = struct.unpack_from(f"{order}{_NUMBERS[kind]}", data, where)
    if below:
        number = number / below[0] if below[0] else math.nan
    return int(number) if math.isfinite(number) and number == int(number) else UPRIGHT


def _in_xmp(info: Mapping[Any, Any]) -> int:
    found: re.Match[str] | re.Match[bytes] | None = None
    if isinstance(text := info.get("XML:com.adobe.xmp"), str) and text:
        found = _XMP_TEXT.search(text)
    elif isinstance(packet := info.get("xmp"), bytes):
        found = _XMP.search(packet)
    return UPRIGHT if found is None else int(found[1])
