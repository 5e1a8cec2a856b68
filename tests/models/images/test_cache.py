"""The cache of prepared images: bounded, shared by threads, and never wrong."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staged_pool.runtime.models.images.cache import ImageCache, content_key
from staged_pool.runtime.payloads import Pixels
from staged_pool.runtime.requests import Image
from staged_pool.stages.errors import UnusableMedia
from tests.models.images.drawing import Folder, image, reader

ENTRY_BYTES = 512
"""Bytes that count for an entry beside its values."""


def some(size: int = 3 * 8 * 8, value: int = 0) -> Pixels:
    return Pixels(np.full(size, value, dtype=np.uint8))


class Maker:
    """Makes images, and counts them; may be held back."""

    def __init__(self, made: Pixels | Exception, *, open: bool = True) -> None:
        self.made = made
        self.calls = 0
        self.begun = threading.Semaphore(0)
        self.gate = threading.Event()
        if open:
            self.gate.set()

    def __call__(self) -> Pixels:
        self.calls += 1
        self.begun.release()
        assert self.gate.wait(60)
        if isinstance(self.made, Exception):
            raise type(self.made)(*self.made.args)
        return self.made


def wait_for(cache: ImageCache, waiting: int) -> None:
    """Return when `waiting` threads wait in the cache for another one."""
    while sum(_waits_in_the_cache(thread) for thread in threading.enumerate()) < waiting:
        threading.Event().wait(0.001)


def _waits_in_the_cache(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    seen = set()
    while frame is not None:
        seen.add((frame.f_code.co_filename.rsplit("/", 1)[-1], frame.f_code.co_name))
        frame = frame.f_back
    return (
        ("cache.py", "get") in seen and ("threading.py", "wait") in seen and ("test_cache.py", "__call__") not in seen
    )


def test_an_image_that_comes_again_is_not_made_again() -> None:
    cache, make = ImageCache(10**6), Maker(some(value=3))
    assert cache.get(b"a", make) is cache.get(b"a", make) is make.made
    assert make.calls == 1
    statistics = cache.statistics
    assert (statistics.hits, statistics.misses, statistics.entries) == (1, 1, 1)
    assert statistics.bytes == 3 * 8 * 8 + ENTRY_BYTES


def test_ten_threads_with_one_image_make_it_once() -> None:
    cache, make = ImageCache(10**6), Maker(some(), open=False)
    with ThreadPoolExecutor(10) as pool:
        found = [pool.submit(cache.get, b"a", make) for _ in range(10)]
        wait_for(cache, 9)
        make.gate.set()
        assert all(one.result() is make.made for one in found)
    assert make.calls == 1
    assert (cache.statistics.hits, cache.statistics.misses) == (9, 1)


def test_a_failure_is_not_kept_and_every_thread_that_waits_has_its_own() -> None:
    cache, make = ImageCache(10**6), Maker(UnusableMedia("broken"), open=False)
    with ThreadPoolExecutor(10) as pool:
        found = [pool.submit(cache.get, b"a", make) for _ in range(10)]
        wait_for(cache, 9)
        make.gate.set()
        errors = [one.exception() for one in found]
    assert all(type(error) is UnusableMedia for error in errors)
    assert len(set(map(id, errors))) == 10
    assert make.calls == 10
    assert cache.statistics.entries == 0
    assert cache.get(b"a", Maker(some())).values.size
    assert cache.statistics.entries == 1


def test_a_thread_that_takes_too_long_is_waited_for_no_more_by_anyone() -> None:
    cache, hung, quick = ImageCache(10**6, timeout_s=0.05), Maker(some(value=1), open=False), Maker(some(value=2))
    late = Maker(some(value=3))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cache.get, b"a", hung)
        assert hung.begun.acquire(timeout=60)
        second = pool.submit(cache.get, b"a", quick)
        assert second.result(60) is quick.made
        assert not first.done()
        assert cache.get(b"a", late) is quick.made
        hung.gate.set()
        assert first.result(60) is hung.made  # its caller may still want it, and nobody else is given it
    assert cache.get(b"a", late) is quick.made
    statistics = cache.statistics
    assert (statistics.misses, statistics.entries, statistics.bytes) == (2, 1, 3 * 8 * 8 + ENTRY_BYTES)


def test_a_caller_that_gave_up_waiting_makes_the_image_for_later_callers() -> None:
    cache, hung, next_one = ImageCache(10**6, timeout_s=0.05), Maker(some(), open=False), Maker(some(), open=False)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(cache.get, b"a", hung)
        assert hung.begun.acquire(timeout=60)
        second = pool.submit(cache.get, b"a", next_one)
        assert next_one.begun.acquire(timeout=60)
        cache._timeout_s = 60
        third = pool.submit(cache.get, b"a", next_one)
        wait_for(cache, 1)
        next_one.gate.set()
        assert second.result(60) is third.result(60) is next_one.made
        hung.gate.set()
        first.result(60)
    assert (hung.calls, next_one.calls) == (1, 1)


def test_a_thread_that_makes_one_image_holds_up_no_other() -> None:
    cache, slow = ImageCache(10**6), Maker(some(), open=False)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(cache.get, b"slow", slow)
        assert slow.begun.acquire(timeout=60)
        assert cache.get(b"quick", Maker(some(value=1))).values[0] == 1
        slow.gate.set()
        assert first.result() is slow.made


def test_what_was_used_longest_ago_goes_first() -> None:
    room = 3 * (100 + ENTRY_BYTES)
    cache = ImageCache(room)
    for key in (b"a", b"b", b"c"):
        cache.get(key, Maker(some(100)))
    cache.get(b"a", Maker(some(100)))
    cache.get(b"d", Maker(some(100)))
    again = {key: Maker(some(100)) for key in (b"a", b"c", b"d", b"b")}
    for key, make in again.items():
        cache.get(key, make)
    assert {key: make.calls for key, make in again.items()} == {b"a": 0, b"c": 0, b"d": 0, b"b": 1}
    assert cache.statistics.bytes == room


def test_an_image_that_is_larger_than_the_cache_is_given_and_not_kept() -> None:
    cache = ImageCache(2000)
    cache.get(b"small", Maker(some(100)))
    assert cache.get(b"large", Maker(some(3000))).values.size == 3000
    assert (cache.statistics.entries, cache.statistics.bytes) == (1, 100 + ENTRY_BYTES)


def test_clearing_while_an_image_is_made_gives_it_to_waiting_callers_and_keeps_nothing() -> None:
    cache, make = ImageCache(10**6), Maker(some(), open=False)
    cache.get(b"old", Maker(some()))
    with ThreadPoolExecutor(3) as pool:
        found = [pool.submit(cache.get, b"a", make) for _ in range(3)]
        wait_for(cache, 2)
        cache.clear()
        later = Maker(some(value=9))
        assert cache.get(b"a", later) is later.made
        make.gate.set()
        assert all(one.result() is make.made for one in found)
    assert cache.get(b"a", make) is later.made
    assert cache.statistics.entries == 1


def test_nobody_can_change_what_others_will_be_given() -> None:
    kept = ImageCache(10**6).get(b"a", Maker(some()))
    with pytest.raises(ValueError, match="read-only"):
        kept.values[0] = 1


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abcdefg"), st.integers(0, 3000), st.booleans()), max_size=60),
    st.integers(0, 6000),
)
def test_the_cache_is_an_ordered_dictionary_of_bounded_bytes(
    asked: list[tuple[str, int, bool]], max_bytes: int
) -> None:
    cache = ImageCache(max_bytes)
    model: OrderedDict[str, int] = OrderedDict()
    hits = 0
    for key, size, cleared in asked:
        if cleared and size < 300:
            cache.clear()
            model.clear()
        make = Maker(some(size))
        found = cache.get(key.encode(), make)
        assert make.calls == (key not in model)
        hits += key in model
        if key in model:
            model.move_to_end(key)
            assert found.values.size == model[key]
        elif size + ENTRY_BYTES <= max_bytes:
            model[key] = size
            while sum(model.values()) + ENTRY_BYTES * len(model) > max_bytes:
                model.popitem(last=False)
        statistics = cache.statistics
        assert statistics.entries == len(model)
        assert statistics.bytes == sum(model.values()) + ENTRY_BYTES * len(model) <= max_bytes
        assert (statistics.hits, statistics.misses + statistics.hits) == (hits, statistics.misses + hits)


def test_threads_that_use_a_small_cache_at_once_never_get_another_image() -> None:
    cache = ImageCache(5 * (100 + ENTRY_BYTES))

    def work(seed: int) -> bool:
        random = np.random.default_rng(seed)
        for _ in range(300):
            key = int(random.integers(12))
            if random.random() < 0.02:
                cache.clear()
            if (cache.get(bytes([key]), Maker(some(100, key))).values != key).any():
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
    statistics = cache.statistics
    assert statistics.bytes == statistics.entries * (100 + ENTRY_BYTES) <= statistics.max_bytes


_options = st.dictionaries(
    st.sampled_from(["size", "max_pixels", "do_resize"]),
    st.integers() | st.booleans() | st.text(max_size=3) | st.lists(st.integers(0, 3), max_size=3),
)


@settings(deadline=None)
@given(st.binary(max_size=30), _options, st.binary(max_size=30), _options)
def test_only_the_same_bytes_with_the_same_options_share_a_key(
    data: bytes, options: dict[str, Any], other: bytes, more: dict[str, Any]
) -> None:
    same = data == other and repr(sorted(options.items())) == repr(sorted(more.items()))
    assert (content_key(data, options) == content_key(other, more)) == same
    assert content_key(data, dict(reversed(options.items()))) == content_key(data, options)


def test_a_reader_keeps_images_by_what_they_hold_and_what_is_asked_of_them(family_folder: Folder) -> None:
    keeping = reader(family_folder("qwen2-vl"), image_cache_mb=10)
    given = image(200, 150)
    first = keeping.read(given)
    assert keeping.read(Image(bytes(bytearray(given.source)))) is first  # type: ignore[arg-type]
    assert keeping.read(Image(given.source, {"max_pixels": 300 * 784})).grid == first.grid
    smaller = keeping.read(Image(given.source, {"max_pixels": 8 * 784}))
    assert smaller.grid != first.grid
    assert keeping.read(image(200, 150, seed=1)) is not first
    statistics = keeping.cache
    assert statistics is not None
    assert (statistics.hits, statistics.misses) == (1, 4)
    keeping.clear_cache()
    assert np.array_equal(keeping.read(given).values, first.values)


def test_a_reader_gives_what_it_keeps_to_the_same_scope_only(family_folder: Folder) -> None:
    keeping = reader(family_folder("clip"), image_cache_mb=10)
    given = image(60, 50)
    of_all, of_one, of_other = (keeping.read(given, scope) for scope in (None, ("a", None), ("b", None)))
    assert of_all is not of_one is not of_other
    assert keeping.read(given) is of_all
    assert keeping.read(given, ("a", None)) is of_one
    assert keeping.read(given, ("b", None)) is of_other


def test_counting_patches_neither_reads_nor_fills_what_is_kept(family_folder: Folder) -> None:
    for path in ("fast", "exact"):
        keeping = reader(family_folder("qwen2-vl"), image_cache_mb=10, image_path=path)
        assert keeping.patches(image(60, 50)) == keeping.read(image(60, 50)).patches
        statistics = keeping.cache
        assert statistics is not None
        assert (statistics.hits, statistics.misses) == (0, 1)


def test_a_reader_without_room_keeps_nothing(family_folder: Folder) -> None:
    plain = reader(family_folder("clip"))
    given = image(30, 30)
    assert plain.read(given) is not plain.read(given)
    assert plain.cache is None
