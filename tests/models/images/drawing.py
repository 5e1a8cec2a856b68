"""Images made by code, encoded, and folders of image processors."""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from PIL import Image as Pillow
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.models.images.open_reader import open_reader
from staged_pool.runtime.models.images.reader import ImageReader
from staged_pool.runtime.models.images.settings import read_image_settings
from staged_pool.runtime.requests import Image
from tests.needed import needs, skip_below

Folder: TypeAlias = Callable[[str], Path]

FAMILIES: dict[str, Callable[[], Any]] = {
    "clip": CLIPImageProcessorPil,
    "siglip": lambda: SiglipImageProcessorPil(size={"height": 64, "width": 64}),
    "siglip2-fixed": lambda: SiglipImageProcessorPil(size={"height": 96, "width": 96}, resample=2),
    "siglip2-naflex": lambda: Siglip2ImageProcessorPil(max_num_patches=100),
    "vit": lambda: ViTImageProcessorPil(size={"height": 48, "width": 32}),
    "dinov2": lambda: BitImageProcessorPil(size={"shortest_edge": 256}),
    "colpali": lambda: SiglipImageProcessorPil(size={"height": 112, "width": 112}),
    "qwen2-vl": lambda: Qwen2VLImageProcessorPil(min_pixels=4 * 784, max_pixels=300 * 784),
    "colqwen2": lambda: Qwen2VLImageProcessorPil(min_pixels=4 * 784, max_pixels=64 * 784),
    "qwen3-vl": lambda: Qwen2VLImageProcessorPil(
        patch_size=16, min_pixels=65536, max_pixels=262144, image_mean=[0.5] * 3, image_std=[0.5] * 3
    ),
}
"""The image processor of each kind of model, as in its folders, at small sizes."""

PATCHES = ("siglip2-naflex", "qwen2-vl", "colqwen2", "qwen3-vl")
"""Image processors that give patches; transformers before 5.5 has them with torchvision only."""

ALONE = needs("transformers", "5.5", "an image processor without torchvision")
"""Marks what has one of most other classes."""


def save_family(name: str, folder: Path) -> Path:
    if name in PATCHES:
        skip_below("transformers", "5.5", f"{name} without torchvision")
    FAMILIES[name]().save_pretrained(folder)
    return folder


def save_settings(folder: Path, **settings: object) -> Path:
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def reader(folder: Path, **config: Any) -> ImageReader:
    return open_reader(read_image_settings(folder), EngineConfig(**config))


def pixels(width: int, height: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """[height, width, 3]: slow changes, hard edges and noise, other ones for each seed."""
    random = np.random.default_rng(seed)
    rows, columns = np.arange(height)[:, None], np.arange(width)
    waves = np.stack([np.sin(rows / (5 + seed) + k) * np.cos(columns / (9 - k)) for k in range(3)], axis=-1)
    values = 128 + 100 * waves + random.integers(-20, 20, (height, width, 3))
    values[height // 3 : height // 2, width // 4 : width // 2] = (255, 0, 0)
    return values.clip(0, 255).astype(np.uint8)


def drawing(width: int, height: int, seed: int = 0) -> Pillow.Image:
    return Pillow.fromarray(pixels(width, height, seed))


def encode(source: Pillow.Image, format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    source.save(file, format, **options)
    return file.getvalue()


@lru_cache(256)
def encoded(width: int, height: int, seed: int, format: str) -> bytes:
    """The file of a drawing, made once: it takes longer than its reading, which is tested."""
    return encode(drawing(width, height, seed), format)


def image(width: int, height: int, seed: int = 0, format: str = "PNG", **options: object) -> Image:
    return Image(encoded(width, height, seed, format), options)


def png(width: int, height: int, *chunks: tuple[bytes, bytes], data: bytes = b"") -> bytes:
    """A PNG of RGB; its header may contradict its data."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", header), *chunks, (b"IDAT", zlib.compress(data)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind, body) for kind, body in parts)


def chunk(kind: bytes, body: bytes) -> bytes:
    """A part of a PNG."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
