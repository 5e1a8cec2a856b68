"""Encoded images of any size and kind, made by code."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable

from PIL import Image as Pillow

Make = Callable[[int], bytes]
"""Function that makes an encoded square image from its edge in pixels."""


def png(depth: int, colour: int, *, interlaced: bool = False, clear: bytes = b"") -> Make:
    """Make a PNG of zeros: a few kilobytes, whatever it unpacks to."""
    samples = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]

    def make(edge: int) -> bytes:
        packer = zlib.compressobj(9)
        passes = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)]
        packed = []
        for left, top, across, down in passes if interlaced else [(0, 0, 1, 1)]:
            wide, high = -(-(edge - left) // across), -(-(edge - top) // down)
            row = bytes(1 + -(-wide * depth * samples // 8))
            packed += [packer.compress(row * min(256, high - done)) for done in range(0, high, 256)]
        header = struct.pack(">IIBBBBB", edge, edge, depth, colour, 0, 0, int(interlaced))
        parts = [(b"IHDR", header)]
        parts += [(b"PLTE", bytes(range(6)))] if colour == 3 else []
        parts += [(b"tRNS", clear)] if clear else []
        parts += [(b"IDAT", b"".join(packed) + packer.flush()), (b"IEND", b"")]
        return b"\x89PNG\r\n\x1a\n" + b"".join(
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
            for kind, body in parts
        )

    return make


def saved(mode: str, format: str, **options: object) -> Make:
    """Have Pillow write a plain image."""

    def make(edge: int) -> bytes:
        file = io.BytesIO()
        Pillow.new(mode, (edge, edge)).save(file, format, **options)
        return file.getvalue()

    return make


def noisy(format: str, **options: object) -> Make:
    """Have Pillow write an image that cannot be packed."""

    def make(edge: int) -> bytes:
        file = io.BytesIO()
        Pillow.effect_noise((edge, edge), 100).convert("RGB").save(file, format, **options)
        return file.getvalue()

    return make
