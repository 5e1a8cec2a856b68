"""Orientation of an image, from the undecoded EXIF or XMP data that Pillow keeps.

Pillow's own reader copies every value of an EXIF directory. In a file of a few megabytes, thousands of entries may
share one large value, which becomes gigabytes. This reader reads only the entry of the orientation.
"""

from __future__ import annotations

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

_KNOWN_TYPES: Final = frozenset(range(1, 14)) | {16}
_WHOLE: Final = {3: "H", 4: "L", 6: "b", 8: "h", 9: "l", 13: "L"}
"""Types of entries with whole numbers of at most four bytes, with their `struct` formats."""

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
        kind, values = struct.unpack_from(f"{order}HL", data, first + 12 * place + 2)
        if kind in _KNOWN_TYPES and values:
            if values > 1 or kind not in _WHOLE:
                return UPRIGHT
            value: int = struct.unpack_from(f"{order}{_WHOLE[kind]}", data, first + 12 * place + 8)[0]
            return value
    return None


def _in_xmp(info: Mapping[Any, Any]) -> int:
    found: re.Match[str] | re.Match[bytes] | None = None
    if isinstance(text := info.get("XML:com.adobe.xmp"), str) and text:
        found = _XMP_TEXT.search(text)
    elif isinstance(packet := info.get("xmp"), bytes):
        found = _XMP.search(packet)
    return UPRIGHT if found is None else int(found[1])
