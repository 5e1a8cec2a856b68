"""Ready frames of a video: images that their caller has chosen, joined in one value."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from staged_pool.stages.errors import InvalidInput

_MARK: Final = b"\x89staged-pool frames\r\n\x1a\n"
_COUNT: Final = struct.Struct(">I")
MAX_FRAMES: Final = 100_000


def join_frames(frames: Sequence[bytes]) -> bytes:
    """Join encoded images, such as JPEGs, as the source of a `Video`.

    Raises:
        InvalidInput: There is no frame, there are more than `MAX_FRAMES`, or one of them is not `bytes`.
    """
    for index, frame in enumerate(frames):
        given: object = frame
        if not isinstance(given, bytes):
            raise InvalidInput(
                f"Frame {index} must be the bytes of an encoded image, such as a JPEG, not of type "
                f"{type(given).__name__}. Pass `path.read_bytes()` of a file, or `image.source` of an Image.",
                param="input",
            )
    if not 1 <= len(frames) <= MAX_FRAMES:
        raise InvalidInput(f"A video has 1 to {MAX_FRAMES} ready frames, not {len(frames)}.", param="input")
    sizes = struct.pack(f">{len(frames)}I", *map(len, frames))
    return b"".join((_MARK, _COUNT.pack(len(frames)), sizes, *frames))


def split_frames(data: bytes) -> list[bytes] | None:
    """Return the images of `join_frames`. None: the value is something else, such as an encoded video."""
    if not data.startswith(_MARK):
        return None
    start = len(_MARK) + _COUNT.size
    if len(data) < start:
        return None
    (count,) = _COUNT.unpack_from(data, len(_MARK))
    end = start + _COUNT.size * count
    if not 1 <= count <= MAX_FRAMES or len(data) < end:
        return None
    sizes = struct.unpack_from(f">{count}I", data, start)
    if end + sum(sizes) != len(data):
        return None
    found = []
    for size in sizes:
        found.append(data[end : end + size])
        end += size
    return found
