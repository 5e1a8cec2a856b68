"""Preprocessing of images by several threads, without queues, devices and HTTP.

Each class is made in a process of its own (see `perf.tools.workers`), because the number of torch's threads and their
idle spinning are settings of the process. So nothing here imports torch before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal

from perf.cost.at_once import Block, per_second
from perf.tools.jpegs import SIZES, Size, jpeg
from staged_pool.runtime.config import EngineConfig
from staged_pool.runtime.payloads import Pixels
from staged_pool.runtime.requests import Image
from staged_pool.runtime.threads.openmp import VARIABLES

Way = Literal["fast", "exact", "stock"]
"""Code that preprocesses an image.

- `fast`: our own code.
- `exact`: the folder's image processor on Pillow and numpy, with one torch thread.
- `stock`: the image processor that transformers selects, with torch's default threads.
"""

PROCESSORS: Final = {
    "CLIP": "CLIPImageProcessorPil",
    "SigLIP": "SiglipImageProcessorPil",
    "SigLIP2 NaFlex": "Siglip2ImageProcessorPil",
    "Qwen2-VL": "Qwen2VLImageProcessorPil",
}
"""Image processors of transformers, by family.

By their defaults, images become 224 x 224 pixels (CLIP as in ViT-B/32, SigLIP). NaFlex makes at most 256 patches of
16 x 16 pixels, and Qwen2-VL at most a million pixels.
"""

_IMAGES: Final = 8


@dataclass(frozen=True, slots=True)
class Given:
    """Images of one size, for one family."""

    family: str
    size: Size


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one image: CPU seconds, and bytes that go to the device."""

    decode_s: float
    """Decoding, which is a part of the next two times."""
    fast_s: float
    exact_s: float
    fast_bytes: int
    exact_bytes: int
    stock_bytes: int
    """Output of the image processor; the exact path omits copies and padding, which the device makes."""


class Images:
    """Preprocessing of images in one way, one image a call.

    Args:
        folders: Folders of image processors by family.
        way: Code that preprocesses the images.
    """

    def __init__(self, folders: Mapping[str, Path], way: Way) -> None:
        if way == "stock":
            for name in VARIABLES:  # a program that only calls an image processor does not set them
                os.environ.pop(name, None)
        self._prepare = {
            family: stock(folder) if way == "stock" else ours(folder, way) for family, folder in folders.items()
        }
        self._images = {size: _jpegs(size) for size in SIZES}

    def __call__(self, block: Block[Given]) -> float:
        """Return the images a second."""
        prepare, images = self._prepare[block.what.family], self._images[block.what.size]

        def call(number: int) -> int:
            prepare(images[number % len(images)])
            return 1

        return per_second(call, block.threads, block.seconds)


class Costs:
    """Cost of each way, on one idle thread.

    Args:
        folders: Folders of image processors by family.
    """

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self._fast, self._exact = (
            {family: ours(folder, way) for family, folder in folders.items()} for way in ("fast", "exact")
        )
        self._stock = {family: stock(folder) for family, folder in folders.items()}
        self._images = {size: _jpegs(size) for size in SIZES}

    def __call__(self, given: Given) -> Cost:
        """Return the medians over a few images."""
        fast, exact = self._fast[given.family], self._exact[given.family]
        images = self._images[given.size]
        seconds = [(_cpu_s(_decode, one), _cpu_s(fast, one), _cpu_s(exact, one)) for one in images]
        decode_s, fast_s, exact_s = map(median, zip(*seconds[1:], strict=True))  # the first one is there to warm up
        return Cost(
            decode_s,
            fast_s,
            exact_s,
            fast_bytes=fast(images[0]).values.nbytes,
            exact_bytes=exact(images[0]).values.nbytes,
            stock_bytes=self._stock[given.family](images[0])["pixel_values"].nbytes,
        )


@contextmanager
def processor_folders() -> Iterator[Mapping[str, Path]]:
    """Make folders with only an image processor, by family; they are removed at the end of the block."""
    import transformers

    with TemporaryDirectory(prefix="perf-processors-") as name:
        folders = {family: Path(name) / family for family in PROCESSORS}
        for family, folder in folders.items():
            getattr(transformers, PROCESSORS[family])().save_pretrained(folder)
        yield folders


def ours(folder: Path, way: Literal["fast", "exact"]) -> Callable[[bytes], Pixels]:
    """Return the server's function that preprocesses an encoded image.

    Raises:
        ValueError: The server does not use this path for this image processor.
    """
    import torch

    from staged_pool.runtime.models.images.open_reader import open_reader
    from staged_pool.runtime.models.images.settings import read_image_settings

    reader = open_reader(read_image_settings(folder), EngineConfig(image_path=way))
    if reader.path != way:
        raise ValueError(f"{folder.name}: not the {way} path: {reader.reason}")

    def prepare(image: bytes) -> Pixels:
        torch.set_num_threads(1)
        return reader.read(Image(image))

    return prepare


def stock(folder: Path) -> Callable[[bytes], Any]:
    """Return the image processor that transformers selects, called as in its documentation."""
    from PIL import Image as Pillow
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(folder)

    def prepare(image: bytes) -> Any:
        return processor(images=Pillow.open(BytesIO(image)).convert("RGB"), return_tensors="pt")

    return prepare


def stock_class(folder: Path) -> str:
    """Return the name of its class, which depends on torchvision being installed."""
    from transformers import AutoImageProcessor

    return type(AutoImageProcessor.from_pretrained(folder)).__name__


def _decode(image: bytes) -> object:
    from staged_pool.runtime.models.images.decode import Encoded, ImageLimits

    config = EngineConfig()
    return Encoded(image, ImageLimits(config.max_image_bytes, config.max_image_pixels)).decode()


def _cpu_s(call: Callable[[bytes], object], image: bytes) -> float:
    """Return the CPU time of a call in this thread, in seconds."""
    began_s = time.thread_time()
    call(image)
    return time.thread_time() - began_s


def _jpegs(size: Size) -> list[bytes]:
    return [jpeg(size, seed) for seed in range(_IMAGES)]
