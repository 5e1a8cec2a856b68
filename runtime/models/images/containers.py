"""Bounds on what a decoder does before the first pixel: parts of a file, texts that unpack, run-length codes.

Pillow reads the parts of a file in Python, a few microseconds each and under the interpreter's lock. A file may consist
of millions.
"""

from __future__ import annotations

import io
from typing import Final

from staged_pool.runtime.models.images.sizes import Size
from staged_pool.stages.errors import UnusableMedia

FREE_READS: Final = 2**14
READ_BYTES: Final = 128
"""A file may be read in 16,384 pieces and one more for each 128 bytes. A chunk of a PNG is three pieces and mostly
holds kilobytes; a block of a GIF is two and holds 255 bytes."""

MAX_PACKED: Final = 128
"""Compressed texts and profiles of one PNG. Each may unpack to Pillow's limit of a megabyte, about a millisecond."""

MAX_RUN_PIXELS: Final = 2**21
MAX_RUN_BYTES: Final = 2**20
"""Size of a BMP in run-length codes, which Pillow reads in Python: about 0.15 us a pixel and 1 us a code."""

_PACKED: Final = frozenset({b"iCCP", b"zTXt", b"iTXt"})


class BoundedFile(io.BytesIO):
    """An encoded image, for a decoder that reads it in pieces.

    Args:
        data: The file.
        format: What it is called in errors.
    """

    def __init__(self, data: bytes, format: str) -> None:
        super().__init__(data)
        self._format = format
        # `check_bmp` bounds the codes of a BMP, which are read byte by byte.
        self._left = FREE_READS + len(data) // (1 if format == "BMP" else READ_BYTES)

    def read(self, size: int | None = -1, /) -> bytes:
        """Read so many bytes.

        Raises:
            UnusableMedia: There were too many pieces before this one.
        """
        self._left -= 1
        if self._left < 0:
            raise UnusableMedia(
                f"The image is a {self._format} of very many small parts: at most {FREE_READS} are read, and one "
                f"more for each {READ_BYTES} bytes."
            )
        return super().read(size)


def check_png(data: bytes) -> None:
    """Reject a PNG of very many compressed texts and profiles.

    Chunks are counted up to the number that is read at all, so that this is a few milliseconds at most.

    Raises:
        UnusableMedia: There are more than `MAX_PACKED`.
    """
    place, packed, left = 8, 0, FREE_READS + len(data) // READ_BYTES
    while place + 8 <= len(data) and packed <= MAX_PACKED and left > 0:
        kind = data[place + 4 : place + 8]
        if kind == b"IEND":
            return
        packed += kind in _PACKED
        place += 12 + int.from_bytes(data[place : place + 4], "big")
        left -= 3
    if packed > MAX_PACKED:
        raise UnusableMedia(f"The image is a PNG of more than {MAX_PACKED} compressed texts: no more are unpacked.")


def check_bmp(data: bytes, size: Size, *, in_runs: bool) -> None:
    """Reject a BMP that takes long to read.

    Args:
        data: The file.
        size: Height and width in pixels.
        in_runs: It is in run-length codes.

    Raises:
        UnusableMedia: It is in run-length codes, and large.
    """
    if in_runs and (size[0] * size[1] > MAX_RUN_PIXELS or len(data) > MAX_RUN_BYTES):
        raise UnusableMedia(
            f"The image is a BMP in run-length codes, of {size[1]} x {size[0]} pixels in {len(data)} bytes: at most "
            f"{MAX_RUN_PIXELS} pixels and {MAX_RUN_BYTES} bytes are read. Send it as a PNG."
        )
