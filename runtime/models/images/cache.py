"""Prepared images that are kept, so that one that comes again is not decoded again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from staged_pool.runtime.model import Pixels
from staged_pool.runtime.statistics import ImageCacheStatistics

_ENTRY_BYTES: Final = 512
"""Bytes of an entry beside its values: its key with the scope, and its place."""

PATIENCE_S: Final = 5.0
"""How long a thread waits for another that prepares its image: longer than any image takes, also where all cores
are busy, and not for ever, or one decoder that hangs would hold every thread that is shown the same image."""


@dataclass(slots=True, eq=False)
class _Making:
    """An image that one thread prepares, and others may wait for."""

    done: threading.Event = field(default_factory=threading.Event)
    pixels: Pixels | None = None
    """None when done: it could not be prepared."""


class ImageCache:
    """Keeps what was used last, up to a number of bytes. Any number of threads may use it.

    One image that several threads want is prepared by the first of them; the others wait for it. Where that fails,
    each of them tries for itself and gets an error of its own: a failure is not kept. Where it takes too long, each
    prepares it for itself, too, and who comes later waits for one of them.

    Args:
        max_bytes: Of the values that are kept. What is larger than all of it is not kept.
        patience_s: How long one thread waits for another.
    """

    def __init__(self, max_bytes: int, *, patience_s: float = PATIENCE_S) -> None:
        self._max_bytes = max_bytes
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, Pixels] = OrderedDict()
        self._making: dict[Hashable, _Making] = {}
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
        """What is kept for a key, else what `make` gives, which is kept from then on.

        The values are shared by all who get them: nobody may write to them, and numpy sees to it.

        Raises:
            Exception: What `make` raises in this thread.
        """
        mine = _Making()
        with self._lock:
            if (kept := self._find(key)) is not None:
                return kept
            others = self._making.setdefault(key, mine)
        if others is not mine:
            if others.done.wait(self._patience_s):
                return self._from_others(others, make)
            with self._lock:
                if (kept := self._find(key)) is not None:
                    return kept
                self._making[key] = mine
        return self._make(key, make, mine)

    def clear(self) -> None:
        """Forget every image. One that is being prepared goes to those who wait for it, and is not kept."""
        with self._lock:
            self._kept.clear()
            self._making.clear()
            self._bytes = 0

    def _find(self, key: Hashable) -> Pixels | None:
        if (kept := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            self._hits += 1
        return kept

    def _from_others(self, others: _Making, make: Callable[[], Pixels]) -> Pixels:
        found = others.pixels
        with self._lock:
            if found is None:
                self._misses += 1
            else:
                self._hits += 1
        return make() if found is None else found

    def _make(self, key: Hashable, make: Callable[[], Pixels], making: _Making) -> Pixels:
        try:
            pixels = make()
            pixels.values.flags.writeable = False
            making.pixels = pixels
            return pixels
        finally:
            with self._lock:
                self._misses += 1
                if self._making.get(key) is making:  # else it was cleared meanwhile, or took too long
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
    """What two images share only if they are the same bytes with the same options.

    Hashing releases the interpreter's lock and takes a fraction of decoding.
    """
    # Numbers, texts and lists, each of which has a repr() of its own; sorted, since their order says nothing.
    said = repr(_ordered(options)).encode()
    return blake2b(said, digest_size=16).digest() + blake2b(data, digest_size=32).digest()


def _ordered(value: object) -> object:
    if isinstance(value, Mapping):
        return sorted((str(name), _ordered(inner)) for name, inner in value.items())
    if isinstance(value, list | tuple):
        return [_ordered(inner) for inner in value]
    return value


def _size(pixels: Pixels) -> int:
    return pixels.values.nbytes + _ENTRY_BYTES
