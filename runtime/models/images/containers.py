"""Limits of the parts of an image file, which Pillow reads in Python.

Chunks, compressed texts and run-length codes take microseconds each, under the interpreter's lock. A file may have
millions of them.
"""

from __future__ import annotations

import io
from typing import Final

from staged_pool.runtime.models.images.sizes import Size
from staged_pool.stages.errors import UnusableMedia

FREE_READS: Final = 2**14
READ_BYTES: Final = 128
"""Limit of reads of a file: 16,384, and one more for each 128 bytes.

A chunk of a PNG takes three reads and mostly has kilobytes. A block of a GIF takes two and has up to 255 bytes."""

MAX_PACKED: Final = 128
"""Limit of compressed texts and profiles in a PNG. Each may unpack to Pillow's limit of a megabyte, in about 1 ms."""

MAX_RUN_PIXELS: Final = 2**21
MAX_RUN_BYTES: Final = 2**20
"""Limits of a BMP in run-length codes. Pillow takes about 0.15 us a pixel and 1 us a code for them."""

_PACKED: Final = frozenset({b"iCCP", b"zTXt", b"iTXt"})


class BoundedFile(io.BytesIO):
    """File object of an encoded image, with a limit of reads.

    Args:
        data: The content of the file.
        format: Name of its format, for errors.
    """

    def __init__(self, data: bytes, format: str) -> None:
        super().__init__(data)
        self._format = format
        # A BMP in run-length codes is read byte by byte; `check_bmp` limits it.
        self._left = FREE_READS + len(data) // (1 if format == "BMP" else READ_BYTES)

    def read(self, size: int | None = -1, /) -> bytes:
        """Read up to `size` bytes.

        Raises:
            UnusableMedia: There were too many reads.
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

    It counts at most as many chunks as `BoundedFile` allows, in a few milliseconds.

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
        raise UnusableMedia(f"The image is a PNG of more than {MAX_PACKED} compressed texts: that is the limit.")


def check_bmp(data: bytes, size: Size, *, in_runs: bool) -> None:
    """Reject a large BMP in run-length codes, which would take long to read.

    Args:
        data: The content of the file.
        size: Height and width in pixels.
        in_runs: The file has run-length codes.

    Raises:
        UnusableMedia: The file has run-length codes and is too large.
    """
    if in_runs and (size[0] * size[1] > MAX_RUN_PIXELS or len(data) > MAX_RUN_BYTES):
        raise UnusableMedia(
            f"The image is a BMP in run-length codes, of {size[1]} x {size[0]} pixels in {len(data)} bytes: at most "
            f"{MAX_RUN_PIXELS} pixels and {MAX_RUN_BYTES} bytes are read. Send it as a PNG."
        )
