"""Cache of prepared images, which saves decoding an image again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from staged_pool.runtime.payloads import Pixels
from staged_pool.runtime.statistics import ImageCacheStatistics

_ENTRY_BYTES: Final = 512
"""Bytes of an entry beside its values: its key, its scope, and its slot."""

WAIT_TIMEOUT_S: Final = 5.0
"""Seconds that a thread waits for another that prepares the same image.

It is longer than any image takes on busy cores. Without a limit, one decoder that hangs would block every thread with
the same image."""


@dataclass(slots=True, eq=False)
class _PendingImage:
    """An image that one thread is preparing, and that others may wait for."""

    done: threading.Event = field(default_factory=threading.Event)
    pixels: Pixels | None = None
    """The result. None after `done`: preparing failed."""


class ImageCache:
    """Thread-safe LRU cache of prepared images, limited in bytes.

    If several threads need one image, the first prepares it, and the others wait. If that fails, each of them prepares
    it by itself and gets its own error: failures are not cached. If it takes too long, each prepares it by itself, and
    later threads wait for one of them.

    Args:
        max_bytes: Limit of all values together. A larger image is not cached.
        timeout_s: Seconds that one thread waits for another.
    """

    def __init__(self, max_bytes: int, *, timeout_s: float = WAIT_TIMEOUT_S) -> None:
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, Pixels] = OrderedDict()
        self._making: dict[Hashable, _PendingImage] = {}
        self._bytes = 0
        self._hits = 0
        self._misses = 0

    @property
    def statistics(self) -> ImageCacheStatistics:
        with self._lock:
            return ImageCacheStatistics(
                hits=self._hits,
                misses=self._misses,
                entries=len(self._kept),
                bytes=self._bytes,
                max_bytes=self._max_bytes,
            )

    def get(self, key: Hashable, make: Callable[[], Pixels]) -> Pixels:
        """Return the image of a key, or prepare it by `make` and cache it.

        All callers share the values, which numpy keeps read-only.

        Raises:
            Exception: Any error of `make` in this thread.
        """
        mine = _PendingImage()
        with self._lock:
            if (kept := self._find(key)) is not None:
                return kept
            current = self._making.setdefault(key, mine)
        if current is not mine:
            if current.done.wait(self._timeout_s):
                return self._from_other_thread(current, make)
            with self._lock:
                if (kept := self._find(key)) is not None:
                    return kept
                self._making[key] = mine
        return self._make(key, make, mine)

    def clear(self) -> None:
        """Remove all images. One in preparation goes to the threads that wait for it, and is not cached."""
        with self._lock:
            self._kept.clear()
            self._making.clear()
            self._bytes = 0

    def _find(self, key: Hashable) -> Pixels | None:
        if (kept := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            self._hits += 1
        return kept

    def _from_other_thread(self, making: _PendingImage, make: Callable[[], Pixels]) -> Pixels:
        found = making.pixels
        with self._lock:
            if found is None:
                self._misses += 1
            else:
                self._hits += 1
        return make() if found is None else found

    def _make(self, key: Hashable, make: Callable[[], Pixels], making: _PendingImage) -> Pixels:
        try:
            pixels = make()
            pixels.values.flags.writeable = False
            making.pixels = pixels
            return pixels
        finally:
            with self._lock:
                self._misses += 1
                if self._making.get(key) is making:  # else `clear` was called, or another thread lost its patience
                    del self._making[key]
                    if making.pixels is not None:
                        self._keep(key, making.pixels)
            making.done.set()

    def _keep(self, key: Hashable, pixels: Pixels) -> None:
        size = _size(pixels)
        if size > self._max_bytes:
            return
        self._kept[key] = pixels
        self._bytes += size
        while self._bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= _size(oldest)


def content_key(data: bytes, options: Mapping[str, object]) -> bytes:
    """Return a hash of an image's bytes and options.

    Hashing releases the interpreter's lock, and takes a fraction of the time of decoding.
    """
    # Options are numbers, texts and lists, whose repr() is unique. They are sorted, since their order has no meaning.
    text = repr(_ordered(options)).encode()
    return blake2b(text, digest_size=16).digest() + blake2b(data, digest_size=32).digest()


def _ordered(value: object) -> object:
    if isinstance(value, Mapping):
        return sorted((str(name), _ordered(inner)) for name, inner in value.items())
    if isinstance(value, list | tuple):
        return [_ordered(inner) for inner in value]
    return value


def _size(pixels: Pixels) -> int:
    return pixels.values.nbytes + _ENTRY_BYTES
