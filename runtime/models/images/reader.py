"""Reader of images: the whole preprocessing from encoded bytes to device input."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from io import BytesIO
from typing import Any, Final, cast

from PIL import Image as Pillow

from staged_pool.runtime.config import EngineConfig, ImagePath
from staged_pool.runtime.memory.budget import MemoryBudget
from staged_pool.runtime.memory.decode_memory import DecodeMemory
from staged_pool.runtime.models.images.cache import ImageCache
from staged_pool.runtime.models.images.decode import Encoded, ImageLimits
from staged_pool.runtime.models.images.exact_processor import read_exact
from staged_pool.runtime.models.images.footprint import exact_memory, fast_memory, tiles_memory
from staged_pool.runtime.models.images.options import ImageOptions, OptionsReader
from staged_pool.runtime.models.images.scale import Scale
from staged_pool.runtime.models.images.settings import ImageSettings, load_processor
from staged_pool.runtime.models.images.sizes import Size, TileGrid
from staged_pool.runtime.payloads import Pixels
from staged_pool.runtime.requests import Image
from staged_pool.runtime.statistics import ImageCacheStatistics
from staged_pool.runtime.workers.jobs import JobFailed, WorkerDied
from staged_pool.runtime.workers.pool import WorkerPool
from staged_pool.stages.errors import TooLarge, UnusableMedia

_USUAL_PIXELS: Final = (224, 224)
"""Width and height, in pixels, of the image of a warm-up."""

_MOST_MADE: Final[Size] = (2048, 2048)
"""Largest height and width that memory is reserved for, with an unknown processor."""


class ImageReader:
    """Prepares images for one model. Thread-safe; a call runs on one core.

    The fast path resizes with torch, which the first image imports. `open_reader` chooses between the paths.

    Args:
        settings: Settings of the model's folder.
        config: Limits.
        memory: Budget of memory for decodes. None: no limit.
        reason: Reason for the exact path. None: images take the fast path.
        processor: The result of `load_processor`, which the exact path calls. None: worker processes load it.

    Raises:
        ConfigError: The folder's own code cannot be loaded.
    """

    def __init__(
        self,
        settings: ImageSettings,
        config: EngineConfig,
        memory: MemoryBudget | None = None,
        *,
        reason: str | None = None,
        processor: Any = None,
    ) -> None:
        self.settings = settings
        self.reason = reason
        self._processor = processor
        self._decodes = (memory or MemoryBudget(2**62)).decodes
        self._limits = ImageLimits(config.max_image_bytes, config.max_image_pixels)
        self._draft = config.image_draft
        self._options = OptionsReader(settings, config.max_image_pixels)
        self._cache = ImageCache(config.image_cache_mb * 10**6) if config.image_cache_mb else None
        self._workers: WorkerPool | None = None
        if config.preprocess_place(custom_code=settings.custom_code) == "process":
            self._workers = WorkerPool("images", ImageWork(settings, config, reason), config.image_preprocess_threads)

    @property
    def decodes(self) -> DecodeMemory:
        """Memory of all decodes together."""
        return self._decodes

    @property
    def path(self) -> ImagePath:
        return "fast" if self.reason is None else "exact"

    @property
    def scale(self) -> Scale:
        """Scale of the prepared images, for `to_device`."""
        return self.settings.scale

    def read(self, image: Image, scope: Hashable = None) -> Pixels:
        """Prepare one image.

        Args:
            image: An image whose `source` is the encoded file.
            scope: Sharing scope: a cache hit needs an equal one.

        Raises:
            TooLarge: The image exceeds a limit.
            UnsupportedMedia: The format is not supported.
            UnusableMedia: The image is damaged, or one edge is too long for the other.
            InvalidInput: An option is invalid.
        """
        data = _content(image)
        options = self._options.read(image.options)
        if self._cache is None:
            return self.prepare(data, options)
        return self.cached(options.key(data), scope, lambda: self.prepare(data, options))

    def cached(self, key: bytes, scope: Hashable, make: Callable[[], Pixels]) -> Pixels:
        """Return the cached result of `make` for a key within a sharing scope; make it if there is none."""
        if self._cache is None:
            return make()
        return self._cache.get(key if scope is None else (key, scope), make)

    def read_alone(self, encoded: bytes) -> Pixels:
        """Prepare an image without options and without the cache. Raises the errors of `read`."""
        return self.prepare(encoded, self._options.read({}))

    def warm_up(self) -> None:
        """Prepare a grey image, without the cache: the first image imports torch."""
        file = BytesIO()
        Pillow.new("RGB", _USUAL_PIXELS, (128, 128, 128)).save(file, "PNG")
        self.read_alone(file.getvalue())

    def grid(self, image: Image) -> Size | None:
        """Return the `grid` of the prepared image. The fast path reads only the header.

        Raises:
            InvalidInput: An error of `read`. The fast path does not find damage after the header.
        """
        options = self._options.read(image.options)
        if self.reason is not None:
            return self.prepare(_content(image), options).grid  # without the cache: the scope is unknown
        encoded = Encoded(_content(image), self._limits)
        target, edge = self._options.check(options, encoded.size), options.settings.patch_size
        return None if edge is None else (target[0] // edge, target[1] // edge)

    def patches(self, image: Image) -> int | None:
        """Return the `patches` of the prepared image; see `grid`."""
        grid = self.grid(image)
        return None if grid is None else math.prod(grid)

    @property
    def cache(self) -> ImageCacheStatistics | None:
        """Statistics of the cache of prepared images. None: there is no cache."""
        return None if self._cache is None else self._cache.statistics

    def clear_cache(self) -> None:
        if self._cache is not None:
            self._cache.clear()

    def close(self) -> None:
        """End the worker processes, if there are any."""
        if self._workers is not None:
            self._workers.close()

    def memory(self, image: Image) -> int:
        """Estimate the peak memory of `read` in bytes, from the header. Raises the errors of `read`."""
        options = self._options.read(image.options)
        encoded, _ = self._open(_content(image), options)
        return self._memory(encoded, options)

    def prepare(self, data: bytes, options: ImageOptions) -> Pixels:
        """Prepare an image without the cache, with options that are checked. Raises the errors of `read`."""
        encoded, target = self._open(data, options)
        needed, had = self._memory(encoded, options), self._decodes.most_bytes
        if needed > had:
            raise TooLarge(
                f"The image has {encoded.size[1]} x {encoded.size[0]} pixels, and reading it takes {needed // 10**6} "
                f"MB of memory: this server has {had // 10**6} MB for that."
            )
        with self._decodes.room(needed):
            if self._workers is not None:
                return self._read_in_process(self._workers, data, options)
            image = encoded.load(options.background)
            target = target or self._options.check(options, image.size)
            if self.reason is None:
                from staged_pool.runtime.models.images.fast_processor import read_fast  # imports torch

                return read_fast(image, target, options.settings)
            return read_exact(image.whole(), self._processor, self.settings, options.arguments)

    def _read_in_process(self, workers: WorkerPool, data: bytes, options: ImageOptions) -> Pixels:
        try:
            return cast(Pixels, workers.call((pickle.PickleBuffer(data), options)))
        except WorkerDied as error:
            raise UnusableMedia("The model's image processor crashed on the image.") from error
        except JobFailed as error:
            raise UnusableMedia("The model's image processor cannot use the image.") from error

    def _open(self, data: bytes, options: ImageOptions) -> tuple[Encoded, Size | None]:
        """Read the header, and make all checks that need no pixels.

        Returns:
            The encoded image, and the size to resize it to, if its decoder skips detail; else None.
        """
        encoded = Encoded(data, self._limits)
        options.target(encoded.size)  # rejects extreme aspect ratios before decoding
        if self._draft and self.path == "fast":
            target = self._options.check(options, encoded.size)
            if all(2 * wanted <= had for wanted, had in zip(target, encoded.size, strict=True)):
                encoded.shrink(target)
                return encoded, target
        return encoded, None

    def _memory(self, encoded: Encoded, options: ImageOptions) -> int:
        beside = tiles_memory if isinstance(options.settings.resize, TileGrid) else fast_memory
        beside = beside if self.reason is None else exact_memory
        ways = [encoded.size, encoded.size[::-1]]  # the orientation may be known only after decoding
        return encoded.memory + max(beside(size, self._made(options, size)) for size in ways)

    def _made(self, options: ImageOptions, size: Size) -> Size:
        """Return the size after resizing. If it is unknown: the image's own, up to a limit."""
        if options.settings.unknown is not None:
            return min(size, _MOST_MADE, key=math.prod)
        return options.target(size)


def _content(image: Image) -> bytes:
    if not isinstance(image.source, bytes):
        raise TypeError("the image has not been fetched")
    return image.source


@dataclass(frozen=True, slots=True)
class ImageWork:
    """Work of processes that prepare images: jobs are pairs of an encoded image and its options."""

    settings: ImageSettings
    config: EngineConfig
    reason: str | None
    """See `ImageReader.reason`."""

    def open(self) -> Callable[[tuple[bytes, ImageOptions]], Pixels]:
        """Load the image processor, if the path is exact.

        Raises:
            ConfigError: It cannot be loaded.
        """
        own_code, processor = self.settings.custom_code, None
        if self.reason is not None:
            processor = load_processor(self.settings.folder, trust_remote_code=own_code)
        alone = replace(self.config, preprocess_workers="thread", image_cache_mb=0)
        reader = ImageReader(self.settings, alone, reason=self.reason, processor=processor)
        if not own_code:  # such code may reject a plain image, or keep count of its images
            reader.warm_up()
        return lambda job: reader.prepare(bytes(job[0]), job[1])
