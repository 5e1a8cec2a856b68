"""Messages between two processes: a JSON head, followed by a body of bytes."""

from __future__ import annotations

import json
import struct
from typing import IO, Any, Final

_LENGTHS: Final = struct.Struct("<II")
"""Lengths of the head and of the body, in bytes."""


def send(to: IO[bytes], head: dict[str, Any], body: bytes | memoryview = b"") -> None:
    """Write one message.

    Raises:
        OSError: The reader is gone.
    """
    written = json.dumps(head).encode()
    to.write(_LENGTHS.pack(len(written), len(body)))
    to.write(written)
    to.write(body)
    to.flush()


def receive(source: IO[bytes]) -> tuple[dict[str, Any], bytes]:
    """Read one message.

    Raises:
        EOFError: The stream has ended.
    """
    head_bytes, body_bytes = _LENGTHS.unpack(_exactly(source, _LENGTHS.size))
    head = json.loads(_exactly(source, head_bytes))
    return head, _exactly(source, body_bytes)


def _exactly(source: IO[bytes], count: int) -> bytes:
    data = source.read(count)
    if len(data) < count:
        raise EOFError
    return data
