"""Encoding formats that the body of a traced request asks for."""

from __future__ import annotations

import re
from typing import Final

MAX_BYTES: Final = 2**20
"""Longest body that is searched: a search of it takes less than a millisecond of the event loop."""

_FIELD: Final = re.compile(rb'"encoding_format"\s*:\s*("[a-z0-9_]{1,20}"|\[[^\]]{0,200}\])')
_VALUE: Final = re.compile(rb'"([a-z0-9_]{1,20})"')
_KNOWN: Final = frozenset({
    "float", "base64", "bytes", "bytes_only", "float16", "int8", "uint8", "binary", "ubinary", "ubase64",
})  # fmt: skip
"""No other value becomes an attribute: a client may send any text."""


def encoding_formats(body: bytes | bytearray) -> list[str]:
    """Return the known values of `encoding_format` in a JSON body; empty if it has none, or is long.

    No text can look like the field: JSON writes a quote inside a text with a backslash before it.
    """
    if len(body) > MAX_BYTES or (field := _FIELD.search(body)) is None:
        return []
    found = (value.decode() for value in _VALUE.findall(field[1]))
    return [value for value in found if value in _KNOWN]
