"""Decoding of data URLs (RFC 2397) and base64, as lenient as browsers.

The declared media type is ignored: the bytes of an image show its format.
"""

from __future__ import annotations

import binascii
import re
from typing import Final

import numpy as np
import pybase64

from staged_pool.runtime.video_frames import MAX_FRAMES

SLICE: Final = 2**18
"""Bytes that are copied in one step under the GIL: well below 1 ms."""

_HEAD_BYTES: Final = 2048
_HEAD: Final = re.compile(rb'(?:[^",]|"[^"]*")*,')
"""Everything up to the first comma outside quotation marks, as in `;name="a,b.jpg"`."""
_FRAMES: Final = b"data:video/jpeg;"
_SPACES: Final = b" \t\r\n\f\v"
_STANDARD: Final = bytes.maketrans(b"-_", b"+/")
_HEX: Final = np.full(256, 255, np.uint8)
_HEX[list(b"0123456789abcdefABCDEF")] = [*range(16), *range(10, 16)]


def decode_data_url(characters: memoryview, *, in_lines: bool) -> bytes | None:
    """Decode the content of a data URL, whatever its media type and parameters are.

    Args:
        characters: The URL, including `data:`.
        in_lines: Ignore line breaks and tabs; otherwise they are errors.

    Returns:
        The content; None if the first 2 KiB have no comma, or the content is invalid.
    """
    head = bytes(characters[:_HEAD_BYTES])
    found = _HEAD.match(head)
    end = head.find(b",") + 1 if found is None else found.end()
    if end == 0:
        return None
    marks = head[: end - 1].lower().split(b";")[1:]
    content = characters[end:]
    if b"base64" in (mark.strip() for mark in marks):
        return decode_base64(content, in_lines=in_lines, escaped=True)
    text = bytes(content).translate(None, b"\t\r\n" if in_lines else b"")
    values = np.frombuffer(text, np.uint8)
    return _unescaped(text) if ((values >= 0x20) & (values < 0x7F)).all() else None


def is_frames(characters: memoryview) -> bool:
    """Return True for a data URL of ready frames, such as `data:video/jpeg;base64,F1,F2`."""
    return bytes(characters[: len(_FRAMES)]).lower() == _FRAMES


def decode_frames(characters: memoryview, *, in_lines: bool) -> list[bytes] | None:
    """Decode ready frames, in base64 with commas between them.

    Args:
        characters: The URL, including `data:`.
        in_lines: Ignore line breaks and tabs; otherwise they are errors.

    Returns:
        The frames; None if there is none, there are more than `MAX_FRAMES`, or one is invalid.
    """
    commas = np.flatnonzero(np.frombuffer(characters, np.uint8) == ord(","))
    if not 1 <= len(commas) <= MAX_FRAMES:
        return None
    ends = [*commas[1:].tolist(), len(characters)]
    found = [
        decode_base64(characters[start + 1 : end], in_lines=in_lines, escaped=True)
        for start, end in zip(commas.tolist(), ends, strict=True)
    ]
    frames = [frame for frame in found if frame]
    return frames if len(frames) == len(found) else None


def decode_base64(characters: memoryview, *, in_lines: bool, escaped: bool = False) -> bytes | None:
    """Decode base64 (RFC 4648) in either alphabet, with or without padding.

    Spaces are ignored. The standard form is decoded without the GIL.

    Args:
        characters: The text.
        in_lines: Ignore line breaks and tabs; otherwise they are errors.
        escaped: Characters may be percent-encoded, as in a URL.

    Returns:
        The bytes; None if the text is not base64.
    """
    decoded = _decoded(characters)
    if decoded is not None:
        return decoded
    slices = (bytes(characters[first : first + SLICE]) for first in range(0, len(characters), SLICE))
    spaces = _SPACES if in_lines else b" "
    plain = b"".join(piece.translate(_STANDARD, spaces) for piece in slices)
    if escaped and b"%" in plain:
        plain = _unescaped(plain).translate(_STANDARD, _SPACES)
    bare = plain.rstrip(b"=")
    if len(plain) - len(bare) > 2:
        return None
    return _decoded(bare + b"=" * (-len(bare) % 4))


def _decoded(characters: memoryview | bytes) -> bytes | None:
    try:
        return pybase64.b64decode(characters, validate=True)
    except binascii.Error:
        return None


def _unescaped(text: bytes) -> bytes:
    """Decode percent-encoding (RFC 3986, section 2.1); a `%` without two hex digits is kept.

    numpy releases the GIL, and takes the same time for many signs as for none.
    """
    values = np.frombuffer(text, np.uint8)
    signs = np.flatnonzero(values[:-2] == ord("%"))
    upper, lower = _HEX[values[signs + 1]], _HEX[values[signs + 2]]
    whole = (upper < 16) & (lower < 16)
    signs = signs[whole]
    found = values.copy()
    found[signs] = upper[whole] * np.uint8(16) + lower[whole]
    kept = np.ones(len(values), dtype=bool)
    kept[signs + 1] = kept[signs + 2] = False
    return found[kept].tobytes()
