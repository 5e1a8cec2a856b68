"""Every form of PNG, written byte by byte, beside the pixels of its specification.

The oracle is https://www.w3.org/TR/png-3: sample depth scaling by its section 13.12 (for 16 bits the upper 8 are kept),
transparency by 11.3.1.1, the order of pixels in Adam7 by 8.1.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any, Final

import numpy as np
import pytest
from numpy.typing import NDArray

from staged_pool.runtime.models.images.decode import Encoded, ImageLimits

SIZE: Final = (11, 13)
BACKGROUND: Final = (9, 99, 199)
CHANNELS: Final = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
"""Samples of a pixel: of grey, RGB, a palette, grey with alpha, RGB with alpha."""
DEPTHS: Final = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
PASSES: Final = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))

Numbers = NDArray[np.int64]


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def packed(row: Numbers, depth: int) -> bytes:
    bits = "".join(f"{value:0{depth}b}" for value in row.reshape(-1).tolist())
    bits += "0" * (-len(bits) % 8)
    return b"\x00" + int(bits, 2).to_bytes(len(bits) // 8, "big")


def png(samples: Numbers, depth: int, kind: int, chunks: bytes, *, interlaced: bool) -> bytes:
    height, width = samples.shape[:2]
    rows = list(samples)
    if interlaced:
        rows = [row for x, y, dx, dy in PASSES for row in samples[y::dy, x::dx] if row.size]
    header = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, interlaced)
    data = zlib.compress(b"".join(packed(row, depth) for row in rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunks + chunk(b"IDAT", data) + chunk(b"IEND", b"")


FORMS: Final = [
    (kind, depth, clear)
    for kind, depths in DEPTHS.items()
    for depth in depths
    for clear in ((False, True) if kind in (0, 2, 3) else (False,))
]


@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize(("kind", "depth", "clear"), FORMS)
def test_every_form_shows_the_pixels_that_it_stands_for(kind: int, depth: int, clear: bool, interlaced: bool) -> None:
    random = np.random.default_rng(1)
    most = 2**depth - 1
    samples: Numbers = random.integers(0, most + 1, (*SIZE, CHANNELS[kind]))
    if depth == 16 and clear:
        samples &= 0x0303  # few values, so that some differ from the transparent one in their lower bits only
    alpha: Any = np.full(SIZE, 255)
    chunks = b""
    if kind == 3:
        palette = random.integers(0, 256, (most + 1, 3))
        chunks = chunk(b"PLTE", palette.astype(np.uint8).tobytes())
        colours = palette[samples[..., 0]]
    else:
        eight = samples >> 8 if depth == 16 else samples * (255 // most)
        if kind in (4, 6):
            eight, alpha = eight[..., :-1], eight[..., -1]
        colours = np.broadcast_to(eight, (*SIZE, 3))
    if clear and kind == 3:
        alphas = np.full(most + 1, 255)
        alphas[: (most + 1) // 2] = random.integers(0, 256, (most + 1) // 2)
        chunks += chunk(b"tRNS", alphas[: (most + 1) // 2].astype(np.uint8).tobytes())
        alpha = alphas[samples[..., 0]]
    elif clear:
        chosen = samples[3, 4]
        chunks += chunk(b"tRNS", struct.pack(f">{len(chosen)}H", *chosen.tolist()))
        alpha = np.where((samples == chosen).all(axis=-1), 0, 255)
    data = png(samples, depth, kind, chunks, interlaced=interlaced)
    found = np.asarray(Encoded(data, ImageLimits(10**6, 10**6)).decode(BACKGROUND)).astype(float)
    wanted = (colours * alpha[..., None] + np.array(BACKGROUND) * (255 - alpha[..., None])) / 255
    assert np.abs(found - wanted).max() <= 1.01
