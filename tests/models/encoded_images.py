"""Images for tests, in the formats and shapes that are sent."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image


def encode(width: int, height: int, kind: str = "JPEG", seed: int = 0) -> bytes:
    """An image of coloured shapes that differ from one seed to another, encoded.

    Args:
        width: In pixels.
        height: In pixels.
        kind: JPEG, PNG or WEBP.
        seed: Which image.
    """
    random = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width] / max(width, height)
    pixels = np.zeros((height, width, 3))
    for colour in range(3):
        across, down, phase = random.uniform((3, 3, 0), (25, 25, 6))
        pixels[..., colour] = 128 + 120 * np.sin(across * x + down * y + phase)
    left, top = (int(random.integers(size // 2)) for size in (width, height))
    pixels[top : top + height // 3, left : left + width // 4] = random.uniform(0, 255, 3)
    out = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(out, kind, **({"quality": 90} if kind != "PNG" else {}))
    return out.getvalue()
